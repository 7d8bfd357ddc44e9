"""Describes one run to a person: why it began, what each step did, what was taken back, in order.

The functions are pure and return text, which ``history`` and ``runs`` print. They read the document of
``GET /history/{run_id}``, and do not mind members that a newer or older server has added or lacks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from trainmedic_server.cli import ages
from trainmedic_server.cli.table import plain, short_id
from trainmedic_server.domain.plain_text import json_text

Document = Mapping[str, Any]

_SHOWN_NODES = 8


def moment(text: str | None, date: bool = True) -> str:
    """An RFC 3339 time as ``2026-01-31 12:00:00Z``, or its time of day to the millisecond."""
    if not text:
        return "-"
    try:
        value = datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return plain(text)
    return value.strftime("%Y-%m-%d %H:%M:%SZ") if date else value.strftime("%H:%M:%S.%f")[:-3]


def span(milliseconds: float | None) -> str:
    """A length of time in a unit that suits it: ``850 ms``, ``12.3 s``, ``4 min 05 s``, ``2 h 10 min``."""
    if milliseconds is None:
        return "-"
    if milliseconds < 1000:
        return f"{round(milliseconds)} ms"
    seconds = milliseconds / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def data(values: Mapping[str, Any]) -> str:
    """The values as ``percent=80 reason="too hot"``, without those that are empty."""
    return " ".join(
        f"{plain(name)}={_value(value)}" for name, value in values.items() if value not in (None, "", {}, [])
    )


def status(run: Document) -> str:
    """The run's status, and what it waits for."""
    waiting = f", waiting for {plain(run['waiting_on'])}" if run.get("waiting_on") else ""
    return plain(run.get("status")) + waiting


def describe(event: Document) -> str:
    """What happened, by whom where it was a person, and the particulars."""
    actor = event.get("actor")
    by = "" if actor in (None, "trainmedic") else f" by {plain(actor)}"
    return f"{plain(event.get('kind'))}{by}  {data(event.get('data', {}))}".rstrip()


def lines(run: Document) -> Iterator[str]:
    """The whole story of a run, line by line."""
    yield f"Run {plain(run.get('run_id'))}"
    for name, value in _head(run):
        yield f"  {name:<10}{value}"
    parts = (("Alerts", _alerts(run)), ("Logs", _findings(run)), ("Steps", _steps(run)), ("Timeline", _timeline(run)))
    for title, part in parts:
        if content := list(part):
            yield from ("", title, *content)


def next_line(upcoming: Document | None, at: str) -> str:
    """What a run is at, waits for, and does next, in one line; empty where nothing is next."""
    if not upcoming:
        return ""
    parts = [f"at {plain(upcoming['now'])}"] if upcoming["now"] else []
    if upcoming["waits_for"]:
        awaited, holder = plain(upcoming["waits_for"]), upcoming.get("holder")
        parts.append(f"waits for {awaited.replace(plain(holder), short_id(holder)) if holder else awaited}")
        parts += _held_by(upcoming, at)
    if upcoming["not_before"]:
        parts.append(f"not before {ages.moment(upcoming['not_before'], at)}")
    if upcoming["deadline"]:
        otherwise = plain(upcoming["at_deadline"])
        parts.append(f"at the latest {ages.moment(upcoming['deadline'], at)}: {otherwise}")
    return "; ".join([*parts, _then(upcoming)])


def _held_by(upcoming: Document, at: str) -> Iterator[str]:
    """Return what the blocking run does, until when at the latest, and since when this run waits."""
    if holder := upcoming.get("held_by"):
        until = f", until {ages.moment(holder['until'], at)} at the latest" if holder["until"] else ""
        yield f"that run of {plain(holder['playbook'])} {plain(holder['doing'])}{until}"
    if upcoming.get("waiting_since"):
        yield f"waiting {ages.age(upcoming['waiting_since'], at)}"


def _then(upcoming: Document) -> str:
    note = f" ({plain(upcoming['note'])})" if upcoming["note"] else ""
    if upcoming["step"] is None:
        return f"then {plain(upcoming['outcome'] or 'unknown')}{note}"
    what = upcoming["question"] or " ".join((upcoming["action"] or upcoming["kind"], data(upcoming["params"])))
    return f"next {plain(upcoming['step'])}: {plain(what.strip())}{note}"


def finding_lines(finding: Document) -> Iterator[str]:
    """All that is known of a finding, line by line, with the lines around it."""
    yield f"Finding {plain(finding.get('id'))}"
    alert = finding.get("alert") or {}
    over = (
        f"over {moment(finding['ended_at'])} ({plain(finding.get('ended_because'))})" if finding.get("ended_at") else ""
    )
    members = {
        "rule": f"{plain(finding.get('rule'))}, {plain(finding.get('role'))}, cause {plain(finding.get('cause'))}",
        "target": plain(finding.get("target")),
        "claim": _claim(finding),
        "job": " attempt ".join(str(plain(finding[name])) for name in ("job", "attempt") if finding.get(name)),
        "nodes": _nodes(finding.get("nodes", ())),
        "ranks": plain(finding.get("ranks") or ""),
        "count": plain(finding.get("count")),
        "first": moment(finding.get("first_at")),
        "last": moment(finding.get("last_at")),
        "state": "suspected" if finding.get("suspected") else over or "open",
        "confirmed": plain(finding.get("confirmed_by") or ""),
        "alert": data(alert.get("labels", {})) or f"none: {plain(finding.get('no_alert_because'))}",
        "kept": "locked against deletion" if finding.get("kept") else "",
        "line": plain(finding.get("line")),
    }
    yield from (f"  {name:<10}{value}" for name, value in members.items() if value)
    for excerpt in finding.get("excerpts", ()):
        yield ""
        yield from _excerpt(excerpt, "")


def finding_target(finding: Document) -> str:
    """Return the target of a finding, with the job that only its file names."""
    claim = _claim(finding)
    return f"{finding.get('target')} ({claim})" if claim else str(finding.get("target"))


def _claim(finding: Document) -> str:
    job = finding.get("claimed_job")
    return f"a log file that names job {plain(job)}" if job else ""


def _findings(run: Document) -> Iterator[str]:
    for finding in run.get("findings", ()):
        ranks = f", ranks {plain(finding['ranks'])}" if finding.get("ranks") else ""
        name = f"{plain(finding.get('rule'))}  {plain(finding_target(finding))}"
        yield f"  {name}  {plain(finding.get('count'))} lines{ranks}  ({plain(finding.get('id'))})"
        yield from (
            _excerpt(finding["excerpt"], "    ") if finding.get("excerpt") else (f"    {plain(finding.get('line'))}",)
        )


def _excerpt(excerpt: Document, indent: str) -> Iterator[str]:
    """The lines, with a mark before that of the finding, under where they were read."""
    rank = f", rank {excerpt['rank']}" if excerpt.get("rank") is not None else ""
    yield f"{indent}{plain(excerpt.get('node'))}{rank}  {plain(excerpt.get('stream'))}"
    number = excerpt.get("number") or 0
    for place, line in enumerate(excerpt.get("lines", ())):
        mark = ">" if place == excerpt.get("at") else " "
        yield f"{indent}{mark} {f'{number + place:>7}  ' if number else ''}{plain(line)}"


def _head(run: Document) -> Iterator[tuple[str, str]]:
    version = str(run.get("version") or "")[:12]
    yield "playbook", plain(run.get("playbook")) + (f"  (version {plain(version)})" if version else "")
    yield "target", plain(run.get("target"))
    yield "status", status(run)
    yield "decision", plain(run.get("decision"))
    yield "mode", plain(run.get("mode"))
    yield "began", moment(run.get("timestamp"))
    if run.get("ended_at"):
        yield "ended", f"{moment(run['ended_at'])}  (after {span(run.get('duration_ms'))})"
    if run.get("action_taken"):
        yield "did" if run.get("status") != "observed" else "would do", plain(run["action_taken"])
    if run.get("touched"):
        yield "touched", _nodes(run["touched"])
    if run.get("owes_undo"):
        yield "owes", "an undo" + (f", not done yet: {plain(run['undo_error'])}" if run.get("undo_error") else "")
    if run.get("message"):
        yield "message", plain(run["message"])
    if run.get("effect"):
        yield "effect", _effect(run["effect"])
    if upcoming := next_line(run.get("next"), datetime.now(UTC).isoformat()):
        yield "next", upcoming


def _effect(effect: Document) -> str:
    """Whether it helped, and the alert's metric before, at and after the act as far as it was measured."""
    moments = (("before", "before"), ("at", "at the act"), ("after", "10 min after"))
    measured = [f"{words} {effect[name]:g}" for name, words in moments if effect.get(name) is not None]
    reason = [plain(effect["reason"])] if effect.get("reason") else []
    verdict = plain(effect.get("verdict")).replace("_", " ")
    return verdict + (f": {', '.join([*measured, *reason])}" if measured or reason else "")


def _nodes(names: Sequence[str]) -> str:
    """The first of these nodes, and how many more there are."""
    more = f" and {len(names) - _SHOWN_NODES} more nodes" if len(names) > _SHOWN_NODES else ""
    return ", ".join(map(plain, names[:_SHOWN_NODES])) + more


def _alerts(run: Document) -> Iterator[str]:
    for alert in run.get("alerts", ()):
        labels = dict(alert.get("labels", {}))
        name = labels.pop("alertname", "(no alertname)")
        if alert.get("resolved_at"):
            because = plain(alert.get("resolved_because"))
            state = f"resolved {moment(alert['resolved_at'])} ({because})"
        else:
            state = plain(alert.get("status"))
        yield f"  {plain(name)}  since {moment(alert.get('starts_at'))}, {state}, heard {_times(alert.get('count', 1))}"
        if labels:
            yield f"    labels       {data(labels)}"
        if (sent := alert.get("original_labels")) is not None:
            original = dict(sent)
            yield f"    mapped from  {plain(original.pop('alertname', '(no alertname)'))}  {data(original)}".rstrip()
        if alert.get("annotations"):
            yield f"    annotations  {data(alert['annotations'])}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _steps(run: Document) -> Iterator[str]:
    for step in run.get("steps", ()):
        phase = {"on_success": "on success: ", "on_failure": "on failure: "}.get(str(step.get("phase")), "")
        action = plain(step.get("action") or step.get("kind"))
        yield f"  {phase}{plain(step.get('id'))}  {action}  {plain(step.get('status'))}{_took(step)}"
        if step.get("kind") == "approve":
            yield from _terms(step.get("params") or {})
        elif step.get("params"):
            yield f"    with     {data(step['params'])}"
        if step.get("message"):
            yield f"    {'asks' if step.get('kind') == 'approve' else 'note'}     {plain(step['message'])}"
        yield from _results(step, "    ")
        if undo := step.get("undo"):
            because = f" because {plain(undo['because'])}" if undo.get("because") else ""
            call = f"{plain(undo.get('action'))} {data(undo.get('params', {}))}".rstrip()
            yield f"    undo     {call}  {plain(undo.get('status'))}{because} ({plain(undo.get('trigger'))})"
            yield from _results(undo, "      ")
            if undo.get("retry_at"):
                yield f"      again    {moment(undo['retry_at'])}"


def _terms(terms: Document) -> Iterator[str]:
    """What an approval is asked for, and of whom."""
    for ahead in terms.get("steps", ()):
        note = f"  ({plain(ahead['note'])})" if ahead.get("note") else ""
        yield f"    would    {plain(ahead.get('action'))}  {data(ahead.get('params') or {})}".rstrip() + note
    who = " or ".join(map(plain, terms.get("by") or ())) or "any operator"
    number = f", {terms['count']} different people" if (terms.get("count") or 1) > 1 else ""
    times = f"; asked {_times(terms['asked'])}" if (terms.get("asked") or 1) > 1 else ""
    yield f"    of       {who}{number}{times}"


def _results(performed: Document, indent: str) -> Iterator[str]:
    """What came of a step or an undo; its attempts only where more happened than one success."""
    attempts = performed.get("attempts", ())
    if len(attempts) > 1 or any(attempt.get("error") for attempt in attempts):
        for attempt in attempts:
            error = f": {plain(attempt['error'])}" if attempt.get("error") else ""
            began = moment(attempt.get("started_at"), date=False)
            yield f"{indent}attempt {attempt.get('number')} at {began}  {plain(attempt.get('status'))}{error}"
    if performed.get("output"):
        yield f"{indent}output   {data(performed['output'])}"
    if performed.get("error"):
        yield f"{indent}error    {plain(performed['error'])}"


def _timeline(run: Document) -> Iterator[str]:
    previous_day = None
    for event in run.get("events", ()):
        day = moment(event.get("at"))[:10]
        if day != previous_day:
            yield f"  {day}"
            previous_day = day
        yield f"  {moment(event.get('at'), date=False)}  {describe(event)}"


def _took(step: Document) -> str:
    try:
        began, ended = (datetime.fromisoformat(step[name]) for name in ("started_at", "ended_at"))
    except (KeyError, TypeError, ValueError):
        return ""
    return f"  ({span((ended - began).total_seconds() * 1000)})"


def _value(value: Any) -> str:
    if isinstance(value, str):
        shown = plain(value)
        return json.dumps(shown, ensure_ascii=False) if " " in shown or not shown else shown
    return plain(json_text(value, default=str))
