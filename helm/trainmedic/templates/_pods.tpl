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
- {name: TRAINMEDIC_SIGNING_KEY_FILE, value: /etc/trainmedic/signing/signing-key}
{{- end -}}

{{/* The volume of the signing key. 288 is 0440: root's, and the group's that the pod runs as. */}}
{{- define "trainmedic.signingVolume" -}}
- name: signing
  secret:
    secretName: {{ include "trainmedic.signingSecret" . }}
    defaultMode: 288
    items: [{key: signing-key, path: signing-key}]
{{- end -}}

{{- define "trainmedic.settingsEnv" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end -}}

{{/* Where a pod runs, and with which images: takes the component's values and the pull secrets. */}}
{{- define "trainmedic.placement" -}}
{{- with .pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .component.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .component.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .component.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .component.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
