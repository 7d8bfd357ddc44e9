{{- define "trainmedic.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Where browsers find the console by the Ingress. */}}
{{- define "trainmedic.consoleUrl" -}}
{{- with .Values.server.ingress -}}
{{ ternary "https" "http" (not (empty .tlsSecret)) }}://{{ .host }}
{{- end -}}
{{- end -}}

{{- define "trainmedic.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trainmedic.labels" -}}
{{- with .Values.commonLabels }}
{{- toYaml . }}
{{ end }}
{{- include "trainmedic.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: trainmedic
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* An image by its digest, or else by its tag. Takes the values of an image, and a tag where they have none. */}}
{{- define "trainmedic.imageOf" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .tag .image.tag }}
{{- end -}}
{{- end -}}

{{- define "trainmedic.image" -}}
{{- include "trainmedic.imageOf" (dict "image" .Values.image "tag" .Chart.AppVersion) -}}
{{- end -}}

{{/* The agent's own image if its values name one, otherwise the release's. */}}
{{- define "trainmedic.agentImage" -}}
{{- if .Values.agent.image.repository -}}
{{- include "trainmedic.imageOf" (dict "image" .Values.agent.image "tag" .Chart.AppVersion) -}}
{{- else -}}
{{- include "trainmedic.image" . -}}
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

{{- define "trainmedic.address" -}}
http://{{ include "trainmedic.fullname" . }}.{{ .Release.Namespace }}.svc:{{ .Values.server.service.port }}
{{- end -}}
