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
{{- if and $redis.tls.existingSecret (not $redis.tls.enabled) -}}
{{- fail "redis.tls.existingSecret is set, but redis.tls.enabled is false: set redis.tls.enabled: true, or remove the Secret" -}}
{{- end -}}
{{- if ne (empty $redis.tls.certKey) (empty $redis.tls.keyKey) -}}
{{- fail "redis.tls.certKey and redis.tls.keyKey belong together: set both, or none" -}}
{{- end -}}
{{- if .Values.networkPolicy.enabled -}}
{{- range regexFindAll ":[0-9]+" $redis.url -1 -}}
{{- $port := int (trimPrefix ":" .) -}}
{{- $allowed := list -}}
{{- range $.Values.networkPolicy.redisPorts }}{{ $allowed = append $allowed (int .) }}{{ end -}}
{{- if not (has $port $allowed) -}}
{{- fail (printf "redis.url has the port %d, which networkPolicy.redisPorts does not allow: add it there" $port) -}}
{{- end -}}
{{- end -}}
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
{{- if and .Values.grpc.tls.enabled (not .Values.grpc.tls.existingSecret) -}}
{{- fail "grpc.tls.enabled needs grpc.tls.existingSecret: set the name of the Secret with the certificate and its key" -}}
{{- end -}}
{{- if and .Values.grpc.tls.existingSecret (not .Values.grpc.tls.enabled) -}}
{{- fail "grpc.tls.existingSecret is set, but grpc.tls.enabled is false: set grpc.tls.enabled: true, or remove the Secret" -}}
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
