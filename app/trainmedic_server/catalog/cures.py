"""Advice in errors for words of other systems in playbooks. It neither accepts nor refuses anything."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainmedic_core.problems import DocumentPath
from trainmedic_core.target import MEMBER_KINDS
from trainmedic_server.domain.playbook import CHECK, MOST_ATTEMPTS, ON_LIMITED, PHASES, place_of

_WAIT = "a step waits with 'wait_for: resolved', or wait_for: {query: PROMQL, for: 5m}, and a timeout"
_GUARDS = "it belongs under 'guards'"
_LABELS = "write matchers: ['severity=\"critical\"']"
_ON_FAILURE = "list these steps under 'on_failure' of the playbook"
_WHEN = "write the condition under 'when', without braces"
_RETRY = "write retry: {attempts: 3, delay: 10s}"
_ALERT = "a playbook begins with one of: on: {alert: NAME}, {schedule: CRON}, {manual: {by: [NAME]}}"
_OUTPUT = "give the step an id; later steps use steps.<id>.output"
_NO_LOOP = "there are no loops; an action works on one target, and each alert starts a run for its target"
_ORDER = "steps run one after the other in the order of the list"
_NOT_IN_STEP = "commands are actions: write action: NAME, from docs/reference/actions.md"
_MAX_RUNS = "write max_runs: {count: 5, per: 1h}"
_APPROVE = 'a question is a step: approve: "…?"'
_ONLY_ACTIONS = "on_limited has only actions that change nothing, such as action: notify"
_NOT_AN_ACTION = ("wait_for", "wait", "wait_until", "approve", "on_timeout")
_HEADER = "a playbook begins with 'playbook: NAME', 'on', 'target' and 'steps'"


def _table(words_by_cure: Mapping[str, str]) -> Mapping[str, str]:  # cures by word; words are separated by blanks
    return {word: cure for cure, words in words_by_cure.items() for word in words.split()}


# For unknown keys, by the mapping that has them.
DOCUMENT = _table(
    {
        _GUARDS: "cooldown max_runs max_concurrent again on_limited min_available queue",
        "write guards: {max_concurrent: 1}": "concurrency serial throttle rate_limit",
        "it belongs under 'on'": "alert alerts alertname matchers proof",
        "under 'on', write matchers: ['severity=\"critical\"']": "severity labels match filter selector",
        "a condition on the alert belongs under 'on' as 'when'": "when condition conditions",
        "write a document of its own: fragment: NAME, with its steps": "fragment include anchors x-steps",
        "it belongs to each step": "timeout retry retries undo",
        _ON_FAILURE: "on_error rescue finally always catch on_fail onfailure",
        _HEADER: "apiVersion kind metadata spec version hosts jobs entrypoint",
        "write playbook: NAME": "id alias pack",
        "write summary: TEXT": "desc comment",
        "write steps:, a list": "actions plays workflow templates runs-on",
        _ALERT: "rules source sources events",
        'a question is a step: approve: "…?"; of mode approve: approval: {by: [NAME]}': (
            "approve approvers approval_required"
        ),
        "write vars: {name: value}": "env variables parameters params defaults vars_files",
        "write mode: observe": "dry_run dryrun check_mode enabled disabled",
        "write undo: on_resolve at the step that is to be undone": "on_resolve on_resolved rollback",
        "a message is a step: action: notify": "notify notifications",
        "write target: gpu, node, job or cluster": "node gpu job cluster targets",
        "actions need no user; the agent's policy limits them": "become",
        "the server's tokens limit who may act": "permissions",
    }
)
ON = _table(
    {
        _LABELS: "severity labels label match match_re filter selector namespace",
        "write alert: NAME, or a list of names": "alertname alert_name alerts name",
        _WHEN: "condition conditions expr unless",
        "the alert rule in Prometheus has 'for'": "for duration",
        "write guards: {cooldown: 10m} at the playbook": "cooldown throttle once_within",
        "a run begins when an alert fires; 'undo: on_resolve' acts at its end": "status state",
        "write alert: NAME, or event: NAME for POST /events/NAME": (
            "push pull_request workflow_dispatch webhook source events http"
        ),
        'write schedule: "0 3 * * 2"': "cron crontab at times every interval",
        "write run: {playbook: NAME, status: failed}": "playbook after workflow_run runs depends_on needs",
        "write timezone: Europe/Berlin": "tz zone time_zone timeZone",
        "it belongs to the playbook, next to 'on'": "target only_during",
    }
)
STEP = _table(
    {
        "write wait: 5m": "sleep pause delay suspend wait_seconds duration",
        "write wait_for: {query: PROMQL, for: 5m, every: 30s}, and a timeout": "query expr promql poll",
        "write wait_until: 2026-01-31T12:00:00Z": "at start_at not_before",
        _RETRY: "retries attempts max_attempts retryStrategy backoff max_retries",
        "write when: CONDITION, without braces": "condition unless only_if",
        "check with 'when' at a later step, or use 'wait_for'": "until failed_when changed_when",
        _OUTPUT: "register outputs publish save output",
        _NO_LOOP: "loop with_items foreach for_each items matrix withItems withParam",
        _ORDER: "needs depends_on dependencies depends after next do parallel block steps",
        _NOT_IN_STEP: "run shell command script cmd exec",
        "write action: NAME, or use: NAME of a fragment": (
            "uses run_action module template templateRef ref type function include include_tasks import_tasks call"
        ),
        "write with: {name: value}": "input inputs vars env",
        "write on_error: continue": "ignore_errors continue-on-error continue_on_error continueOn ignore_error",
        _ON_FAILURE: "rescue catch on_failure on-failure always else on_fail onError",
        "write id: NAME": "name key step",
        'write approve: {message: "…?", by: [NAME]}': "approval confirm ask manual by approvers",
        "the playbook's 'target' is what all steps work on; with several, a step that acts says which: target: jobs": (
            "delegate_to hosts node target on"
        ),
        "write undo: on_resolve": "rollback revert on_resolve compensate",
        "write action: notify with: {message: TEXT}": "message title text to channel notify",
        "it belongs under 'guards' of the playbook": "cooldown max_runs max_concurrent min_available",
        "only a step with 'action' has it": "with retry undo",
        "only a step with 'wait_for' or 'approve' has it": "on_timeout",
        "write timeout: 10m": "timeout-minutes timeout_seconds activeDeadlineSeconds deadline time_limit",
    }
)
POLL = _table(
    {
        "write query: PROMQL, or action: NAME": "alert job node pod status",
        "write query: PROMQL": "promql expr expression metric prometheus",
        "write for: 5m": "duration hold stable during",
        "write every: 30s": "interval poll period sleep delay wait",
        "it belongs to the step, next to 'wait_for'": "timeout on_timeout when id on_error",
        "write until: CONDITION, over output": "condition check success_when",
    }
)
GUARDS = _table(
    {
        _MAX_RUNS: "rate_limit max_per_hour limit rate max throttle burst",
        "write max_concurrent: 1": "concurrency parallel serial max_parallel",
        "write min_available: 90%": "max_unavailable min_healthy min_idle min_nodes",
        "write cooldown: 10m": "cool_down once_within interval dedup delay wait",
        "write on_limited: [{action: notify, with: {message: TEXT}}]": (
            "on_limit on_refused on_rate_limited on_max_runs limited notify on_exceeded"
        ),
        "write again: {after: 30m, times: 3}": "retry repeat rerun retries try_again repeat_after",
    }
)
AGAIN = _table(
    {
        "write after: 30m": "delay interval wait every in backoff cooldown for",
        "write times: 3": "count max attempts limit retries max_runs number",
    }
)
RATE = _table(
    {
        "write per: 1h": "window within interval period in every over",
    }
)
RETRY = _table(
    {
        "write attempts: 3": "count max limit retries times max_attempts number",
        "write delay: 10s": "interval wait sleep every pause seconds",
    }
)
FRAGMENT = _table(
    {
        "it belongs to the playbook that uses the fragment": (
            "playbook on target guards mode approval priority exclusive rollout only_during effect on_failure "
            "on_success"
        ),
        "a fragment has inputs: {name: {type: text, default: a}}": "vars parameters params with env arguments",
        "write summary: TEXT": "description desc comment",
        "write fragment: NAME": "name id",
        "write its result as steps['<use>.<step>'].output": "outputs output returns",
    }
)
USE = _table(
    {
        "write when at the fragment's steps, over its inputs": "when if condition",
        "write it at the fragment's steps": "timeout retry undo on_error on_timeout",
        "there are no loops; write a use for each": "loop foreach with_items matrix for_each",
        "a step has exactly one of use, action and waits": "action wait_for wait wait_until approve",
        "write with: {name: value}": "inputs vars params parameters args arguments env input",
        "write id: NAME": "name as",
    }
)
QUESTION = _table(
    {
        "write by: [NAME]": "approvers users groups who from reviewers users_from",
        "write message: TEXT": "text question prompt title ask",
        "write to: CHANNEL": "channel notify via",
        "write count: 2": "min required minimum quorum approvals",
        "it belongs to the step, next to 'approve'": "on_timeout default on_error timeout",
    }
)
TARGET = _table(
    {
        'write node: "{{ labels.instance }}"': "host instance hostname server name",
        "write gpu: with its node": "uuid index device gpu_id",
        'write job: "pod:<namespace>/<name>"': "pod namespace deployment",
        "write target: gpu, node, job or cluster": "kind",
        "attributes select a group: write target: {nodes: {rack: r1}}": (
            "rack racks pool pools partition partitions zone row room label labels selector attributes"
        ),
    }
)
PARAMETERS: Mapping[str, Mapping[str, str]] = {  # by action
    "gpu.power_limit": _table(
        {
            "write percent: 80, or watts: 300": "limit power power_limit value cap",
            "write percent: 80": "factor fraction ratio",
        }
    ),
    "notify": _table(
        {
            "write message: TEXT": "text body msg content",
            "write to: CHANNEL": "channel url urls recipients sink sinks",
            "write title: TEXT": "subject header",
            "write severity: warning": "level priority",
        }
    ),
    "http.request": _table(
        {
            "write json: or body:": "data payload content",
            "write query:": "params",
            "write bearer_from_env: TRAINMEDIC_HTTP_NAME": "token auth authorization password bearer",
            "write expect: 2xx": "status status_code expected_status success_codes",
            "write url:": "uri",
        }
    ),
    "job.scale_lr": _table(
        {
            "write factor: 0.5": "lr scale multiplier by percent learning_rate",
        }
    ),
    "job.rollback": _table(
        {
            "write steps_back: 100, or step: 5000": "checkpoint to steps count",
        }
    ),
    "job.pause": _table(
        {
            "write max: 30m": "for duration minutes timeout_minutes seconds",
        }
    ),
    "alertmanager.silence": _table(
        {
            "write duration: 1h": "for minutes hours ends_at until",
            "write labels: [alertname, node]": "matchers match",
        }
    ),
}
_STEP_KEYS = ("timeout", "retry", "undo", "when", "id", "on_error")
_KEYS: Mapping[DocumentPath, Mapping[str, str]] = {  # by the mapping that has them; ``steps`` is a step of any phase
    (): DOCUMENT,
    ("on",): ON,
    ("target",): TARGET,
    ("guards",): GUARDS,
    ("guards", "again"): AGAIN,
    ("guards", "max_runs"): RATE,
    ("approval",): QUESTION,
    ("steps",): STEP,
    ("steps", "approve"): QUESTION,
    ("steps", "wait_for"): POLL,
    ("steps", "retry"): RETRY,
}
_VALUES: Mapping[DocumentPath, str] = {  # for wrong values, by their place
    ("on", "manual"): "write manual: {}, or manual: {by: [NAME], inputs: {…}}",
    ("guards", "max_runs"): _MAX_RUNS,
    ("guards", "again"): "write again: {after: 30m, times: 3}",
    ("guards",): "write guards: {cooldown: 10m}",
    ("approval",): "write approval: {by: [NAME], timeout: 1h}",
    ("vars",): "write vars: {name: value}",
    ("effect",): "write effect: {query: PROMQL, better: lower}",
}

# For unknown names in expressions, and for unknown members of a step, whose ID replaces ``{id}``.
NAMES = _table(
    {
        'write steps.<id>.status == "failed"': "success failure always cancelled failed",
        "write labels.x | length": "len size count",
        'write "part" in labels.x': "contains includes",
        'write labels.x.startswith("a")': "startsWith startswith endsWith endswith",
        "write labels.x | number": "float int number Number toNumber",
        "write steps.x.output.y | string": "str string toString",
        "write 'is defined', or 'is none'": "null nil undefined NULL Null",
        "write true or false": "TRUE yes Yes FALSE no No",
        "write alert, labels or annotations": "event trigger payload github workflow ctx request alertmanager",
        "constants are under vars: vars.name": "inputs parameters params env ansible_vars input",
        "there are no loops over steps": "item items loop matrix",
        "earlier runs are known in steps: write when at a step": "runs",
        'write runs.count("1d"), or runs.last.status': "history previous_runs last_run run_count attempts retries",
        "write steps.<id>.output": "outputs result results needs task tasks previous output",
        "write target.node": "inventory_hostname ansible_hostname hostname host",
        "write target.node or labels.node": "node gpu",
        "write labels.<name>": "severity instance alertname namespace pod job_name device",
        "write annotations.<name>": "summary description runbook_url value",
        "a secret is named by bearer_from_env and never part of a text": "secrets vault",
        "write alert.status, or steps.<id>.status": "status",
    }
)
STEP_MEMBERS = _table(
    {
        'write steps.{id}.status == "succeeded"': "succeeded success ok changed completed",
        'write steps.{id}.status == "failed"': "failed failure rc exit_code",
        "write steps.{id}.status": "outcome conclusion state phase",
        "write steps.{id}.output": "outputs result stdout json results data",
        "write steps.{id}.error": "message reason stderr",
    }
)
# For expressions that cannot be parsed: the cure of the first pattern found in the text.
_MALFORMED: Sequence[tuple[str, str]] = (
    (r"\bAND\b", "write 'and'"),
    (r"\bOR\b", "write 'or'"),
    (r"\bNOT\b", "write 'not'"),
    (r"===", "two values are compared with =="),
    (
        r"=~|!~|~=|\bis (not )?(match|search|regex)|regex|\bmatches\b|\blike\b",
        "regular expressions are written in on.matchers",
    ),
    (r"\bis (not )?(null|nil|empty)\b|\bexists\b", "write 'is defined', or 'is none'"),
    (r"\bis (not )?(failed|succeeded|success|skipped|failure|changed)\b", 'write steps.<id>.status == "failed"'),
    (r"\?", "write a if condition else b"),
    (r"<>|\bne\b", "write !="),
    (r"-eq\b|\beq\b", "write =="),
    (r"-gt\b|\bgt\b", "write >"),
    (r"-lt\b|\blt\b", "write <"),
    (r"\d\s*%", "write the number without %"),
    (r"\bcontains\b|\bhas\b", 'write "part" in labels.x'),
    (r"^\s*if\b|\bthen\b", "write the condition alone, without 'if' and 'then'"),
    (r"\|\s*bool\b", 'compare with the text: labels.x == "true"'),
    (r"[“”„‘’]", 'use straight quotes: "'),
    (r"\{[a-z]", "write names without braces: labels.x"),
)


def of_fault(path: DocumentPath, kind: str, value: Any) -> str | None:
    """Return advice for a wrong `value`, None if none is known. `kind` is pydantic's error type."""
    if path[:2] == place_of(ON_LIMITED):
        return _of_limited(path[1:], kind, value)
    if path[:2] == place_of(CHECK):
        path = path[1:]
    if kind == "extra_forbidden":
        return _of_key(path[:-1], str(path[-1]))
    match path:
        case ("on",) if value == "manual":
            return "write on: {manual: {}}"
        case ("on", "manual", "by") if kind == "too_short":
            return "name somebody, or leave out 'by' for everybody who may operate"
        case ("on",) if isinstance(value, str):
            return f"write on: {{alert: {value}}}"
        case ("on",) if isinstance(value, list):
            return "write on: {alert: [NAME, NAME]}"
        case ("on", "event") if isinstance(value, list):
            return "write event: NAME, and a playbook for each event"
        case ("target",) if isinstance(value, str):
            return _of_target(value)
        case ("target",):
            return "write target: gpu, node, job or cluster, or a group such as {nodes: {pool: h100}}"
        case ("mode",):
            return _of_mode(str(value))
        case (str() as phase, int()) if phase in PHASES and isinstance(value, str):
            return f"write action: {value}" if "." in value else "write action: NAME"
        case (str() as phase, int(), "wait_for", _, *_) if phase in PHASES:
            return None
        case (str() as phase, int(), str() as key) if phase in PHASES:
            return _of_step_value(key, value)
    return _VALUES.get(path)


def _of_limited(path: DocumentPath, kind: str, value: Any) -> str | None:
    if kind == "extra_forbidden" and len(path) == 3 and path[2] in _NOT_AN_ACTION:
        return _ONLY_ACTIONS
    if len(path) == 1:
        return "write on_limited: [{action: notify, with: {message: TEXT}}]"
    return of_fault(("steps", *path[1:]), kind, value)


def of_fragment(path: DocumentPath, kind: str, value: Any) -> str | None:
    if kind == "extra_forbidden" and len(path) == 1:
        return FRAGMENT.get(str(path[0]))
    if path == ("inputs",) or (len(path) == 2 and path[0] == "inputs"):
        return "write inputs: {name: {type: number, default: 100}}"
    return of_fault(path, kind, value) if path[:1] == ("steps",) else None


def of_use(path: DocumentPath, kind: str, value: Any) -> str | None:
    if kind == "extra_forbidden" and len(path) == 1:
        return USE.get(str(path[0]), "a use takes id and with; write others at the fragment's steps")
    if path == ("use",):
        return "write use: NAME, the name of a fragment"
    return "write with: {name: value}" if path == ("with",) else None


def of_parameter(action: str, path: DocumentPath, kind: str) -> str | None:
    if kind != "extra_forbidden" or len(path) != 1:
        return None
    name = str(path[0])
    if name in _STEP_KEYS:
        return f"{name!r} belongs to the step, next to 'with'"
    return PARAMETERS.get(action, {}).get(name)


def of_expression(text: str) -> str:
    """Return "" if no advice is known."""
    return next((f"; {cure}" for pattern, cure in _MALFORMED if re.search(pattern, text)), "")


def _of_key(owner: DocumentPath, key: str) -> str | None:
    match owner:
        case (str(), int()) if key not in STEP and "." in key:
            return f"write action: {key}, and its parameters under 'with'"
        case (str(), int(), *member):
            owner = ("steps", *member)
    return _KEYS.get(owner, {}).get(key)


def _of_target(value: str) -> str | None:
    if "{{" in value:
        return f'write target: {{node: "{value}"}}, or gpu with its node, or job'
    if value in MEMBER_KINDS:
        return f"write target: {{{value}: all}}, or {MEMBER_KINDS[value]} for the one of the alert"
    near = {"host": "node", "instance": "node", "server": "node", "machine": "node", "device": "gpu", "pod": "job"}
    return f"write target: {near[value]}" if value in near else None


def _of_mode(value: str) -> str | None:
    meant = {
        **dict.fromkeys(("dry-run", "dry_run", "dryrun", "check", "monitor", "off", "disabled", "test"), "observe"),
        **dict.fromkeys(("auto", "automatic", "active", "on", "live", "execute", "true"), "enforce"),
        **dict.fromkeys(("manual", "ask", "confirm", "semi-auto"), "approve"),
    }
    return f"write mode: {meant[value.lower()]}" if value.lower() in meant else None


def _of_wait_for(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"(\d+(ms|[smhdwy]))+", value):
        return f"write wait: {value}"
    if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d", value):
        return f"write wait_until: {value}"
    if isinstance(value, dict):
        return "write query: PROMQL, or action: NAME"
    return _WAIT


def _of_step_value(key: str, value: Any) -> str | None:
    if key == "retry" and not isinstance(value, dict):
        is_number = type(value) is int and 1 <= value <= MOST_ATTEMPTS
        return f"write retry: {{attempts: {value if is_number else 3}}}"
    if key == "with":
        return "write with: {name: value}"
    if key == "undo":
        return "write undo: on_resolve, or on_failure"
    if key == "wait_for":
        return _of_wait_for(value)
    if key == "approve" and not isinstance(value, (str, dict)):
        return _APPROVE
    if key == "on_error":
        return "write on_error: continue; steps for a failed run are under 'on_failure'"
    return None
