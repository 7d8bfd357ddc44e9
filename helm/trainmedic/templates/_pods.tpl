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
{{- /* Numbers of a file are floats: from a million on, their text would have an exponent. */}}
{{- if and (kindIs "float64" $value) (eq $value (floor $value)) }}
{{- $value = int64 $value }}
{{- end }}
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

{{/* The messages that are sent, as TRAINMEDIC_MESSAGES has them: takes server.messages. */}}
{{- define "trainmedic.messageKinds" -}}
{{- $pairs := list -}}
{{- /* `all` first: later pairs override earlier ones. */ -}}
{{- range $kind := concat (ternary (list "all") list (hasKey .kinds "all")) (without (keys .kinds | sortAlpha) "all") -}}
{{- $rule := index $.kinds $kind -}}
{{- $to := ternary "" (printf "@%s" (join "," $rule.channels)) (empty $rule.channels) -}}
{{- /* Without quotes, YAML reads on and off as booleans. */ -}}
{{- $severity := get $rule "severity" -}}
{{- if kindIs "bool" $severity -}}{{- $severity = ternary "on" "off" $severity -}}{{- end -}}
{{- $pairs = append $pairs (printf "%s=%s%s" $kind (default "on" $severity) $to) -}}
{{- end -}}
{{- join " " $pairs -}}
{{- end -}}

{{/*
A mapping with a user's values over the chart's own: takes `own` and `given`. A mapping is merged, null removes a field,
and another probe replaces the chart's.
*/}}
{{- define "trainmedic.merged" -}}
{{- $merged := deepCopy .own -}}
{{- $probes := list "exec" "grpc" "httpGet" "tcpSocket" -}}
{{- range $name := keys .given -}}
{{- if has $name $probes -}}
{{- range without $probes $name -}}{{- $_ := unset $merged . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := .given -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $merged $name -}}
{{- else if and (kindIs "map" $value) (kindIs "map" (get $merged $name)) -}}
{{- $_ := set $merged $name (include "trainmedic.merged" (dict "own" (get $merged $name) "given" $value) | fromYaml) -}}
{{- else -}}
{{- $_ := set $merged $name $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $merged -}}
{{- end -}}

{{/* Registry Secrets of all images, each once. A parent chart may give names alone. */}}
{{- define "trainmedic.pullSecrets" -}}
{{- $found := concat .Values.image.pullSecrets .Values.imagePullSecrets -}}
{{- range .Values.global.imagePullSecrets -}}
{{- $found = append $found (ternary (dict "name" .) . (kindIs "string" .)) -}}
{{- end -}}
{{- toJson (uniq $found) -}}
{{- end -}}

{{/* Where a pod runs, and with which images: takes the root and the component's values. */}}
{{- define "trainmedic.placement" -}}
{{- with include "trainmedic.pullSecrets" .root | fromJsonArray }}
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
