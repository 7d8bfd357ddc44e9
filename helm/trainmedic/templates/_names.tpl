{{- define "trainmedic.fullname" -}}
{{- if not (hasKey .Values "imagePullSecrets") -}}
{{- fail "the values lack those that this chart added: upgrade with --reset-then-reuse-values in place of --reuse-values" -}}
{{- end -}}
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

{{/* A reference to an image in `global.imageRegistry`, which replaces its registry. Takes the root and the reference. */}}
{{- define "trainmedic.inRegistry" -}}
{{- $registry := .root.Values.global.imageRegistry -}}
{{- $parts := splitList "/" .reference -}}
{{- if or (not $registry) (not .reference) -}}
{{ .reference }}
{{- else if and (gt (len $parts) 1) (regexMatch "[.:]|^localhost$" (first $parts)) -}}
{{ $registry }}/{{ join "/" (rest $parts) }}
{{- else -}}
{{ $registry }}/{{ .reference }}
{{- end -}}
{{- end -}}

{{/* An image by its digest, or else by its tag. Takes the root, the values of an image, and a tag where they have none. */}}
{{- define "trainmedic.imageOf" -}}
{{- $repository := include "trainmedic.inRegistry" (dict "root" .root "reference" .image.repository) -}}
{{- if .image.digest -}}
{{ $repository }}@{{ .image.digest }}
{{- else -}}
{{ $repository }}:{{ default .tag .image.tag }}
{{- end -}}
{{- end -}}

{{- define "trainmedic.image" -}}
{{- include "trainmedic.imageOf" (dict "root" . "image" .Values.image "tag" .Chart.AppVersion) -}}
{{- end -}}

{{/* The agent's own image if its values name one, otherwise the release's. */}}
{{- define "trainmedic.agentImage" -}}
{{- if .Values.agent.image.repository -}}
{{- include "trainmedic.imageOf" (dict "root" . "image" .Values.agent.image "tag" .Chart.AppVersion) -}}
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

{{/* The account of a component: takes the component's values and the account's name by default. */}}
{{- define "trainmedic.account" -}}
{{- default .name .component.serviceAccount.name -}}
{{- end -}}

{{- define "trainmedic.serverAccount" -}}
{{- include "trainmedic.account" (dict "component" .Values.server "name" (printf "%s-server" (include "trainmedic.fullname" .))) -}}
{{- end -}}

{{- define "trainmedic.agentAccount" -}}
{{- include "trainmedic.account" (dict "component" .Values.agent "name" (printf "%s-agent" (include "trainmedic.fullname" .))) -}}
{{- end -}}

{{- define "trainmedic.redisAccount" -}}
{{- include "trainmedic.account" (dict "component" .Values.redis "name" (printf "%s-redis" (include "trainmedic.fullname" .))) -}}
{{- end -}}

{{- define "trainmedic.address" -}}
http://{{ include "trainmedic.fullname" . }}.{{ .Release.Namespace }}.svc:{{ .Values.server.service.port }}
{{- end -}}
