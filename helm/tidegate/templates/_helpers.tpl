{{- define "tidegate.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- /* At most 50 characters, so that names with a suffix stay within 63 characters. */ -}}
{{- define "tidegate.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tidegate.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tidegate.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tidegate.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "tidegate.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "tidegate.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "tidegate.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "tidegate.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "tidegate.rulesConfigMap" -}}
{{- .Values.rules.existingConfigMap | default (printf "%s-rules" (include "tidegate.fullname" .)) -}}
{{- end -}}

{{- /* Name of the ConfigMap with overlays; empty without overlays. */ -}}
{{- define "tidegate.overlayConfigMap" -}}
{{- if .Values.overlay.existingConfigMap -}}
{{- .Values.overlay.existingConfigMap -}}
{{- else if .Values.overlay.files -}}
{{- printf "%s-overlay" (include "tidegate.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- /* Name of the ConfigMap with the file of callers; empty without one. */ -}}
{{- define "tidegate.callersConfigMap" -}}
{{- if .Values.callers.existingConfigMap -}}
{{- .Values.callers.existingConfigMap -}}
{{- else if .Values.callers.file -}}
{{- printf "%s-callers" (include "tidegate.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "tidegate.redisName" -}}
{{- printf "%s-redis" (include "tidegate.fullname" .) -}}
{{- end -}}

{{- define "tidegate.redisUrl" -}}
{{- if .Values.redis.bundled.enabled }}{{ include "tidegate.redisName" . }}:6379{{ else }}{{ .Values.redis.url }}{{ end -}}
{{- end -}}

{{- /* Ports in these URLs, and these. A JSON array. The argument is a list: the URLs as one text, and the other ports. */ -}}
{{- define "tidegate.ports" -}}
{{- $ports := list -}}
{{- range index . 1 }}{{ $ports = append $ports (int .) }}{{ end -}}
{{- range regexFindAll ":[0-9]+" (index . 0) -1 }}{{ $ports = append $ports (int (trimPrefix ":" .)) }}{{ end -}}
{{- toJson (uniq $ports) -}}
{{- end -}}

{{- define "tidegate.redisPorts" -}}
{{- $urls := printf "%s %s" .Values.redis.url (toString .Values.settings.REDIS_PERSECOND_URL) -}}
{{- include "tidegate.ports" (list $urls .Values.networkPolicy.redisPorts) -}}
{{- end -}}

{{- define "tidegate.otlpPorts" -}}
{{- $urls := .Values.tracing.endpoint -}}
{{- range $name, $value := .Values.settings }}{{ if hasSuffix "_ENDPOINT" $name }}{{ $urls = printf "%s %v" $urls $value }}{{ end }}{{ end -}}
{{- include "tidegate.ports" (list $urls .Values.networkPolicy.otlpPorts) -}}
{{- end -}}

{{- /* Secret with the certificate of the gRPC listener. */ -}}
{{- define "tidegate.grpcSecret" -}}
{{- .Values.grpc.tls.existingSecret | default (printf "%s-grpc-tls" (include "tidegate.fullname" .)) -}}
{{- end -}}

{{- define "tidegate.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "tidegate.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* "true" if the value of a setting that is on or off means on: as Tidegate reads it. */ -}}
{{- define "tidegate.isOn" -}}
{{- if has (lower (toString .)) (list "1" "t" "true") }}true{{ end -}}
{{- end -}}

{{- /* "true" if the HTTP listener speaks TLS. */ -}}
{{- define "tidegate.isHttpOverTls" -}}
{{- include "tidegate.isOn" .Values.settings.HTTP_SERVER_USE_TLS -}}
{{- end -}}

{{- /* Callers that may use /json: on, loopback or off. YAML reads `on` and `off` without quotes as true and false. */ -}}
{{- define "tidegate.jsonAccess" -}}
{{- $access := "on" -}}
{{- if hasKey .Values.settings "JSON_ACCESS" }}{{ $access = toString .Values.settings.JSON_ACCESS }}{{ end -}}
{{- get (dict "true" "on" "false" "off") $access | default $access -}}
{{- end -}}

{{- /* "true" if a file of callers may deny what `helm test` and the notes ask. */ -}}
{{- define "tidegate.hasCallers" -}}
{{- if include "tidegate.callersConfigMap" . }}true{{ end -}}
{{- end -}}

{{- /* Hosts under which readers ask the debug listener, separated by commas. */ -}}
{{- define "tidegate.adminHosts" -}}
{{- $name := printf "%s-headless" (include "tidegate.fullname" .) -}}
{{- $namespaced := printf "%s.%s" $name .Release.Namespace -}}
{{- $names := list $name $namespaced (printf "%s.svc" $namespaced) (printf "%s.svc.cluster.local" $namespaced) -}}
{{- join "," (.Values.admin.hosts | default $names) -}}
{{- end -}}

{{- /* "true" if client certificates are verified. */ -}}
{{- define "tidegate.areClientsVerified" -}}
{{- $settings := .Values.settings -}}
{{- $isRequired := and (eq (toString $settings.GRPC_CLIENT_AUTH) "require") $settings.GRPC_SERVER_TLS_CA_CERT -}}
{{- if and .Values.grpc.tls.enabled (or .Values.grpc.tls.clientCaKey $isRequired) }}true{{ end -}}
{{- end -}}

{{- /* Settings that have their own chart values; `settings` must not contain them. A JSON object of name to text. */ -}}
{{- define "tidegate.settings" -}}
{{- $redis := .Values.redis -}}
{{- $set := dict
  "BACKEND_TYPE" .Values.store
  "LOG_LEVEL" .Values.logging.level
  "LOG_FORMAT" .Values.logging.format
  "GRPC_PORT" "8081"
  "PORT" "8080"
  "DEBUG_HOST" "127.0.0.1"
  "DEBUG_PORT" "6070"
  "GRPC_MAX_CONNECTION_AGE" .Values.grpc.maxConnectionAge
  "DRAIN_DELAY" (printf "%ds" (int .Values.drain.delaySeconds))
  "DRAIN_TIMEOUT" (printf "%ds" (int .Values.drain.timeoutSeconds)) -}}
{{- if include "tidegate.overlayConfigMap" . }}{{ $_ := set $set "RULES_OVERLAY" "/etc/tidegate/overlay" }}{{ end -}}
{{- if include "tidegate.callersConfigMap" . }}{{ $_ := set $set "CALLERS_FILE" "/etc/tidegate/callers/callers.yaml" }}{{ end -}}
{{- with .Values.admin.tokens -}}
{{- if .existingSecret -}}
{{- $_ := set $set "DEBUG_HOST" "0.0.0.0" -}}
{{- $_ := set $set "DEBUG_SERVER_USE_TLS" "true" -}}
{{- $_ := set $set "ADMIN_TOKEN_FILE" (printf "/etc/tidegate/admin-tokens/%s" .key) -}}
{{- $_ := set $set "ADMIN_HOSTS" (include "tidegate.adminHosts" $) -}}
{{- end -}}
{{- end -}}
{{- if .Values.onStoreFailure }}{{ $_ := set $set "ON_STORE_FAILURE" .Values.onStoreFailure }}{{ end -}}
{{- if eq .Values.store "redis" -}}
{{- $_ := set $set "REDIS_TYPE" $redis.type -}}
{{- $_ := set $set "REDIS_URL" (include "tidegate.redisUrl" .) -}}
{{- if $redis.keyPrefix }}{{ $_ := set $set "CACHE_KEY_PREFIX" $redis.keyPrefix }}{{ end -}}
{{- if $redis.auth.existingSecret }}{{ $_ := set $set "REDIS_AUTH_FILE" (printf "/etc/tidegate/redis-auth/%s" $redis.auth.key) }}{{ end -}}
{{- if $redis.tls.enabled -}}
{{- $_ := set $set "REDIS_TLS" "true" -}}
{{- if $redis.tls.skipHostnameVerification }}{{ $_ := set $set "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION" "true" }}{{ end -}}
{{- if $redis.tls.existingSecret -}}
{{- range $variable, $key := dict "REDIS_TLS_CACERT" $redis.tls.caKey "REDIS_TLS_CLIENT_CERT" $redis.tls.certKey "REDIS_TLS_CLIENT_KEY" $redis.tls.keyKey -}}
{{- if $key }}{{ $_ := set $set $variable (printf "/etc/tidegate/redis-tls/%s" $key) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.grpc.tls -}}
{{- if .enabled -}}
{{- $_ := set $set "GRPC_SERVER_USE_TLS" "true" -}}
{{- range $variable, $key := dict "GRPC_SERVER_TLS_CERT" .certKey "GRPC_SERVER_TLS_KEY" .keyKey "GRPC_CLIENT_TLS_CACERT" .clientCaKey -}}
{{- if $key }}{{ $_ := set $set $variable (printf "/etc/tidegate/grpc-tls/%s" $key) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $xds := .Values.xds -}}
{{- if $xds.enabled -}}
{{- $_ := set $set "CONFIG_TYPE" "GRPC_XDS_SOTW" -}}
{{- $_ := set $set "CONFIG_GRPC_XDS_SERVER_URL" $xds.url -}}
{{- $_ := set $set "CONFIG_GRPC_XDS_NODE_ID" $xds.nodeId -}}
{{- if $xds.keepRules }}{{ $_ := set $set "STATE_DIR" "/var/lib/tidegate/rules" }}{{ end -}}
{{- if $xds.tls.enabled -}}
{{- $_ := set $set "CONFIG_GRPC_XDS_SERVER_USE_TLS" "true" -}}
{{- if $xds.tls.existingSecret -}}
{{- range $variable, $key := dict "CONFIG_GRPC_XDS_SERVER_TLS_CACERT" $xds.tls.caKey "CONFIG_GRPC_XDS_CLIENT_TLS_CERT" $xds.tls.certKey "CONFIG_GRPC_XDS_CLIENT_TLS_KEY" $xds.tls.keyKey -}}
{{- if $key }}{{ $_ := set $set $variable (printf "/etc/tidegate/xds-tls/%s" $key) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.tracing.enabled -}}
{{- $_ := set $set "TRACING_ENABLED" "true" -}}
{{- $_ := set $set "TRACING_EXPORTER_PROTOCOL" .Values.tracing.protocol -}}
{{- $_ := set $set "TRACING_SAMPLING_RATE" (toString .Values.tracing.samplingRate) -}}
{{- $_ := set $set "OTEL_EXPORTER_OTLP_ENDPOINT" .Values.tracing.endpoint -}}
{{- end -}}
{{- toJson $set -}}
{{- end -}}

{{- /* A value as text. Helm treats numbers as floats and would print a million as 1e+06. */ -}}
{{- define "tidegate.text" -}}
{{- if kindIs "float64" . }}{{ ternary (printf "%.0f" .) (toString .) (eq . (floor .)) }}{{ else }}{{ toString . }}{{ end -}}
{{- end -}}

{{- /* The request of `test` as a body of /json. The argument is a list: the root context, and the hits. */ -}}
{{- define "tidegate.testJson" -}}
{{- $test := (index . 0).Values.test -}}
{{- $entries := list -}}
{{- range splitList "," $test.descriptor -}}
{{- $entry := splitn "=" 2 . -}}
{{- $entries = append $entries (dict "key" $entry._0 "value" $entry._1) -}}
{{- end -}}
{{- $descriptor := dict "entries" $entries "hitsAddend" (index . 1) -}}
{{- dict "domain" $test.domain "descriptors" (list $descriptor) | toJson -}}
{{- end -}}
