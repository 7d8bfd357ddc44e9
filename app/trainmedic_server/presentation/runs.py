"""Texts about a run. Fields that an older server's documents lack count as empty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from trainmedic_core.words import plain, words
from trainmedic_server.domain import links
from trainmedic_server.domain.group_counts import GroupCounts
from trainmedic_server.domain.run import OPEN, Run, Status
from trainmedic_server.domain.upcoming import waiting
from trainmedic_server.presentation import times
from trainmedic_server.presentation.sentences import At, RunName, Sentence, Values

Document = Mapping[str, Any]
_AWAITED = {"resolved": "alert", "wait": "time or condition"}  # by the API's `waiting_on`
_MOMENTS = (("before", "before"), ("at", "at the act"), ("after", "10 min after"))  # members of `domain.effect`


def short_id(run_id: object) -> str:
    return links.short_id(plain(run_id))


def title(playbook: str, target: str | None) -> str:
    return f"{playbook} on {target or 'no target'}"


def title_of(run: Run) -> str:
    return title(run.playbook, run.target_key)


def wait_text(item: Document) -> str:
    if item["status"] != Status.WAITING:
        return ""
    on = str(item.get("waiting_on") or "")
    return f"waits: {words(_AWAITED.get(on, on))}" if on else "waits"


def status_text(item: Document) -> str:
    """Return the outcome in a few words, including a pending or finished undo."""
    status = str(item["status"])
    if waiting := wait_text(item):
        return waiting
    if item.get("undone_at"):
        return f"{words(status)}, undone"
    owes = item.get("owes_undo") and status not in (Status.RUNNING, Status.AWAITING_APPROVAL)
    return f"{words(status)}, owes" if owes else words(status)


class DoneWords(Struct, frozen=True):
    action: str
    message: str


def action_and_message(item: Document) -> DoneWords:
    """Return "" for an action that the message contains, unless the run failed."""
    action, message = item.get("action_taken") or "", item.get("message") or ""
    is_repeated = action in message and item["status"] != Status.FAILED
    return DoneWords("" if is_repeated else action, message)


def outcome_text(item: Document) -> str:
    texts = action_and_message(item)
    if item.get("group") and item["status"] in OPEN:
        return "; ".join(filter(None, (group_text(item["group"]), texts.message)))
    if item["status"] == Status.NOT_STARTED:
        return ": ".join(filter(None, (str(item["decision"]), texts.message)))
    if item["status"] == Status.FAILED:
        return f"{texts.message}; did {texts.action}" if texts.action else texts.message or "-"
    return ": ".join(filter(None, (texts.action, texts.message))) or "-"


def group_text(counts: Document) -> str:
    read = {name: counts.get(name) or 0 for name in GroupCounts.__struct_fields__}
    return str(GroupCounts(**read))


def run_length(item: Document) -> str:
    """Return "" for a run that is open, or was not started."""
    length = item.get("duration_ms")
    return "" if length is None or item.get("status") == Status.NOT_STARTED else times.span(length / 1000)


def step_length(performed: Document) -> str:
    began, ended = times.read(performed.get("started_at")), times.read(performed.get("ended_at"))
    return times.span(ended - began) if began and ended else ""


class EffectWords(Struct, frozen=True):
    verdict: str
    values: tuple[str, ...]
    reason: str
    until: Sentence = ()


def effect_words(document: Document) -> EffectWords:
    values = tuple(f"{label} {document[name]:g}" for name, label in _MOMENTS if document.get(name) is not None)
    due = document.get("due_at")
    until: Sentence = ("measured at ", At(due)) if due else ()
    return EffectWords(words(document.get("verdict")), values, document.get("reason") or "", until)


class NextWords(Struct, frozen=True):
    """The present activity (`now`), its limit (`until`), and what follows (`then`)."""

    now: tuple[Sentence, ...]
    until: tuple[Sentence, ...]
    then: Sentence


def next_words(document: Document | None) -> NextWords | None:
    return NextWords(tuple(_now(document)), tuple(_until(document)), _then(document)) if document else None


def _now(document: Document) -> Iterator[Sentence]:
    if document.get("now"):
        yield "at ", document["now"]
    if awaited := document.get("waits_for"):
        yield _with_run(waiting(awaited), document.get("holder"))
        held = document.get("held_by")
        while held:  # each of these runs waits for the next
            otherwise = f": {held['at_deadline']}" if held.get("at_deadline") else ""
            until: Sentence = (", at the latest ", At(held["until"]), otherwise) if held.get("until") else ()
            behind = held.get("held_by")
            doing = _with_run(held["doing"], behind["run_id"] if behind else None)
            yield "that run of ", held["playbook"], " ", *doing, *until
            held = behind
    if since := document.get("waiting_since"):
        yield "waiting since ", At(since)


def _with_run(text: str, run_id: str | None) -> Sentence:
    """Separate a run's ID from the text around it, as surfaces link it."""
    before, found, after = text.partition(run_id or "\0")  # no text has a NUL
    return (before, RunName(found), after) if found else (text,)


def _until(document: Document) -> Iterator[Sentence]:
    if document.get("not_before"):
        yield "not before ", At(document["not_before"])
    if document.get("deadline"):
        yield "at the latest ", At(document["deadline"]), f": {document.get('at_deadline') or 'it ends'}"


def _then(document: Document) -> Sentence:
    note = f" ({document['note']})" if document.get("note") else ""
    if note and not document.get("step") and not document.get("outcome"):
        return (document["note"],)
    if not document.get("step"):
        ends = str(document.get("at_deadline")).startswith(("the run fails", "the run is rejected"))
        return f"{'otherwise' if ends else 'then'} {document.get('outcome') or 'unknown'}", note
    if document.get("question"):
        return f"next {document['step']}: ", document["question"], note
    params = document.get("params") or {}
    values: Sentence = (" ", Values(params)) if params else ()
    return f"next {document['step']}: ", document.get("action") or document.get("kind") or "", *values, note
