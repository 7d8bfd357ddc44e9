{{- define "trainmedic.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trainmedic.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trainmedic.labels" -}}
{{ include "trainmedic.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: trainmedic
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "trainmedic.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "trainmedic.tokensSecret" -}}
{{- default (printf "%s-tokens" (include "trainmedic.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}

{{- define "trainmedic.signingSecret" -}}
{{- default (printf "%s-signing" (include "trainmedic.fullname" .)) .Values.signing.existingSecret -}}
{{- end -}}

{{- define "trainmedic.redisSecret" -}}
{{- default (printf "%s-redis" (include "trainmedic.fullname" .)) .Values.redis.existingSecret -}}
{{- end -}}

{{/* The environment variables by which server and agent reach Redis. The password is never part of an argument. */}}
{{- define "trainmedic.redisEnv" -}}
{{- if .Values.redis.enabled -}}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "trainmedic.redisSecret" . }}, key: password}}
- name: TRAINMEDIC_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "trainmedic.fullname" . }}-redis:6379/0
{{- else -}}
- name: TRAINMEDIC_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.external.existingSecret }}, key: {{ .Values.redis.external.key }}}}
{{- end }}
- name: TRAINMEDIC_SIGNING_KEY_FILE
  value: /etc/trainmedic/signing/signing-key
{{- end -}}

{{- define "trainmedic.settingsEnv" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end -}}

{{/* What no value can ask for: it would come out wrong at run time, or unsafe. */}}
{{- define "trainmedic.checks" -}}
{{- if and (gt (int .Values.server.replicas) 1) (not .Values.server.database.existingSecret) -}}
{{- fail "server.replicas: more than one server needs PostgreSQL: name a Secret with its URL in server.database.existingSecret, or leave one replica, which keeps its history in SQLite" -}}
{{- end -}}
{{- if and (not .Values.redis.enabled) (not .Values.redis.external.existingSecret) -}}
{{- fail "redis: either redis.enabled is true, or redis.external.existingSecret names a Secret with the URL of a Redis of your own" -}}
{{- end -}}
{{- if and .Values.agent.cleaning.rules (not .Values.agent.cleaning.hostPaths) -}}
{{- fail "agent.cleaning.rules: rules need the directories that they clean in agent.cleaning.hostPaths" -}}
{{- end -}}
{{- if and .Values.agent.cleaning.rules (not .Values.agent.cleaning.hostPID) -}}
{{- fail "agent.cleaning.hostPID: rules need it, because without it nobody can tell which files are open" -}}
{{- end -}}
{{- range .Values.agent.cleaning.hostPaths -}}
{{- if or (eq . "/") (has (clean .) (list "/" "/etc" "/usr" "/boot" "/proc" "/sys" "/dev" "/root" "/var" "/var/lib" "/var/lib/kubelet" "/run")) -}}
{{- fail (printf "agent.cleaning.hostPaths: %s is not a directory to clean; name one below it" .) -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int .Values.server.replicas) 1) .Values.server.persistence.existingClaim -}}
{{- fail "server.persistence.existingClaim: replicas cannot share one claim; with PostgreSQL leave it empty" -}}
{{- end -}}
{{- end -}}
