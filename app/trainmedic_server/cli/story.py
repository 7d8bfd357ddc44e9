"""Text of one run. Pure. Tolerates fields that other server versions lack or add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from trainmedic_core.words import call, data, few, how_often, plain
from trainmedic_server.presentation import questions, run_story, runs, sentences, steps, targets, times
from trainmedic_server.presentation.runs import short_id
from trainmedic_server.presentation.sentences import At, Piece, RunName, Sentence, Values

Document = Mapping[str, Any]

_PHASES = {"check": "check: ", "on_success": "on success: ", "on_failure": "on failure: "}


def status(run: Document) -> str:
    waiting = f", waiting for {plain(run['waiting_on'])}" if run.get("waiting_on") else ""
    return plain(run.get("status")) + waiting


def describe(event: Document) -> str:
    actor = event.get("actor")
    by = "" if actor in (None, "trainmedic") else f" by {plain(actor)}"
    return f"{plain(event.get('kind'))}{by}  {data(event.get('data', {}))}".rstrip()


def lines(run: Document) -> Iterator[str]:
    yield f"Run {plain(run.get('run_id'))}"
    yield from (f"  {name:<10}{value}" for name, value in _head(run))
    parts = (("Alerts", _alerts(run)), ("Logs", _findings(run)), ("Steps", _steps(run)), ("Timeline", _timeline(run)))
    for title, part in parts:
        if content := list(part):
            yield from ("", title, *content)


def next_line(upcoming: Document | None, at: str) -> str:
    phrases = runs.next_words(upcoming)
    return "; ".join(_written(each, at) for each in (*phrases.now, *phrases.until, phrases.then)) if phrases else ""


def _written(sentence: Sentence, at: str) -> str:
    def write(piece: Piece) -> str:
        match piece:
            case At(time):
                return times.near(time, at)
            case RunName(run_id):
                return short_id(run_id)
            case Values(values):
                return data(values)
        return plain(piece)

    return sentences.joined(sentence, write)


def finding_lines(finding: Document) -> Iterator[str]:
    yield f"Finding {plain(finding.get('id'))}"
    alert = finding.get("alert") or {}
    over = (
        f"over {times.stamp(finding['ended_at'])} ({plain(finding.get('ended_because'))})"
        if finding.get("ended_at")
        else ""
    )
    members = {
        "rule": f"{plain(finding.get('rule'))}, {plain(finding.get('role'))}, cause {plain(finding.get('cause'))}",
        "target": plain(finding.get("target")),
        "claim": _claim(finding),
        "job": " attempt ".join(str(plain(finding[name])) for name in ("job", "attempt") if finding.get(name)),
        "nodes": few(finding.get("nodes", ()), noun="node"),
        "ranks": plain(finding.get("ranks") or ""),
        "count": plain(finding.get("count")),
        "first": times.stamp(finding.get("first_at")),
        "last": times.stamp(finding.get("last_at")),
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
    rank = f", rank {excerpt['rank']}" if excerpt.get("rank") is not None else ""
    yield f"{indent}{plain(excerpt.get('node'))}{rank}  {plain(excerpt.get('stream'))}"
    number = excerpt.get("number") or 0
    for place, line in enumerate(excerpt.get("lines", ())):
        mark = ">" if place == excerpt.get("at") else " "  # the finding's own line
        yield f"{indent}{mark} {f'{number + place:>7}  ' if number else ''}{plain(line)}"


def _head(run: Document) -> Iterator[tuple[str, str]]:
    at = datetime.now(UTC).isoformat()
    version = str(run.get("version") or "")[:12]
    yield "playbook", plain(run.get("playbook")) + (f"  (version {plain(version)})" if version else "")
    yield "target", plain(run.get("target"))
    if run.get("also"):
        yield "also on", few(run["also"], noun="job")
    yield "status", status(run)
    yield "decision", plain(run.get("decision"))
    yield "mode", plain(run.get("mode"))
    yield "began", times.stamp(run.get("timestamp"))
    if run.get("ended_at"):
        yield "ended", f"{times.stamp(run['ended_at'])}  (after {runs.run_length(run) or '-'})"
    if run.get("action_taken"):
        yield "did" if run.get("status") != "observed" else "would do", plain(run["action_taken"])
    if run.get("touched"):
        yield "touched", few(run["touched"], noun="node")
    if run.get("owes_undo"):
        yield (
            "undo",
            "pending" + (f", last attempt failed: {plain(run['undo_error'])}" if run.get("undo_error") else ""),
        )
    if run.get("message"):
        yield "message", plain(run["message"])
    if run.get("group"):
        yield "members", plain(runs.group_text(run["group"]))
    if run.get("parent"):
        yield "member of", f"{short_id(run['parent'])}, batch {plain(run.get('batch'))}"
    if run.get("effect"):
        phrases = runs.effect_words(run["effect"])
        measured = ", ".join(filter(None, (*phrases.values, phrases.reason, _written(phrases.until, at))))
        yield "effect", plain(": ".join(filter(None, (phrases.verdict, measured))))
    story = run_story.story(run, targets.index_in(run.get("alert_labels") or {}))
    yield "happened", plain(story.happened)
    yield "changed", plain(" ".join(story.changed))
    if upcoming := next_line(run.get("next"), at):
        yield "next", upcoming


def _alerts(run: Document) -> Iterator[str]:
    for alert in run.get("alerts", ()):
        labels = dict(alert.get("labels", {}))
        name = labels.pop("alertname", "(no alertname)")
        if alert.get("resolved_at"):
            state = f"resolved {times.stamp(alert['resolved_at'])} ({plain(alert.get('resolved_because'))})"
        else:
            state = plain(alert.get("status"))
        often = how_often(alert.get("count", 1))
        yield f"  {plain(name)}  since {times.stamp(alert.get('starts_at'))}, {state}, received {often}"
        if labels:
            yield f"    labels       {data(labels)}"
        if (sent := alert.get("original_labels")) is not None:
            original = dict(sent)
            yield f"    mapped from  {call(original.pop('alertname', '(no alertname)'), original)}"
        if alert.get("annotations"):
            yield f"    annotations  {data(alert['annotations'])}"


def _steps(run: Document) -> Iterator[str]:
    for step in run.get("steps", ()):
        phase = _PHASES.get(str(step.get("phase")), "")
        action = plain(step.get("action") or step.get("kind"))
        took = f"  ({length})" if (length := runs.step_length(step)) else ""
        yield f"  {phase}{plain(step.get('id'))}  {action}  {plain(step.get('status'))}{took}"
        if step.get("kind") == "approve":
            yield from _terms(step.get("params") or {})
        elif step.get("params"):
            yield f"    with     {data(step['params'])}"
        if step.get("message"):
            yield f"    {'asks' if step.get('kind') == 'approve' else 'note'}     {plain(step['message'])}"
        yield from _results(step, "    ")
        if undo := step.get("undo"):
            because = f" because {plain(undo['because'])}" if undo.get("because") else ""
            made = f"{plain(undo.get('action'))} {data(undo.get('params', {}))}".rstrip()
            yield f"    undo     {made}  {plain(undo.get('status'))}{because} ({plain(undo.get('trigger'))})"
            yield from _results(undo, "      ")
            if undo.get("retry_at"):
                yield f"      again    {times.stamp(undo['retry_at'])}"


def _terms(terms: Document) -> Iterator[str]:
    for number, line in enumerate(steps.sentences(terms.get("steps", ())), 1):
        yield f"    would    {number}. {plain(line)}"
    who = questions.who_may_answer(terms.get("by"), terms.get("count"))
    yield f"    of       {plain('; '.join((who, *questions.state_parts(terms))))}"


def _results(performed: Document, indent: str) -> Iterator[str]:
    """Yield attempts if there are several or one has an error, then output and error."""
    attempts = performed.get("attempts", ())
    if len(attempts) > 1 or any(attempt.get("error") for attempt in attempts):
        for attempt in attempts:
            error = f": {plain(attempt['error'])}" if attempt.get("error") else ""
            began = times.time_of_day(attempt.get("started_at"))
            yield f"{indent}attempt {attempt.get('number')} at {began}  {plain(attempt.get('status'))}{error}"
    if performed.get("output"):
        yield f"{indent}output   {data(performed['output'])}"
    if performed.get("error"):
        yield f"{indent}error    {plain(performed['error'])}"


def _timeline(run: Document) -> Iterator[str]:
    previous_day = None
    for event in run.get("events", ()):
        day = times.stamp(event.get("at"))[:10]
        if day != previous_day:
            yield f"  {day}"
            previous_day = day
        yield f"  {times.time_of_day(event.get('at'))}  {describe(event)}"
