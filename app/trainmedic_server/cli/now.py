"""``trainmedic now``."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from trainmedic_core import words
from trainmedic_core.cli import table
from trainmedic_core.cli.output import output_option, print_document
from trainmedic_server.cli import story
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.cli.connected import when_lost
from trainmedic_server.presentation import runs, steps, targets, times
from trainmedic_server.presentation.waiting import waiting_for_person

Document = Mapping[str, Any]  # `standing`: the answer of ``GET /now``
_SHOWN = 20
_ACTS = "Done, without an undo"
_OBSERVE = ", observe only"  # end of the server's text for the scope of such a pause (`live.now`)


@click.command()
@output_option()
@server_options
def now(client: Client, output: str) -> None:
    """Show the current state: pending approvals, active changes and their end, open runs, lost agents and jobs."""
    width = table.width()
    shown = lambda standing: (part for line in lines(standing) for part in _wrapped(line, width))  # noqa: E731
    print_document(client.get("now"), output, shown)


def _wrapped(line: str, width: int) -> Sequence[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(
        line, max(width, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def lines(standing: Document) -> Iterator[str]:
    at = standing["at"]
    yield _head(standing, at)
    changed = standing.get("changed", ())
    change_of = functools.partial(_change, standing.get("lost", ()))
    waiting = waiting_for_person(standing)
    parts: tuple[tuple[str, Sequence[Document], Callable[[Document, str], Iterator[str]]], ...] = (
        ("Waits for you", (*waiting.approvals, *waiting.failed), _waiting),
        ("Active changes", [each for each in changed if each["is_reversible"]], change_of),
        (_ACTS, [each for each in changed if not each["is_reversible"]], _act),
        ("Running and next", standing.get("running", ()), _running),
        ("Lost within a day", standing.get("lost", ()), _lost),
    )
    for title, entries, describe in parts:
        if title == _ACTS and not entries:
            continue
        yield ""
        yield f"{title} ({len(entries)})"
        for entry in entries[:_SHOWN]:
            yield from describe(entry, at)
        if len(entries) > _SHOWN:
            yield f"  and {len(entries) - _SHOWN} more: see --output json"
        if title == _ACTS and standing.get("changed_since"):  # earlier servers do not send it
            yield f"  Listed since {times.near(standing['changed_since'], at)}."
    yield ""
    yield f"Last hour   {_counts(standing['last_hour']['decisions'])}"
    if left_out := standing["counts"]["left_out"]:
        yield f"            {left_out} more are not shown"


def switches_text(standing: Document, at: str) -> str:
    paused = [_pause(pause, at) for pause in standing["paused"]]
    breaker = standing["breaker"]
    state = f"OPEN: {words.plain(breaker['reason'])}; 'trainmedic resume --breaker' closes it"
    state = state if breaker["open"] else "closed"
    return f"mode {standing['mode']}; {'; '.join(paused) or 'not paused'}; breaker {state}"


def _head(standing: Document, at: str) -> str:
    counts = standing["counts"]
    runs = f"{words.count(sum(counts['open'].values()), 'run')} open, {counts['owing']} closed with a pending undo"
    return f"{switches_text(standing, at)}; {runs}"


def _pause(pause: Document, at: str) -> str:
    scope = "" if pause["scope"] == "everything" else f" {words.plain(pause['scope'])}"
    note = f" ({words.plain(pause['note'])})" if pause.get("note") else ""
    until = f", until {times.near(pause['until'], at)}" if pause.get("until") else ""
    scope, word = scope.removesuffix(_OBSERVE), "OBSERVE ONLY" if scope.endswith(_OBSERVE) else "PAUSED"
    return f"{word}{scope} by {words.plain(pause['by'])} {times.ago(pause['since'], at)}{note}{until}"


def _waiting(entry: Document, at: str) -> Iterator[str]:
    return _approval(entry, at) if "question" in entry else _failed(entry, at)


def _failed(run: Document, at: str) -> Iterator[str]:
    ended = f", {times.ago(run['ended_at'], at)}" if run.get("ended_at") else ""
    alert, message = words.plain(run["alert_name"]), words.plain(run["message"])
    yield f"  {_name(run)}  FAILED{ended}, and {alert} still fires: {message}"


def _approval(approval: Document, at: str) -> Iterator[str]:
    yield f"  {_name(approval)}  {words.plain(approval['question'])}"
    until = f", until {times.near(approval['until'], at)}" if approval["until"] else ""
    gpus = "" if approval["gpus"] is None else f"; {words.count(approval['gpus'], 'GPU')}"
    nodes = f"; {words.count(len(approval['nodes']), 'node')}" if approval["nodes"] else ""
    yield f"      asked {times.ago(approval['asked_at'], at)}{until}{nodes}{gpus}"
    index_of = targets.index_in(approval.get("alert_labels") or {})
    for number, step in enumerate(steps.sentences(approval["steps"], approval["target"], index_of), 1):
        yield f"      {'would' if number == 1 else '':<6}{number}. {words.plain(step)}"


def _change(lost: Sequence[Document], change: Document, at: str) -> Iterator[str]:
    difference = f"{words.plain(change['before'])} → {words.plain(change['after'])}" if change["after"] else ""
    made = difference if change["is_certain"] else "perhaps: unknown whether it was applied"
    made = made or words.data(change["params"])
    ends = [change["given_back"]]
    if change["lease_seconds"] and not change.get("lost_because"):
        ends[0] += f", or {times.span(change['lease_seconds'])} after the last renewal"
    if change["latest"]:
        ends.append(f"the run waits until {times.near(change['latest'], at)}")
    if warning := targets.cap_may_stay(change, lost):
        ends.append(words.plain(warning))
    if change["undo_error"]:
        ends.append(f"LAST UNDO FAILED: {words.plain(change['undo_error'])}")
    early = f"; ENDED EARLY: {words.plain(change['lost_because'])}" if change.get("lost_because") else ""
    made = f"{change['action']} {made}".rstrip()
    if change.get("unchanged_because"):  # earlier servers do not send it
        yield f"  {_name(change)}  {made}  changed nothing: {words.plain(change['unchanged_because'])}"
        return
    yield f"  {_name(change)}  {made}  made {times.ago(change['since'], at)}{early}; back {'; '.join(ends)}"


def _act(change: Document, at: str) -> Iterator[str]:
    doubt = "" if change["is_certain"] else "perhaps "
    done = f"{change['action']} {words.data(change['params'])}".rstrip()
    yield f"  {_name(change)}  {done}  {doubt}done {times.ago(change['since'], at)}"


def _running(run: Document, at: str) -> Iterator[str]:
    yield f"  {_name(run)}  {run['status']}  begun {times.ago(run['since'], at)}"
    yield f"      {story.next_line(run['next'], at) or 'nothing is next'}"


def _lost(lost: Document, at: str) -> Iterator[str]:
    when, reason = when_lost(lost, at), words.plain(lost["reason"])
    yield f"  {lost['kind']} {words.plain(lost['name'])}  {when}: {reason}"


def _name(entry: Document) -> str:
    return f"{runs.short_id(entry['run_id'])}  {words.plain(entry['target'])}  {words.plain(entry['playbook'])}"


def _counts(counts: Mapping[str, int]) -> str:
    named = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return " · ".join(f"{number} {name.replace('_', ' ')}" for name, number in named) or "nothing was decided"
