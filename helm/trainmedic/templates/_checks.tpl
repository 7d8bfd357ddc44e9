{{/* What no value can ask for, because it would come out wrong at run time. The schema checks each value by itself. */}}
{{- define "trainmedic.checks" -}}
{{- include "trainmedic.checksWithoutServer" . -}}
{{- include "trainmedic.checksOfPods" . -}}
{{- include "trainmedic.checksOfExposure" . -}}
{{- $many := gt (int .Values.server.replicas) 1 -}}
{{- if and $many (not .Values.server.database.existingSecret) -}}
{{- fail "server.replicas: more than one server needs PostgreSQL: name a Secret with its URL in server.database.existingSecret, or leave one replica, which keeps its history in SQLite" -}}
{{- end -}}
{{- if and .Values.server.database.existingSecret .Values.server.persistence.existingClaim -}}
{{- fail "server.persistence.existingClaim: with PostgreSQL (server.database.existingSecret) there is nothing to keep on a volume; leave one of the two empty" -}}
{{- end -}}
{{- if and .Values.server.ingress.enabled (not .Values.server.ingress.host) -}}
{{- fail "server.ingress.host: the name by which browsers ask for the console is needed, such as trainmedic.example.org" -}}
{{- end -}}
{{- $messages := .Values.server.messages -}}
{{- $given := dict -}}
{{- range $name, $_ := .Values.server.settings -}}{{- $_ := set $given $name true -}}{{- end -}}
{{- range .Values.server.extraEnv -}}{{- $_ := set $given .name true -}}{{- end -}}
{{- if and $messages.existingSecret (hasKey $given "TRAINMEDIC_NOTIFY_URLS") -}}
{{- fail "server.messages.existingSecret: TRAINMEDIC_NOTIFY_URLS is set in server.settings or server.extraEnv as well; leave one of them" -}}
{{- end -}}
{{- if and (or $messages.routes $messages.defaults) (hasKey $given "TRAINMEDIC_MESSAGE_ROUTES") -}}
{{- fail "server.messages.routes: TRAINMEDIC_MESSAGE_ROUTES is set in server.settings or server.extraEnv as well; leave one of them" -}}
{{- end -}}
{{- if and $messages.kinds (hasKey $given "TRAINMEDIC_MESSAGES") -}}
{{- fail "server.messages.kinds: TRAINMEDIC_MESSAGES is set in server.settings or server.extraEnv as well; leave one of them" -}}
{{- end -}}
{{- range list "TRAINMEDIC_SLACK_FILE" "TRAINMEDIC_SLACK_BOT_TOKEN" "TRAINMEDIC_SLACK_BOT_TOKEN_FILE" "TRAINMEDIC_SLACK_APP_TOKEN" "TRAINMEDIC_SLACK_APP_TOKEN_FILE" -}}
{{- if and $.Values.server.slack.existingSecret (hasKey $given .) -}}
{{- fail (printf "server.slack.existingSecret: %s is set in server.settings or server.extraEnv as well; leave one of them" .) -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.redis.enabled) (not .Values.redis.external.existingSecret) -}}
{{- fail "redis: either redis.enabled is true, or redis.external.existingSecret names a Secret with the URL of a Redis of your own" -}}
{{- end -}}
{{- if and .Values.redis.enabled .Values.redis.external.existingSecret -}}
{{- fail "redis.external.existingSecret: is of no use while redis.enabled is true; set redis.enabled to false" -}}
{{- end -}}
{{- if and .Values.redis.enabled .Values.redis.external.agentKey -}}
{{- fail "redis.external.agentKey: is of no use while redis.enabled is true; agents have a user of their own there" -}}
{{- end -}}
{{- $users := .Values.redis.users -}}
{{- if and (not .Values.redis.enabled) (or $users.jobs $users.existingSecret) -}}
{{- fail "redis.users: the chart makes users in its own Redis only (redis.enabled); add them to yours by hand, as docs/how-to/redis.md shows" -}}
{{- end -}}
{{- if and $users.jobs .Values.redis.existingSecret (not $users.existingSecret) -}}
{{- fail "redis.users.jobs: no password is generated where redis.existingSecret is set; name a Secret with those of the jobs in redis.users.existingSecret" -}}
{{- end -}}
{{- if not (or .Values.playbooks.shipped .Values.playbooks.extra .Values.playbooks.existingConfigMap) -}}
{{- fail "playbooks: there are none: set playbooks.shipped, playbooks.extra or playbooks.existingConfigMap" -}}
{{- end -}}
{{- if and .Values.kubernetes.kubeconfig.existingSecret (not (or .Values.kubernetes.actions .Values.kubernetes.identity)) -}}
{{- fail "kubernetes.kubeconfig: nothing uses it; name actions in kubernetes.actions, or set kubernetes.identity" -}}
{{- end -}}
{{- if and .Values.kubernetes.customKinds (not .Values.kubernetes.actions) -}}
{{- fail "kubernetes.customKinds: no action could use them; name the actions in kubernetes.actions, such as k8s.suspend" -}}
{{- end -}}
{{- range $where, $labels := dict "commonLabels" .Values.commonLabels "server.podLabels" .Values.server.podLabels "agent.podLabels" .Values.agent.podLabels "redis.podLabels" .Values.redis.podLabels -}}
{{- range $name, $_ := $labels -}}
{{- if or (hasPrefix "app.kubernetes.io/" $name) (eq $name "helm.sh/chart") -}}
{{- fail (printf "%s: %s is set by the chart, which finds its pods by it" $where $name) -}}
{{- end -}}
{{- if and (ne $where "commonLabels") (hasKey $.Values.commonLabels $name) -}}
{{- fail (printf "%s: %s is in commonLabels already" $where $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $reserved := dict
  "TRAINMEDIC_MODE" "mode"
  "TRAINMEDIC_DATABASE_URL" "server.database"
  "TRAINMEDIC_DATABASE_URL_FILE" "server.database"
  "TRAINMEDIC_ADVERTISE" "server.database"
  "TRAINMEDIC_ALERTMANAGER_URL" "server.alertmanagerUrl"
  "TRAINMEDIC_PROMETHEUS_URL" "server.prometheusUrl"
  "TRAINMEDIC_EVENTS_KINDS" "server.events"
  "TRAINMEDIC_EVENTS_TOKEN_FILE" "server.events"
  "TRAINMEDIC_GRAFANA_TOKEN_FILE" "server.grafana"
  "TRAINMEDIC_RUNBOOK_URL" "monitoring.prometheusRule.runbookBaseUrl"
  "TRAINMEDIC_KUBERNETES" "kubernetes"
  "TRAINMEDIC_PLAYBOOKS" "playbooks"
  "TRAINMEDIC_ALERT_MAP" "alertMap"
  "TRAINMEDIC_TOKENS_FILE" "auth"
  "TRAINMEDIC_ALLOW_ANONYMOUS" "auth"
  "TRAINMEDIC_SIGNING_KEY" "signing"
  "TRAINMEDIC_SIGNING_KEY_FILE" "signing"
  "TRAINMEDIC_PREVIOUS_SIGNING_KEY" "signing"
  "TRAINMEDIC_PREVIOUS_SIGNING_KEY_FILE" "signing"
  "TRAINMEDIC_REDIS_URL" "redis"
  "TRAINMEDIC_REDIS_URL_FILE" "redis"
  "TRAINMEDIC_HOST" "server.service"
  "TRAINMEDIC_PORT" "server.service"
  "TRAINMEDIC_STATE_DIR" "server.persistence or agent.statePath"
  "TRAINMEDIC_NODE" "agent.nodeSelector"
  "TRAINMEDIC_POLICY" "agent.powerControl, agent.cleaning and agent.logs"
  "TRAINMEDIC_EXPORTER_HOST" "agent.exporterPort"
  "TRAINMEDIC_EXPORTER_PORT" "agent.exporterPort" -}}
{{- range $component := list "server" "agent" -}}
{{- range $name, $_ := (index $.Values $component).settings -}}
{{- if hasKey $reserved $name -}}
{{- fail (printf "%s.settings: %s is set by the chart, from the value %s" $component $name (index $reserved $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $component := list "server" "agent" -}}
{{- range (index $.Values $component).extraEnv -}}
{{- if hasKey $reserved .name -}}
{{- fail (printf "%s.extraEnv: %s is set by the chart, from the value %s" $component .name (index $reserved .name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $memory := dig "limits" "memory" "" .Values.redis.resources | toString -}}
{{- if and .Values.redis.enabled (regexMatch "^[0-9]+[KMG]i$" $memory) -}}
{{- $units := dict "k" 1024 "m" 1048576 "g" 1073741824 -}}
{{- $limit := mul (regexFind "^[0-9]+" $memory | int64) (index $units (regexFind "[KMG]" $memory | lower)) -}}
{{- $most := mul (regexFind "^[0-9]+" .Values.redis.maxMemory | int64) (index $units (regexFind "[kmg]" .Values.redis.maxMemory)) -}}
{{- if gt (mul 4 $most) (mul 3 $limit) -}}
{{- fail (printf "redis.maxMemory: %s is too near to the memory limit %s (redis.resources.limits.memory), at which Redis would be killed: keep it to three quarters at most" .Values.redis.maxMemory $memory) -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.agent.enabled) (or .Values.agent.powerControl.enabled .Values.agent.cleaning.policy.rules) -}}
{{- fail "agent.enabled: is false, so there is nobody for agent.powerControl and agent.cleaning; leave those out" -}}
{{- end -}}
{{- $cleaning := .Values.agent.cleaning -}}
{{- range $name, $rule := $cleaning.policy.rules -}}
{{- range $root := $rule.roots -}}
{{- $mounted := false -}}
{{- range $path := $cleaning.hostPaths -}}
{{- if or (eq (clean $root) (clean $path)) (hasPrefix (printf "%s/" (clean $path)) (clean $root)) -}}
{{- $mounted = true -}}
{{- end -}}
{{- end -}}
{{- if not $mounted -}}
{{- fail (printf "agent.cleaning.hostPaths: the rule %s cleans %s, which lies in none of these directories; add the one that is to be mounted" $name $root) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (or $cleaning.hostPaths $cleaning.hostPID) (not $cleaning.policy.rules) -}}
{{- fail "agent.cleaning.policy: has no rules, so hostPaths and hostPID would be given away for nothing; add rules or leave those out" -}}
{{- end -}}
{{- range $cleaning.hostPaths -}}
{{- if has (clean .) (list "/" "/boot" "/dev" "/etc" "/home" "/mnt" "/opt" "/proc" "/root" "/run" "/srv" "/sys" "/usr" "/var" "/var/lib" "/var/lib/containerd" "/var/lib/docker" "/var/lib/kubelet") -}}
{{- fail (printf "agent.cleaning.hostPaths: %s holds more than what is to be cleaned; name a directory below it" .) -}}
{{- end -}}
{{- end -}}
{{- $logs := .Values.agent.logs -}}
{{- if and (not .Values.agent.enabled) $logs.policy -}}
{{- fail "agent.enabled: is false, so there is nobody for agent.logs; leave that out" -}}
{{- end -}}
{{- if and $logs.storeSecret (not $logs.policy.ship) -}}
{{- fail "agent.logs.storeSecret: the agents push no lines, so they would be given it for nothing; agent.logs.policy has no ship" -}}
{{- end -}}
{{- if and (or $logs.hostPaths $logs.kmsg) (not $logs.policy) -}}
{{- fail "agent.logs.policy: names no logs, so hostPaths and kmsg would be given away for nothing; name some or leave those out" -}}
{{- end -}}
{{- $paths := concat (dig "roots" list $logs.policy) (dig "paths" list $logs.policy) (dig "slurm" list $logs.policy) -}}
{{- range dig "files" list $logs.policy -}}
{{- $paths = append $paths (ternary . (dig "path" "" (ternary (dict) . (kindIs "string" .))) (kindIs "string" .)) -}}
{{- end -}}
{{- $kernel := toString (dig "kernel" false $logs.policy) -}}
{{- if hasPrefix "/" $kernel -}}
{{- $paths = append $paths $kernel -}}
{{- else if and (ne $kernel "false") (not $logs.kmsg) -}}
{{- fail (printf "agent.logs.policy: kernel: %s needs agent.logs.kmsg, which makes the container privileged; or name a file, such as /var/log/kern.log" $kernel) -}}
{{- end -}}
{{- range $read := $paths -}}
{{- $mounted := false -}}
{{- range $path := concat $logs.hostPaths $cleaning.hostPaths -}}
{{- if or (eq (clean $read) (clean $path)) (hasPrefix (printf "%s/" (clean $path)) (clean $read)) -}}
{{- $mounted = true -}}
{{- end -}}
{{- end -}}
{{- if not $mounted -}}
{{- fail (printf "agent.logs.hostPaths: the policy reads %s, which lies in none of these directories; add the one that is to be mounted" $read) -}}
{{- end -}}
{{- end -}}
{{- range $logs.hostPaths -}}
{{- if has (clean .) (list "/" "/boot" "/dev" "/etc" "/home" "/opt" "/proc" "/root" "/run" "/srv" "/sys" "/usr" "/var" "/var/lib") -}}
{{- fail (printf "agent.logs.hostPaths: %s holds more than logs; name a directory below it" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A release of agents only, which belong to a server elsewhere. */}}
{{- define "trainmedic.checksWithoutServer" -}}
{{- if not .Values.server.enabled -}}
{{- if not .Values.agent.enabled -}}
{{- fail "server.enabled: is false, and so is agent.enabled, so there is nothing to install; enable one" -}}
{{- end -}}
{{- if .Values.redis.enabled -}}
{{- fail "server.enabled: is false, so agents need the Redis of their server: set redis.enabled to false, and name a Secret with its URL in redis.external.existingSecret" -}}
{{- end -}}
{{- if not .Values.signing.existingSecret -}}
{{- fail "signing.existingSecret: without a server (server.enabled) name a Secret with the signing-key of the server elsewhere; a generated key would refuse its commands" -}}
{{- end -}}
{{- if .Values.monitoring.alertmanagerConfig.enabled -}}
{{- fail "monitoring.alertmanagerConfig: its receiver is the server of this release, and server.enabled is false; leave one of them out" -}}
{{- end -}}
{{- if .Values.kubernetes.kubeconfig.existingSecret -}}
{{- fail "kubernetes.kubeconfig: is for the server of this release, and server.enabled is false; leave one of them out" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trainmedic.checksOfPods" -}}
{{- range $component := list "server" "agent" "redis" -}}
{{- $account := (index $.Values $component).serviceAccount -}}
{{- if not (or $account.create $account.name) -}}
{{- fail (printf "%s.serviceAccount.name: name the account that there is, because create is false" $component) -}}
{{- end -}}
{{- end -}}
{{- $budget := .Values.podDisruptionBudget -}}
{{- if and $budget.minAvailable $budget.maxUnavailable -}}
{{- fail "podDisruptionBudget: a budget has minAvailable or maxUnavailable; leave one of them empty" -}}
{{- end -}}
{{- $replicas := int .Values.server.replicas -}}
{{- $least := $budget.minAvailable -}}
{{- if kindIs "string" $least -}}
{{- $least = div (add (mul $replicas (trimSuffix "%" $least | int)) 99) 100 -}}
{{- end -}}
{{- if and $budget.enabled (gt $replicas 1) (ge (int $least) $replicas) -}}
{{- fail (printf "podDisruptionBudget.minAvailable: %v of %d servers would block every drain of their nodes; use less" $budget.minAvailable $replicas) -}}
{{- end -}}
{{- end -}}

{{- define "trainmedic.checksOfExposure" -}}
{{- $service := .Values.server.service -}}
{{- if and $service.nodePort (eq $service.type "ClusterIP") -}}
{{- fail "server.service.nodePort: is of no use with the type ClusterIP; set server.service.type to NodePort or LoadBalancer" -}}
{{- end -}}
{{- if and $service.loadBalancerSourceRanges (ne $service.type "LoadBalancer") -}}
{{- fail (printf "server.service.loadBalancerSourceRanges: is of no use with the type %s; name the peers in networkPolicy.serverFrom" $service.type) -}}
{{- end -}}
{{- $seen := list -}}
{{- range $host := prepend .Values.server.ingress.extraHosts (dict "host" .Values.server.ingress.host) -}}
{{- if has $host.host $seen -}}
{{- fail (printf "server.ingress.extraHosts: %s is there twice" $host.host) -}}
{{- end -}}
{{- $seen = append $seen $host.host -}}
{{- end -}}
{{- if and .Values.server.ingress.extraHosts (not .Values.server.ingress.enabled) -}}
{{- fail "server.ingress.extraHosts: is of no use without server.ingress.enabled" -}}
{{- end -}}
{{- end -}}
