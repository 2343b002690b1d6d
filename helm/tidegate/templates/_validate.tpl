{{- /* Checks that a schema cannot express: values that contradict each other. Each message says what to do. */ -}}
{{- define "tidegate.validate" -}}
{{- $redis := .Values.redis -}}
{{- if eq .Values.store "memory" -}}
{{- if or .Values.autoscaling.enabled (gt (int .Values.replicaCount) 1) -}}
{{- fail "store: memory counts separately in each pod, so several pods would each admit the whole limit: set replicaCount: 1 and autoscaling.enabled: false, or set store: redis" -}}
{{- end -}}
{{- if or $redis.url $redis.bundled.enabled -}}
{{- fail "store: memory uses no Redis, but redis.url or redis.bundled.enabled is set: set store: redis, or remove them" -}}
{{- end -}}
{{- else -}}
{{- if not .Values.onStoreFailure -}}
{{- fail "onStoreFailure is required with store: redis: set error (the setting of the caller decides), open (admits), closed (refuses) or local (each pod counts its share of the limit)" -}}
{{- end -}}
{{- if and $redis.url $redis.bundled.enabled -}}
{{- fail "redis.url and redis.bundled.enabled are both set: remove one of them" -}}
{{- end -}}
{{- if not (or $redis.url $redis.bundled.enabled) -}}
{{- fail "store: redis needs a Redis: set redis.url, or redis.bundled.enabled: true for a trial" -}}
{{- end -}}
{{- if contains "@" $redis.url -}}
{{- fail "redis.url contains a user or a password, which everyone who reads the pod could see: put it into a Secret, and set redis.auth.existingSecret to its name" -}}
{{- end -}}
{{- if and $redis.bundled.enabled (or (ne $redis.type "single") $redis.auth.existingSecret $redis.tls.enabled) -}}
{{- fail "redis.bundled.enabled deploys one server without password and TLS: remove redis.type, redis.auth and redis.tls" -}}
{{- end -}}
{{- if and $redis.auth.existingSecret .Values.settings.REDIS_AUTH_COMMAND -}}
{{- fail "redis.auth.existingSecret and settings.REDIS_AUTH_COMMAND both give the password of Redis, and pods would not start: remove one of them" -}}
{{- end -}}
{{- if and $redis.tls.existingSecret (not $redis.tls.enabled) -}}
{{- fail "redis.tls.existingSecret is set, but redis.tls.enabled is false: set redis.tls.enabled: true, or remove the Secret" -}}
{{- end -}}
{{- if ne (empty $redis.tls.certKey) (empty $redis.tls.keyKey) -}}
{{- fail "redis.tls.certKey and redis.tls.keyKey belong together: set both, or none" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.rules.existingConfigMap .Values.rules.files -}}
{{- fail "rules.existingConfigMap and rules.files are both set: remove one of them" -}}
{{- end -}}
{{- if .Values.xds.enabled -}}
{{- if not .Values.xds.url -}}
{{- fail "xds.enabled needs xds.url: set the address of the control plane, such as envoy-gateway.envoy-gateway-system:18001" -}}
{{- end -}}
{{- if or .Values.rules.files .Values.rules.existingConfigMap -}}
{{- fail "xds.enabled takes the rules from the control plane, but rules.files or rules.existingConfigMap is set: remove one of them" -}}
{{- end -}}
{{- if ne (empty .Values.xds.tls.certKey) (empty .Values.xds.tls.keyKey) -}}
{{- fail "xds.tls.certKey and xds.tls.keyKey belong together: set both, or none" -}}
{{- end -}}
{{- end -}}
{{- $tls := .Values.grpc.tls -}}
{{- if and $tls.enabled (not (or $tls.existingSecret $tls.certManager.enabled)) -}}
{{- fail "grpc.tls.enabled needs a certificate: set grpc.tls.existingSecret to the name of the Secret with the certificate and its key, or grpc.tls.certManager.enabled: true" -}}
{{- end -}}
{{- if $tls.certManager.enabled -}}
{{- if not $tls.enabled -}}
{{- fail "grpc.tls.certManager.enabled is true, but grpc.tls.enabled is false: set grpc.tls.enabled: true, or remove the Certificate" -}}
{{- end -}}
{{- if $tls.existingSecret -}}
{{- fail "grpc.tls.existingSecret and grpc.tls.certManager.enabled are both set: remove one of them" -}}
{{- end -}}
{{- if not $tls.certManager.issuer -}}
{{- fail "grpc.tls.certManager.enabled needs grpc.tls.certManager.issuer: set the name of an issuer of cert-manager" -}}
{{- end -}}
{{- if or (ne $tls.certKey "tls.crt") (ne $tls.keyKey "tls.key") -}}
{{- fail "cert-manager writes tls.crt and tls.key: remove grpc.tls.certKey and grpc.tls.keyKey" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.grpc.tls.existingSecret (not .Values.grpc.tls.enabled) -}}
{{- fail "grpc.tls.existingSecret is set, but grpc.tls.enabled is false: set grpc.tls.enabled: true, or remove the Secret" -}}
{{- end -}}
{{- if and .Values.grpc.tls.clientCaKey (not .Values.grpc.tls.enabled) -}}
{{- fail "grpc.tls.clientCaKey is set, but grpc.tls.enabled is false, so nobody would be verified: set grpc.tls.enabled: true, or remove the key" -}}
{{- end -}}
{{- range $name := list "HTTP_SERVER_USE_TLS" "DEBUG_SERVER_USE_TLS" -}}
{{- if and (include "tidegate.isOn" (index $.Values.settings $name)) (not $.Values.grpc.tls.enabled) -}}
{{- fail (printf "settings.%s is set, but grpc.tls.enabled is false, and all listeners have its certificate: set grpc.tls.enabled: true too" $name) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.admin.tokens.existingSecret (not .Values.grpc.tls.enabled) -}}
{{- fail "admin.tokens.existingSecret is set, but grpc.tls.enabled is false, so tokens would cross the network in plaintext: set grpc.tls.enabled: true, whose certificate the debug listener has too" -}}
{{- end -}}
{{- if and .Values.admin.tokens.existingSecret (not .Values.admin.hosts) (not .Values.service.headless.enabled) -}}
{{- fail "admin.tokens.existingSecret needs names under which readers ask: set service.headless.enabled: true, whose name means all pods, or admin.hosts" -}}
{{- end -}}
{{- if and .Values.admin.tokens.existingSecret (hasKey .Values.settings "DEBUG_SERVER_USE_TLS") (not (include "tidegate.isOn" .Values.settings.DEBUG_SERVER_USE_TLS)) -}}
{{- fail "admin.tokens.existingSecret serves the debug listener over TLS, but settings.DEBUG_SERVER_USE_TLS says no: remove it" -}}
{{- end -}}
{{- if and .Values.settings.GRPC_CLIENT_TLS_SAN (not .Values.grpc.tls.clientCaKey) -}}
{{- fail "settings.GRPC_CLIENT_TLS_SAN is set, but grpc.tls.clientCaKey is empty, so nobody would be verified: set grpc.tls.clientCaKey: ca.crt, or remove the names" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled (include "tidegate.isHttpOverTls" .) (not .Values.serviceMonitor.tlsConfig) -}}
{{- fail "serviceMonitor.enabled and settings.HTTP_SERVER_USE_TLS need serviceMonitor.tlsConfig: Prometheus asks each pod by its address, so set ca and serverName (a name of the certificate)" -}}
{{- end -}}
{{- if .Values.settings.GRPC_UDS -}}
{{- fail "settings.GRPC_UDS would serve gRPC on a socket in the pod, and on no port: remove it" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.grpcFrom) -}}
{{- fail "networkPolicy.grpcFrom is empty, so nobody could call: name the pods of your gateways, such as [{ namespaceSelector: { matchLabels: { kubernetes.io/metadata.name: envoy-gateway-system } } }], or [{ podSelector: {} }] for every pod of the namespace; networkPolicy.enabled: false lets everyone in the cluster call" -}}
{{- end -}}
{{- if and .Values.callers.existingConfigMap .Values.callers.file -}}
{{- fail "callers.existingConfigMap and callers.file are both set: remove one of them" -}}
{{- end -}}
{{- if .Values.callers.file -}}
{{- $callers := fromYaml .Values.callers.file -}}
{{- if $callers.Error -}}
{{- fail (printf "callers.file is not a mapping in YAML, so pods would not start: %s" $callers.Error) -}}
{{- end -}}
{{- if not (include "tidegate.areClientsVerified" .) -}}
{{- if kindIs "slice" $callers.callers -}}
{{- range $item := $callers.callers -}}
{{- if kindIs "map" $item -}}
{{- if kindIs "slice" $item.names -}}
{{- range $name := $item.names -}}
{{- if ne (toString $name) "anonymous" -}}
{{- fail (printf "callers.file names %v, but client certificates are not verified, so every caller would be `anonymous` and this one would be denied its domains: set grpc.tls.enabled: true and grpc.tls.clientCaKey: ca.crt, or name `anonymous` only" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.overlay.existingConfigMap .Values.overlay.files -}}
{{- fail "overlay.existingConfigMap and overlay.files are both set: remove one of them" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas: lower the minimum, or raise the maximum" -}}
{{- end -}}
{{- if and .Values.tracing.enabled (not .Values.tracing.endpoint) -}}
{{- fail "tracing.enabled needs tracing.endpoint: set the URL of the receiver of spans" -}}
{{- end -}}
{{- end -}}
