"""Natural mistakes of users of other systems: the wrong text, a word that the error names, and a part of its cure."""

from __future__ import annotations

import json
from collections.abc import Iterator

BASE = """\
playbook: p
on: {alert: A}
target: gpu
vars: {limit: 80, ask: no, word: hot}
steps:
  - {id: f, action: node.facts}
  - {id: cap, action: gpu.power_limit, with: {percent: 80}}
"""
LAST = 8
"""Line of what is added to `BASE`."""

ON = [
    ("{alert: A, severity: critical}", "severity", "matchers: ['severity"),
    ("{alert: A, labels: {severity: critical}}", "labels", "matchers:"),
    ("{alert: A, match: {severity: critical}}", "match", "matchers"),
    ("{alert: A, namespace: ml}", "namespace", "matchers:"),
    ("{alert: A, if: labels.a}", "if", "when"),
    ("{alert: A, condition: labels.a}", "condition", "when"),
    ("{alert: A, for: 5m}", "for", "Prometheus"),
    ("{alert: A, cooldown: 5m}", "cooldown", "guards"),
    ("{alert: A, status: firing}", "status", "fires"),
    ("{alertname: A}", "alertname", "alert: NAME"),
    ("{alerts: [A]}", "alerts", "alert: NAME"),
    ("A", "on", "on: {alert: A}"),
    ("[A, B]", "on", "alert: [NAME"),
    ("{push: {branches: [main]}}", "push", "alert"),
    ('{alert: "GPU.*"}', "GPU.*", "list of names"),
    ('{alert: "A|B"}', "A|B", "list of names"),
    ('{alert: "GPU*"}', "GPU*", "list of names"),
    ('{alert: "A,B"}', "A,B", "list of names"),
    ('{alert: "{{ labels.x }}"}', "alert", "list of names"),
    ("{alert: A, matchers: [severity=warning|critical]}", "severity", 'severity=~"warning|critical"'),
    ("{alert: A, matchers: ['severity=\"warning|critical\"']}", "severity", 'severity=~"warning|critical"'),
    ("{alert: A, matchers: ['node=\"gpu.*\"']}", "gpu.*", 'node=~"gpu.*"'),
    ("{alert: A, matchers: ['node!=gpu*']}", "gpu*", 'node!~"gpu.*"'),
    ("{alert: A, matchers: ['node=\"{{ labels.node }}\"']}", "template", "on.when"),
    ("{alert: A, matchers: ['severity==critical']}", "'severity==critical'", "one sign"),
    ('{alert: ""}', "on.alert", "must not be empty"),
    ('{alert: [A, ""]}', "on.alert[1]", "must not be empty"),
    ("{alert: A, matchers: [severity]}", "severity", 'severity="critical"'),
    ("{alert: A, matchers: {severity: critical}}", "matchers", "must be a list: ['severity"),
    ("{alert: A, matchers: severity=critical}", "matchers", "must be a list: [severity=critical]"),
    ("{alert: A, when: steps.f.status}", "steps", "labels"),
    ("{cron: 0 3 * * 2}", "cron", "schedule:"),
    ("{schedule: 0 3 * * 2, tz: Europe/Berlin}", "tz", "timezone: Europe/Berlin"),
    ("{schedule: 0 3 * *}", "0 3 * *", "five fields"),
    ("{schedule: 0 3 * * 2, timezone: Berlin}", "Berlin", "Europe/Berlin"),
    ("{schedule: 0 3 * * 2, alert: A}", "on", "one beginning"),
    ("{alert: A, timezone: UTC}", "timezone", "schedule"),
    ("{schedule: 0 3 * * 2, when: labels.a}", "when", "schedule has none"),
    ("{event: [a, b]}", "event", "write event: NAME, and a playbook for each event"),
    ("{alert: A, when: 'runs.count(\"1d\") > 3'}", "runs", "write when at a step"),
]
LIMITED = "max_runs: {count: 5, per: 1h}"
TOP = [
    ("cooldown: 10m", "cooldown", "guards"),
    ("max_runs: 5", "max_runs", "guards"),
    ("max_concurrent: 1", "max_concurrent", "guards"),
    ("min_available: 90%", "min_available", "guards"),
    ("concurrency: 1", "concurrency", "max_concurrent"),
    ("severity: critical", "severity", "matchers"),
    ("when: labels.a", "when", "'on'"),
    ("timeout: 5m", "timeout", "each step"),
    ("retry: {attempts: 3}", "retry", "each step"),
    ("rescue: []", "rescue", "on_failure"),
    ("finally: []", "finally", "on_failure"),
    ("on_error: continue", "on_error", "on_failure"),
    ("hosts: all", "hosts", "playbook: NAME"),
    ("apiVersion: v1", "apiVersion", "playbook: NAME"),
    ("jobs: {}", "jobs", "playbook: NAME"),
    ("name: x", "name", "'playbook'"),
    ("description: x", "description", "'summary'"),
    ("tasks: []", "tasks", "'steps'"),
    ("actions: []", "actions", "steps"),
    ("triggers: []", "triggers", "'on'"),
    ("rules: []", "rules", "on: {alert"),
    ("env: {A: b}", "env", "vars"),
    ("dry_run: true", "dry_run", "mode: observe"),
    ("approvers: [ann]", "approvers", "approve:"),
    ("on_resolve: []", "on_resolve", "undo: on_resolve"),
    ("notify: ops", "notify", "action: notify"),
    ("become: true", "become", "agent"),
    ("mode: dry-run", "mode", "observe"),
    ("mode: auto", "mode", "enforce"),
    ("mode: manual", "mode", "approve"),
    ("guards: 10m", "guards", "cooldown: 10m"),
    ("guards: {max_runs: 5}", "max_runs", "{count: 5, per: 1h}"),
    ("guards: {max_runs: {count: 5, window: 1h}}", "window", "per: 1h"),
    ("guards: {max_runs: {count: 5}}", "per", "missing"),
    ("guards: {rate_limit: 5}", "rate_limit", "max_runs: {count"),
    ("guards: {on_limited: [{action: notify, with: {message: a}}]}", "needs max_runs", "{count: 5, per: 1h}"),
    (f"guards: {{{LIMITED}, on_limited: notify}}", "on_limited", "[{action: notify"),
    (f"guards: {{{LIMITED}, on_limited: [{{wait_for: resolved}}]}}", "wait_for", "only actions that change nothing"),
    (
        f"guards: {{{LIMITED}, on_limited: [{{action: gpu.power_limit, with: {{percent: 80}}}}]}}",
        "changes something",
        "action: notify",
    ),
    (f"guards: {{{LIMITED}, on_limited: [{{action: notfy}}]}}", "'notfy'", "did you mean 'notify'?"),
    (f"guards: {{{LIMITED}, on_limited: [{{action: notify, with: {{text: a}}}}]}}", "text", "message"),
    (
        f"guards: {{{LIMITED}, on_limited: [{{action: notify, with: {{message: '{{{{ steps.cap.status }}}}'}}}}]}}",
        "'cap'",
        "before",
    ),
    (
        f"guards: {{{LIMITED}, on_limited: [{{action: notify, undo: on_resolve, with: {{message: a}}}}]}}",
        "undo",
        "no undo",
    ),
    (f"guards: {{{LIMITED}, on_limit: []}}", "on_limit", "on_limited: [{action: notify"),
    ("on_limited: []", "on_limited", "'guards'"),
    ("guards: {again: 3}", "again", "{after: 30m, times: 3}"),
    ("guards: {again: {after: 30m}}", "times", "missing"),
    ("guards: {again: {after: 30m, count: 3}}", "count", "times: 3"),
    ("guards: {again: {delay: 30m, times: 3}}", "delay", "after: 30m"),
    ("guards: {again: {after: 0s, times: 3}}", "after", "longer than 0s"),
    ("guards: {max_concurrent: true}", "max_concurrent", "must be a number"),
    ("guards: {max_runs: {count: true, per: 1h}}", "max_runs.count", "must be a number"),
    ("guards: {retry: {attempts: 3}}", "retry", "again: {after: 30m, times: 3}"),
    ("guards: {cool_down: 5m}", "cool_down", "cooldown"),
    ("guards: {cooldown: 10 minutes}", "cooldown", "write 10m"),
    ("guards: {cooldown: 10min}", "cooldown", "write 10m"),
    ("guards: {cooldown: 1.5h}", "cooldown", "write 1h30m"),
    ("guards: {cooldown: 600}", "cooldown", "unit"),
    ('guards: {cooldown: "{{ vars.limit }}"}', "cooldown", "no template"),
    ("summary: Cap GPU #3 first", "summary", "quotes"),
    ("approval: ann", "approval", "by: [NAME]"),
    ("approval: {approvers: [ann]}", "approvers", "by: [NAME]"),
    ("approval: {by: ann}", "by", "[ann]"),
    ("effect: up", "effect", "query: PROMQL"),
]
STEPS = [
    ("{action: slurm.drain, with: {lease: 1m}}", "lease", "greater than or equal to 5m"),
    ("{action: slurm.drain, with: {lease: 1d}}", "lease", "less than or equal to 1h"),
    ("{action: slurm.drain, with: {resume_after: 0s}}", "resume_after", "longer than 0s"),
    ("{action: slurm.resume, with: {restore: false}}", "restore", "must be true"),
    ("{action: slurm.signal, with: {signal: SIGUSR1}}", "'SIGUSR1' is not one of USR1, USR2, HUP", "mean 'USR1'"),
    ("{sleep: 5m}", "sleep", "wait: 5m"),
    ("{pause: 5m}", "pause", "wait: 5m"),
    ("{wait: 300}", "wait", "90s"),
    ("{wait: 5m, timeout: 1h}", "timeout", "needs none"),
    ("{wait_until: tomorrow}", "tomorrow", "2026-01-31T12:00:00Z"),
    ("{wait_until: 2026-01-31T12:00:00}", "zone", "2026-01-31T12:00:00Z"),
    ("{wait_for: 2026-01-31T12:00:00Z}", "wait_for", "wait_until: 2026"),
    ('{wait_for: {query: "up == 1"}}', "timeout", "timeout: 1h"),
    ('{wait_for: {query: "up == bool 1"}, timeout: 1h}', "bool", "leave out bool"),
    ('{wait_for: {query: "up", for: 1h}, timeout: 1h}', "for", "shorter"),
    ('{wait_for: {query: "up{a={{ labels.a }}}"}, timeout: 1h}', "quotes", "inside"),
    ('{wait_for: {promql: "up == 1"}, timeout: 1h}', "promql", "query: PROMQL"),
    ("{wait_for: {action: notify, with: {message: a}}, timeout: 1h}", "notify", "only actions that look"),
    ("{wait_for: {action: gpu.power_limit, with: {percent: 80}}, timeout: 1h}", "changes something", "that look"),
    ("{wait_for: {action: node.facts, until: output.cpu.percnt < 5}, timeout: 1h}", "percnt", "percent"),
    ("{name: x, wait_for: resolved}", "name", "id: NAME"),
    ("{wait_for: resolved, if: labels.a}", "if", "'when'"),
    ("{action: notify, retry: 3, with: {message: a}}", "retry", "{attempts: 3}"),
    ("{action: notify, retry: 0, with: {message: a}}", "retry", "{attempts: 3}"),
    ("{wait_for: resolved, retry: {attempts: 3}}", "'retry'", "only a step with 'action'"),
    ("{wait_for: resolved, with: {message: a}}", "'with'", "only a step with 'action'"),
    ("{action: node.facts, on_timeout: continue}", "'on_timeout'", "'wait_for' or 'approve'"),
    ("{action: notify, retries: 3, with: {message: a}}", "retries", "attempts: 3"),
    ("{action: notify, retry: {count: 3}, with: {message: a}}", "count", "attempts"),
    ("{action: notify, retry: {interval: 3s}, with: {message: a}}", "interval", "delay"),
    ("{action: notify, register: x, with: {message: a}}", "register", "output"),
    ("{action: notify, loop: [1], with: {message: a}}", "loop", "no loops"),
    ("{action: notify, needs: cap, with: {message: a}}", "needs", "order"),
    ("{action: notify, ignore_errors: true, with: {message: a}}", "ignore_errors", "on_error: continue"),
    ("{action: notify, continue-on-error: true, with: {message: a}}", "continue-on-error", "on_error: continue"),
    ("{action: notify, args: {message: a}}", "args", "'with'"),
    ("{action: notify, env: {A: b}, with: {message: a}}", "env", "with"),
    ("{action: notify, timeout-minutes: 5, with: {message: a}}", "timeout-minutes", "timeout: 10m"),
    ("{action: notify, cooldown: 5m, with: {message: a}}", "cooldown", "guards"),
    ("{action: notify, delegate_to: x, with: {message: a}}", "delegate_to", "target"),
    ("{action: notify, message: a}", "message", "with"),
    ("{run: nvidia-smi}", "run", "action"),
    ("{uses: k8s.cordon}", "uses", "action: NAME"),
    ("{k8s.cordon: {}}", "k8s.cordon", "action: k8s.cordon"),
    ("k8s.cordon", "mapping", "action: k8s.cordon"),
    ("{block: []}", "block", "one after the other"),
    ("{parallel: []}", "parallel", "one after the other"),
    ("{action: k8s.cordn}", "k8s.cordn", "'k8s.cordon'"),
    ("{action: cordon}", "cordon", "k8s.cordon"),
    ("{action: shell.execute}", "shell.execute", "docs/reference"),
    ("{action: k8s.cordon, undo: true}", "undo", "on_resolve"),
    ("{action: k8s.cordon, undo: always}", "undo", "on_resolve"),
    ("{action: k8s.cordon, on_error: ignore}", "on_error", "continue"),
    ("{action: k8s.cordon, timeout: 5 m}", "timeout", "write 5m"),
    ("{wait_for: 5m}", "wait_for", "wait: 5m"),
    ("{wait_for: {alert: resolved}, timeout: 1h}", "alert", "query: PROMQL"),
    ("{wait_for: firing}", "wait_for", "resolved"),
    ("{wait_for: resolved, on_timeout: skip}", "on_timeout", "continue"),
    ("{approve: true}", "approve", "quotes"),
    ("{approve: Cap GPU #3, timeout: 5m}", "'{'", "comment"),
    ("{approve: {text: sure?}}", "text", "message"),
    ("{approve: {message: a, approvers: [ann]}}", "approvers", "by"),
    ("{approve: {message: a, by: ann}}", "by", "[ann]"),
    ("{approve: {message: a, timeout: 5m}}", "timeout", "step"),
    ("approve: Cap #3?", "approve", "quotes"),
    ("{action: notify, with: {text: a}}", "text", "message"),
    ("{action: notify, with: {message: a, channel: b}}", "channel", "to:"),
    ("{action: notify, with: {message: a, level: b}}", "level", "severity"),
    ("{action: notify, with: {message: a, timeout: 5m}}", "timeout", "step"),
    ("{action: notify, with: a}", "with", "{name: value}"),
    ("{action: gpu.power_limit, with: {percent: 0.8}}", "percent", "write 80"),
    ("{action: gpu.power_limit, with: {percent: true}}", "percent", "must be a number"),
    ("{action: gpu.power_limit, with: {percent: 80%}}", "percent", "write 80"),
    ("{action: gpu.power_limit, with: {limit: 300}}", "limit", "watts"),
    ("{action: gpu.power_limit, with: {watts: 300W}}", "watts", "write 300"),
    ("{action: gpu.power_limit, with: {percent: 80, watts: 300}}", "with", "exactly one"),
    ("{action: disk.clean, with: {rules: tmp}}", "rules", "[tmp]"),
    ("{action: disk.clean, with: {rules: [tmp], until_free_percent: 0.2}}", "until_free_percent", "write 20"),
    ("{action: job.pause}", "job.pause", "works on a job"),
    ("{action: http.request, with: {method: GET, uri: 'http://a/'}}", "uri", "url"),
    ("{action: http.request, with: {method: GET, url: 'http://a/', token: x}}", "token", "bearer_from_env"),
    ("{action: http.request, with: {method: POST, url: 'http://a/', data: x}}", "data", "json"),
    ("{action: http.request, with: {method: get, url: 'http://a/'}}", "method", "GET"),
    ("{action: notify, with: {message: '${{ inputs.a }}'}}", "inputs", "vars"),
    ("{action: notify, with: {message: '{{ ansible_hostname }}'}}", "ansible_hostname", "target.node"),
    ("{action: notify, with: {message: '{{ item }}'}}", "item", "no loops"),
    ("{action: notify, with: {message: '{{ secrets.a }}'}}", "secrets", "bearer_from_env"),
    ("{action: notify, with: {message: '{{ $labels.gpu }}'}}", "$", "labels.gpu"),
    ("{action: notify, with: {message: {{ labels.gpu }}}}", "{{", "quotes"),
]
CONDITIONS = [
    ("steps.f.output.cpu.percnt > 80", "percnt", "'percent'"),
    ("steps.f.output.percent > 80", "percent", "cpu.percent"),
    ("steps.f.output.gpus[0].utilization > 80", "utilization", "utilization_percent"),
    ("steps.f.output.cpu.percent.value > 80", "value", "a number"),
    ('steps.f.output.cpu.percent > "80"', "'80'", "without quotes"),
    ("steps.f.output.driver > 550", "driver", "| number"),
    ("steps.cap.output.limit > 300", "limit", "limit_watts"),
    ("steps.f.cpu.percent > 80", "cpu", "steps.f.output.cpu"),
    ("labels.temp > 80", "labels.temp", "labels.temp | number"),
    ('labels.temp > "9"', "labels.temp", "labels.temp | number > 9"),
    ("labels.temp | default(0) > 80", "labels.temp", "| number"),
    ("labels.temp - 5 > 80", "labels.temp", "| number"),
    ("labels.enabled == true", "labels.enabled", '"true"'),
    ("labels.gpu in [0, 1]", "labels.gpu", "quotes"),
    ('labels.severity in "critical"', "labels.severity", '["critical"]'),
    ('labels.severity in "warning,critical"', "labels.severity", '["warning", "critical"]'),
    ('labels.severity == "warning" or "critical"', "critical", "always true"),
    ("labels.severity == critical", "critical", "quotes"),
    ("vars.word > 5", "vars.word", "| number"),
    ("vars.ask", "vars.ask", "ask: false"),
    ("steps.f", "steps.f", 'steps.f.status == "succeeded"'),
    ("not steps.f.status", "steps.f.status", 'steps.f.status == "succeeded"'),
    ("steps.f.succeeded", "succeeded", 'steps.f.status == "succeeded"'),
    ("steps.f is failed", "failed", 'steps.<id>.status == "failed"'),
    ("steps.f.rc == 0", "rc", "status"),
    ("steps.f.outcome == 'success'", "outcome", "steps.f.status"),
    ("steps.f.outputs.node", "outputs", "steps.f.output"),
    ('steps.f.status == "success"', "success", "'succeeded'"),
    ("steps.f.status == true", "True", "succeeded"),
    ("f.status == 'failed'", "'f'", "steps.f"),
    ("limit > 5", "limit", "vars.limit"),
    ("severity == 'critical'", "severity", "labels."),
    ("alert.severity == 'critical'", "severity", "labels.severity"),
    ("labels.a AND labels.b", "AND", "'and'"),
    ("labels.a OR labels.b", "OR", "'or'"),
    ("NOT labels.a", "NOT", "'not'"),
    ("labels.a && labels.b", "&", "'and'"),
    ("labels.a = 'b'", "=", "=="),
    ("labels.a === 'b'", "===", "=="),
    ("labels.a =~ 'b.*'", "=~", "on.matchers"),
    ("labels.a is match('b')", "match", "on.matchers"),
    ("labels.a is null", "null", "is defined"),
    ("labels.a == null", "null", "is defined"),
    ("labels.a ? true : false", "?", "if condition else"),
    ("labels.a contains 'b'", "contains", "in labels"),
    ("len(labels.a) > 3", "len", "| length"),
    ("contains(labels.a, 'b')", "contains", "in labels"),
    ("failure()", "failure", "status"),
    ("event.alert.labels.a", "event", "labels"),
    ("github.event_name", "github", "labels"),
    ("if labels.a", "if", "condition alone"),
    ("labels.a | bool", "bool", '"true"'),
    ("labels.a <> 'b'", "<>", "!="),
    ("labels.a -eq 'b'", "-eq", "=="),
    ("steps.f.output.cpu.percent > 80%", "80%", "without %"),
    ("{{ labels.a }}", "{{", "without braces"),
    ("target", "target", "target.node"),
    ("runs.count > 3", "runs.count is a function", 'runs.count("1d")'),
    ("runs.count() > 3", "takes one time", 'runs.count("1d")'),
    ("runs.count(1) > 3", "1 is not a time", 'runs.count("1d")'),
    ("runs.count(vars.limit) > 3", "written out", 'runs.count("1d")'),
    ('runs.count("1 day") > 3', "'1 day'", "1d"),
    ('runs.count("0s") > 3', "longer than 0s", 'runs.count("1d")'),
    ("runs.total > 3", "'total'", "runs.last.status"),
    ("runs.last.state == 'failed'", "'state'", "did you mean 'status'?"),
    ("runs.last.at > '1h'", "runs.last.at", "'1h'"),
    ("run_count > 3", "run_count", 'runs.count("1d")'),
    ("labels.a == “b”", "“", "straight quotes"),
]
WHOLE = [
    ("target: '{{ labels.node }}'", 3, "target", 'target: {node: "{{ labels.node }}"}'),
    ("target: host", 3, "host", "node"),
    ("target: all", 3, "all", "cluster"),
    ("target: gpus", 3, "gpus", "gpu"),
    ("target: {host: a}", 3, "host", "node:"),
    ("target: {pod: a}", 3, "pod", "job:"),
    ("target: {racks: r1}", 3, "racks", "{nodes: {rack: r1}}"),
    ("target: {pool: h100}", 3, "pool", "{nodes: {rack: r1}}"),
]
MANUAL = [
    ("manual", 2, "on", "write on: {manual: {}}"),
    ("{manual: true}", 2, "on.manual", "write manual: {}"),
    ("{manual: }", 2, "manual is empty", "write manual: {}"),
    ("{manual: {by: []}}", 2, "on.manual.by", "leave out 'by'"),
]
"""Values of `on`, in a playbook that a person starts."""
NO_ALERT = [
    ("{schedule: 0 3 * * 2}", "a schedule starts this playbook"),
    ("{event: node-returned}", "an event starts this playbook"),
    ("{run: {playbook: q, status: failed}}", "the end of a run starts this playbook"),
    ("{manual: {}}", "people start this playbook"),
]
"""Values of `on` with which ``again`` never happens."""
OF_INPUTS = [
    ("target: {node: '{{ inputs.w }}'}", 3, "inputs.w is a list", "{nodes: {name:"),
    ("target: {job: '{{ inputs.w }}'}", 3, "inputs.w is a list", "{jobs: {name:"),
    ("target: {node: '{{ inputs.w.foo }}'}", 3, "inputs.w is a list", "inputs.w[0]"),
    (
        "target: cluster\nmode: enforce\nvars: {a: 1}\napproval: {message: '{{ inputs.w.foo }}'}",
        6,
        "has no 'foo'",
        "join",
    ),
]
"""Targets of a playbook with an input `w` of type nodes."""
FRAGMENTS = "---\nfragment: fit\ninputs: {limit: {type: number, required: true}}\nsteps:\n  - {action: node.facts}\n"
"""What is added after `BASE` and a step that uses it wrongly."""
USES = [
    ("{use: fitt, with: {limit: 1}}", "'fitt'", "did you mean 'fit'?"),
    ("{use: fit}", "with.limit", "is required"),
    ("{use: fit, with: {limit: high}}", "with.limit", "not a number"),
    ("{use: fit, with: {limt: 1, limit: 1}}", "with.limt", "did you mean 'limit'?"),
    ("{use: fit, when: labels.a, with: {limit: 1}}", "'when'", "over its inputs"),
    ("{use: fit, timeout: 5m, with: {limit: 1}}", "'timeout'", "at the fragment's steps"),
    ("{use: fit, undo: on_resolve, with: {limit: 1}}", "'undo'", "at the fragment's steps"),
    ("{use: fit, limit: 1}", "'limit'", "id and with"),
    ("{use: fit, inputs: {limit: 1}}", "'inputs'", "with: {name: value}"),
    ("{use: fit.yaml, with: {limit: 1}}", "'fit.yaml'", "there are fit"),
    ("{include: fit}", "'include'", "use: NAME"),
    ("{import_tasks: fit.yaml}", "'import_tasks'", "use: NAME"),
]
JOB = [
    ('{action: job.scale_lr, with: {factor: "50%"}}', "factor", "write 0.5"),
    ("{action: job.scale_lr, with: {factor: 50}}", "factor", "between"),
    ("{action: job.scale_lr, with: {lr: 0.5}}", "lr", "factor"),
    ("{action: job.rollback, with: {before: 10m}}", "before", "alert.startsAt"),
    ("{action: job.rollback, with: {before: 2026-01-01}}", "before", "time with its zone"),
    ("{action: job.rollback, with: {checkpoint: 5}}", "checkpoint", "steps_back"),
    ("{action: job.pause, with: {duration: 5m}}", "duration", "max: 30m"),
    ("{action: alertmanager.silence, with: {for: 1h}}", "for", "duration"),
]
SILENCE = "{action: alertmanager.silence, with: {duration: 1h}}\n  - {wait_for: resolved, timeout: 10m}"


def mistakes() -> Iterator[tuple[str, int, str, str]]:
    """Yield playbook, line of the error, a word that it names, and a part of the cure."""
    for wrong, named, cure in ON:
        yield BASE.replace("{alert: A}", wrong), 2, named, cure
    for wrong, named, cure in TOP:
        yield f"{BASE}{wrong}\n", LAST, named, cure
    for wrong, named, cure in STEPS:
        yield f"{BASE}  - {wrong}\n", LAST, named, cure
    for condition, named, cure in CONDITIONS:
        yield f"{BASE}  - {{wait_for: resolved, when: {json.dumps(condition)}}}\n", LAST, named, cure
    for wrong, line, named, cure in WHOLE:
        yield BASE.replace("target: gpu", wrong).replace("node.facts", "notify"), line, named, cure
    for wrong, named, cure in USES:
        yield f"{BASE}  - {wrong}\n{FRAGMENTS}", LAST, named, cure
    of_job = BASE.replace("target: gpu", "target: job")
    for wrong, named, cure in JOB:
        yield f"{of_job}  - {wrong}\n", LAST, named, cure
    tells = "steps: [{action: notify, with: {message: a}}]\n"
    for wrong, line, named, cure in MANUAL:
        yield f"playbook: p\non: {wrong}\ntarget: cluster\n{tells}", line, named, cure
    for beginning, named in NO_ALERT:
        again = "guards: {again: {after: 30m, times: 3}}"
        yield f"playbook: p\non: {beginning}\n{again}\ntarget: cluster\n{tells}", 3, named, "retry at its steps"
    for wrong, line, named, cure in OF_INPUTS:
        yield f"playbook: p\non: {{manual: {{inputs: {{w: {{type: nodes}}}}}}}}\n{wrong}\n{tells}", line, named, cure
    yield f"{BASE}  - {SILENCE}\n", LAST + 1, "silences", "wait before the silence"
