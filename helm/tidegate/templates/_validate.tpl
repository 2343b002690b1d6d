{{- /* What no schema can say well: values that are each right and wrong together. Each message says what to do. */ -}}
{{- define "tidegate.validate" -}}
{{- $redis := .Values.redis -}}
{{- if eq .Values.store "memory" -}}
{{- if or .Values.autoscaling.enabled (gt (int .Values.replicaCount) 1) -}}
{{- fail "store: memory counts in each pod by itself, so several pods would each admit the whole limit: set replicaCount: 1 and autoscaling.enabled: false, or store: redis" -}}
{{- end -}}
{{- if or $redis.url $redis.bundled.enabled -}}
{{- fail "store: memory asks no Redis, but redis.url or redis.bundled.enabled is set: set store: redis, or remove them" -}}
{{- end -}}
{{- else -}}
{{- if not .Values.onStoreFailure -}}
{{- fail "onStoreFailure is required with store: redis: error lets the caller's own setting decide, open admits, closed refuses, local counts each pod's part of the limit" -}}
{{- end -}}
{{- if and $redis.url $redis.bundled.enabled -}}
{{- fail "redis.url and redis.bundled.enabled are both set: choose one Redis" -}}
{{- end -}}
{{- if not (or $redis.url $redis.bundled.enabled) -}}
{{- fail "store: redis needs a Redis: set redis.url, or redis.bundled.enabled: true for a trial" -}}
{{- end -}}
{{- if contains "@" $redis.url -}}
{{- fail "redis.url holds a user or a password, which everyone could read: put it into a Secret and name that in redis.auth.existingSecret" -}}
{{- end -}}
{{- if and $redis.bundled.enabled (or (ne $redis.type "single") $redis.auth.existingSecret $redis.tls.enabled) -}}
{{- fail "redis.bundled.enabled is one server without password and TLS: leave redis.type, redis.auth and redis.tls as they are" -}}
{{- end -}}
{{- if and $redis.tls.existingSecret (not $redis.tls.enabled) -}}
{{- fail "redis.tls.existingSecret is set, but redis.tls.enabled is false" -}}
{{- end -}}
{{- if ne (empty $redis.tls.certKey) (empty $redis.tls.keyKey) -}}
{{- fail "redis.tls.certKey and redis.tls.keyKey go together: set both, or none" -}}
{{- end -}}
{{- if .Values.networkPolicy.enabled -}}
{{- range regexFindAll ":[0-9]+" $redis.url -1 -}}
{{- $port := int (trimPrefix ":" .) -}}
{{- $allowed := list -}}
{{- range $.Values.networkPolicy.redisPorts }}{{ $allowed = append $allowed (int .) }}{{ end -}}
{{- if not (has $port $allowed) -}}
{{- fail (printf "redis.url names the port %d, which networkPolicy.redisPorts does not allow: add it there" $port) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.rules.existingConfigMap .Values.rules.files -}}
{{- fail "rules.existingConfigMap and rules.files are both set: choose where rules come from" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and .Values.tracing.enabled (not .Values.tracing.endpoint) -}}
{{- fail "tracing.enabled needs tracing.endpoint: where are spans sent?" -}}
{{- end -}}
{{- end -}}
