{{/*
What an agent or a job may do in Redis: receive commands, announce itself, and append to the replies of all without
reading them. Both ask by INFO whether Redis has room for them; a job also keeps the outcomes of commands, and asks
whether Redis can have lost any.
Its launcher (trainmedic-run) has keys of its own. docs/how-to/redis.md shows the same rules.
*/}}
{{- define "trainmedic.receiverRules" -}}
resetchannels +get +getrange +set +del +expire +xgroup|create +xreadgroup +xack +xdel +multi +exec +ping (%W~trainmedic:replies +xadd)
{{- end -}}

{{/*
The users of the chart's Redis: each with its rules, and the Secret and the key in it that hold its password. The
server is `default`, and so is whoever knows its password: agents and jobs from before there were other users. Where
somebody else keeps the server's password, none is generated here, and agents have a user only if theirs is kept too.
*/}}
{{- define "trainmedic.redisUsers" -}}
{{- $name := include "trainmedic.fullname" . -}}
{{- $users := .Values.redis.users -}}
{{- $rules := include "trainmedic.receiverRules" . -}}
- name: default
  secret: {{ include "trainmedic.redisSecret" . }}
  key: password
  # Trainmedic's keys only; no administration, no inspection of others, no scripts.
  rules: "~trainmedic:* resetchannels +@all -@dangerous -@admin -@scripting +client|setname +info"
{{- if and .Values.agent.enabled (or $users.existingSecret (not .Values.redis.existingSecret)) }}
- name: agent
  secret: {{ default (printf "%s-redis-agent" $name) $users.existingSecret }}
  key: {{ ternary "agent" "password" (not (empty $users.existingSecret)) }}
  # Findings are appended and counted; only the server reads them. Rules are read.
  rules: "~trainmedic:commands:node:* ~trainmedic:agent:* %R~trainmedic:logrules %R~trainmedic:logrules:* {{ $rules }} (~trainmedic:findings +xadd +xlen) +time +info"
{{- end }}
{{- range $job := $users.jobs }}
- name: job-{{ $job }}
  secret: {{ default (printf "%s-redis-job-%s" $name $job) $users.existingSecret }}
  key: {{ ternary (printf "job-%s" $job) "password" (not (empty $users.existingSecret)) }}
  rules: "~trainmedic:commands:job:{{ $job }} ~trainmedic:job:{{ $job }} ~trainmedic:memory:job:{{ $job }}:* ~trainmedic:memory-since:job:{{ $job }} ~trainmedic:launcher:{{ $job }}/* ~trainmedic:commands:launcher:{{ $job }}/* ~trainmedic:memory:launcher:{{ $job }}/* ~trainmedic:memory-since:launcher:{{ $job }}/* +info {{ $rules }}"
{{- end }}
{{- end -}}

{{- define "trainmedic.redisAddress" -}}
{{ include "trainmedic.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379/0
{{- end -}}

{{/*
The environment variables by which a pod reaches Redis; the password is never part of an argument. Takes the root, and
the `user`, instead of whom the server's is taken where there is no such user.
*/}}
{{- define "trainmedic.redisEnv" -}}
{{- $redis := .root.Values.redis -}}
{{- if $redis.enabled -}}
{{- $login := dict -}}
{{- range include "trainmedic.redisUsers" .root | fromYamlArray -}}
{{- if or (eq .name "default") (eq .name $.user) -}}
{{- $login = . -}}
{{- end -}}
{{- end -}}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $login.secret }}, key: {{ $login.key }}}}
- name: TRAINMEDIC_REDIS_URL
  value: redis://{{ if ne $login.name "default" }}{{ $login.name }}{{ end }}:$(REDIS_PASSWORD)@{{ include "trainmedic.fullname" .root }}-redis:6379/0
{{- else -}}
{{- $external := $redis.external -}}
- name: TRAINMEDIC_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ $external.existingSecret }}, key: {{ ternary (default $external.key $external.agentKey) $external.key (eq .user "agent") }}}}
{{- end }}
{{- end -}}
