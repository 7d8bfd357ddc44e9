{{/* The signing keys: in which files server and agent find them, where these are mounted, and what is mounted. */}}
{{- define "trainmedic.signingEnv" -}}
- {name: TRAINMEDIC_SIGNING_KEY_FILE, value: /etc/trainmedic/signing/signing-key}
{{- if .Values.signing.previousSecret }}
- {name: TRAINMEDIC_PREVIOUS_SIGNING_KEY_FILE, value: /etc/trainmedic/previous-signing/signing-key}
{{- end }}
{{- end -}}

{{- define "trainmedic.signingMounts" -}}
- {name: signing, mountPath: /etc/trainmedic/signing, readOnly: true}
{{- if .Values.signing.previousSecret }}
- {name: previous-signing, mountPath: /etc/trainmedic/previous-signing, readOnly: true}
{{- end }}
{{- end -}}

{{- define "trainmedic.signingVolumes" -}}
- name: signing
  secret:
    secretName: {{ include "trainmedic.signingSecret" . }}
    # 0440: root's, and the group's that the pod runs as.
    defaultMode: 288
    items: [{key: signing-key, path: signing-key}]
{{- with .Values.signing.previousSecret }}
- name: previous-signing
  secret:
    secretName: {{ . }}
    defaultMode: 288
    items: [{key: signing-key, path: signing-key}]
{{- end }}
{{- end -}}

{{- define "trainmedic.settingsEnv" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end -}}

{{/* The routes of messages, as TRAINMEDIC_MESSAGE_ROUTES has them: takes server.messages. */}}
{{- define "trainmedic.messageRoutes" -}}
{{- $pairs := list -}}
{{- range $channel, $routes := .routes -}}
{{- range $route := $routes -}}
{{- $conditions := list -}}
{{- range $field := list "component" "severity" "kind" -}}
{{- with get $route $field -}}{{- $conditions = append $conditions (printf "%s:%s" $field (join "," .)) -}}{{- end -}}
{{- end -}}
{{- $pairs = append $pairs (printf "%s=%s" $channel (default "all" (join ";" $conditions))) -}}
{{- end -}}
{{- end -}}
{{- range .defaults -}}{{- $pairs = append $pairs (printf "%s=default" .) -}}{{- end -}}
{{- join " " $pairs -}}
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
