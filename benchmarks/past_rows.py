"""Filling of a run store with a cluster's runs by SQL, on SQLite and PostgreSQL.

Of twenty runs eleven succeed, and most of these revert their changes; two fail, three are observed and four blocked.
One run begins every few seconds, the newest now.
"""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

SECONDS_APART = 8
BATCH = 100_000
NODES, JOBS, PLAYBOOKS = 12_500, 2_000, 40
NEVER_MET = ("TrainingLossSpike", "never-with-a-loss")
"""An alertname, and a node on which it never fires, though both have many runs."""

_NUMBERS = "WITH RECURSIVE n(i) AS (SELECT CAST({first} AS BIGINT) UNION ALL SELECT i + 1 FROM n WHERE i < {last})"
_DIGITS = "substr(CAST(1000000000000 + i AS TEXT), 2)"
_COMMAND = f"('01a205e0-4bf4-7000-9447-' || {_DIGITS})"
_PRINT = f"('c0ffee' || {_DIGITS})"
_AT = f"({{newest}} - ({{count}} - i) * {SECONDS_APART}000000)"
_MADE = f"{{hex[0]}}{_AT} / 1000{{hex[1]}}"
_RUN = f"(substr({_MADE}, 1, 8) || '-' || substr({_MADE}, 9) || '-7000-a47e-' || {_DIGITS})"
_ON_JOB = "i % 4 = 0"
_NODE = f"(CASE WHEN i % 97 = 1 AND i % 4 <> 0 THEN '{NEVER_MET[1]}' ELSE 'node-' || (i % {NODES}) END)"
_JOB = f"('job-' || (i % {JOBS}))"
_NAME = f"(CASE WHEN {_ON_JOB} THEN '{NEVER_MET[0]}' ELSE 'GPUAlert' || (i % 23) END)"
_PLAYBOOK = f"('playbook-' || (i % {PLAYBOOKS}))"
_STATUS = (
    "(CASE WHEN i % 20 < 11 THEN 'succeeded' WHEN i % 20 < 13 THEN 'failed' WHEN i % 20 < 16 THEN 'observed'"
    " ELSE 'not_started' END)"
)
_DECISION = (
    "(CASE WHEN i % 20 < 13 THEN 'started' WHEN i % 20 < 16 THEN 'observe_only' ELSE"
    " (CASE WHEN i % 3 = 0 THEN 'paused' ELSE 'cooldown' END) END)"
)
_TARGET = f"(CASE WHEN {_ON_JOB} THEN 'job:' || {_JOB} ELSE 'gpu:' || {_NODE} || '/GPU-' || (i % 8) END)"
_LABELS = (
    f'(\'{{{{"alertname":"\' || {_NAME} || \'","severity":"critical","cluster":"east-1","instance":"10.1.\''
    f' || (i % 200) || \'.7:9400","node":"\' || {_NODE} || \'","gpu":"\' || (i % 8) || \'"}}}}\')'
)
_ATTEMPT = (
    f'(\'[{{{{"number":1,"command_id":"\' || {_COMMAND} || \'","started_at":\' || {_AT} || \',"deadline":\' || {_AT}'
    f' || \',"status":"applied","ended_at":\' || {_AT} || \',"error":null}}}}]\')'
)
_EVENTS = {
    "started": ("i > 0", f"'{{{{\"alert\":\"' || {_NAME} || '\",\"playbook\":\"' || {_PLAYBOOK} || '\",\"target\":\"'"
                         f" || {_TARGET} || '\",\"why\":\"\"}}}}'"),
    "step_started": ("i % 20 < 13", "'{{\"step\":\"cap\",\"action\":\"gpu.power_limit\",\"params\":{{\"percent\":80}},"
                                    f"\"attempt\":1,\"command_id\":\"' || {_COMMAND} || '\"}}}}'"),
    "step_succeeded": ("i % 20 < 11", "'{{\"step\":\"cap\",\"action\":\"gpu.power_limit\",\"output\":{{\"watts\":560,"
                                      "\"was\":700}}}}'"),
    "closed": ("i % 20 < 13", "'{{\"status\":\"succeeded\",\"message\":\"applied gpu.power_limit\"}}'"),
    "alert_resolved": ("i % 20 < 16", f"'{{{{\"alert\":\"' || {_NAME} || '\",\"because\":\"alertmanager\"}}}}'"),
    "undo_started": ("i % 20 < 9", "'{{\"step\":\"cap\",\"action\":\"gpu.power_limit\",\"params\":{{\"watts\":700}},"
                                   "\"because\":\"resolved (alertmanager)\"}}'"),
    "undo_done": ("i % 20 < 9", "'{{\"step\":\"cap\",\"action\":\"gpu.power_limit\",\"output\":{{\"watts\":700}}}}'"),
}  # fmt: skip


def _statements() -> Iterator[str]:
    yield (
        "INSERT INTO alerts (fingerprint, starts_at, status, labels, annotations, ends_at, generator_url,"
        " first_heard_at, last_heard_at, times_heard, resolved_at, resolved_because, alert_name, reactions, reacted)"
        f" {_NUMBERS} SELECT {_PRINT}, {_AT}, 'resolved', {_LABELS}, '{{{{\"summary\":\"a GPU is hot\"}}}}',"
        f" {_AT} + 60000000, '', {_AT}, {_AT} + 60000000, 2, {_AT} + 60000000, 'alertmanager', {_NAME},"
        f" '[[\"' || {_PLAYBOOK} || '\",\"' || {_DECISION} || '\",\"\",\"' || {_RUN} || '\"]]', i > 0 FROM n"
    )
    yield (
        "INSERT INTO runs (id, playbook, version, target_kind, node, gpu, job, target_key, mode, status, decision,"
        " alert_fingerprint, alert_starts_at, alert_name, alert_labels, created_at, ended_at, acted_at, message,"
        f" unfinished) {_NUMBERS} SELECT {_RUN}, {_PLAYBOOK},"
        " '2923f992bf3f1c07c51a639f3e780a1ab7d919a74d3707ff2d93960671b9db4e',"
        f" CASE WHEN {_ON_JOB} THEN 'job' ELSE 'gpu' END, CASE WHEN {_ON_JOB} THEN NULL ELSE {_NODE} END,"
        f" CASE WHEN {_ON_JOB} THEN NULL ELSE 'GPU-' || (i % 8) END, CASE WHEN {_ON_JOB} THEN {_JOB} ELSE NULL END,"
        f" {_TARGET}, 'enforce', {_STATUS}, {_DECISION}, {_PRINT}, {_AT}, {_NAME}, {_LABELS}, {_AT},"
        f" {_AT} + 5000000 + i % 7 * 1000000, CASE WHEN i % 20 < 13 THEN {_AT} ELSE NULL END,"
        " CASE WHEN i % 20 < 13 THEN 'applied gpu.power_limit; taken back' ELSE '4 minutes of cooldown are left' END,"
        " i < 0 FROM n"
    )
    yield (f"INSERT INTO run_alerts (run_id, fingerprint, starts_at) {_NUMBERS} SELECT {_RUN}, {_PRINT}, {_AT} FROM n")
    yield (
        "INSERT INTO steps (run_id, phase, position, id, kind, action, status, params, attempts, output, started_at,"
        " ended_at, command_id, undo_trigger, undo_action, undo_params, undo_of, undo_status, undo_because,"
        f" undo_attempts, undo_output) {_NUMBERS} SELECT {_RUN}, 'steps', 0, 'cap', 'action',"
        f" 'gpu.power_limit', 'succeeded', '{{{{\"percent\":80}}}}', {_ATTEMPT}, '{{{{\"watts\":560}}}}', {_AT},"
        f" {_AT} + 30000, {_COMMAND}, 'on_resolve', 'gpu.power_limit', '{{{{\"watts\":700}}}}', {_COMMAND}, 'done',"
        f" 'resolved (alertmanager)', {_ATTEMPT}, '{{{{\"watts\":700}}}}' FROM n WHERE i % 20 < 13"
    )
    yield (
        f"INSERT INTO touched_nodes (run_id, node, at) {_NUMBERS} SELECT {_RUN}, {_NODE}, {_AT} FROM n"
        f" WHERE i % 20 < 13 AND NOT {_ON_JOB}"
    )
    for kind, (condition, data) in _EVENTS.items():
        yield (
            f"INSERT INTO events (run_id, kind, at, actor, data) {_NUMBERS} SELECT {_RUN}, '{kind}', {_AT},"
            f" 'trainmedic', {data} FROM n WHERE {condition}"
        )


_DAYS = """
INSERT INTO playbook_days (day, playbook, fact, count)
SELECT created_at / 86400000000 AS day, playbook, 'status:' || status, count(*) FROM runs GROUP BY 1, 2, 3
UNION ALL SELECT created_at / 86400000000, playbook,
'repair_seconds:' || ((ended_at - created_at) / 1000000) || '.0', count(*)
FROM runs WHERE status = 'succeeded' GROUP BY 1, 2, 3
"""
"""Counts that the server makes as it writes runs."""
_HEX = {"sqlite": ("printf('%012x', ", ")"), "postgresql": ("lpad(to_hex(", "), 12, '0')")}
"""SQL for twelve hexadecimal digits of a number."""


def fill(connection: sa.Connection, count: int, newest: int) -> None:
    """Add `count` runs, the last created at `newest`, in microseconds since 1970."""
    hex_digits = _HEX[connection.dialect.name]
    for first in range(1, count + 1, BATCH):
        last = min(first + BATCH - 1, count)
        with connection.begin():
            for statement in _statements():
                text = statement.format(first=first, last=last, newest=newest, count=count, hex=hex_digits)
                connection.exec_driver_sql(text.replace("%", "%%") if connection.dialect.name == "postgresql" else text)
    with connection.begin():
        connection.exec_driver_sql(_DAYS)
