"""A run in three sentences: what happened, what is changed now, and what happens next.

Fields that older servers lack count as empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from trainmedic_core.words import plain, words
from trainmedic_server.domain import beginnings
from trainmedic_server.domain.alert import STAND_INS
from trainmedic_server.domain.run import OPEN, Status
from trainmedic_server.domain.upcoming import TRIED_AGAIN
from trainmedic_server.presentation import runs, steps, targets, times
from trainmedic_server.presentation.sentences import At, Sentence
from trainmedic_server.presentation.targets import IndexOf

Document = Mapping[str, Any]
_UNCERTAIN = ("unknown", "running")  # statuses of attempts that may have taken effect
_UNDO_STATES = {  # by the undo's status
    "armed": "It is reverted automatically",
    "running": "It is being reverted",
    "available": "An operator can revert it",
    "done": "It was reverted",
    "failed": "It could not be reverted",
    "dropped": "No undo",
    "closed": "A person decided not to revert it",
}
# By the undo's trigger.
_UNDO_TRIGGERS = {"on_resolve": "when the alert resolves", "on_failure": "if the run fails", "never": ""}


class RunStory(Struct, frozen=True):
    happened: str
    changed: tuple[str, ...]
    next: tuple[Sentence, ...]


def story(run: Document, index_of: IndexOf = targets.unknown) -> RunStory:
    return RunStory(_happened(run, index_of), tuple(_changed(run, index_of)), tuple(_next(run)))


def undo_text(document: Document) -> str:
    """Return the state of a step's undo: ``It is reverted automatically when the alert resolves``."""
    status = str(document.get("status"))
    phrase = _UNDO_STATES.get(status, words(status))
    if status == "armed":
        phrase = f"{phrase} {_UNDO_TRIGGERS.get(str(document.get('trigger')), '')}".rstrip()
    return f"{phrase}: {document['because']}" if document.get("because") else phrase


def _happened(run: Document, index_of: IndexOf) -> str:
    status = str(run.get("status"))
    cause = beginnings.phrase(run.get("alert_name") or "")
    if run.get("started_by"):
        cause = f"{run['started_by']} started {run.get('playbook')}"
    if run.get("target"):
        cause = f"{cause} for {targets.within(run['target'], index_of)}"
    message = targets.shortened(str(run.get("message") or ""), index_of).rstrip(".")
    if status == Status.NOT_STARTED:
        return f"{cause}, and no run was started: {message or words(run.get('decision'))}."
    if status == Status.OBSERVED:
        if run.get("group"):
            return f"{cause}. Trainmedic changed nothing; it {message}."  # "would have applied … to 4 members"
        phrase = "; ".join(steps.sentence(step, run.get("target"), index_of) for step in _action_steps(run))
        return f"{cause}. Trainmedic changed nothing, and recorded what it would do: {phrase or 'nothing'}."
    if run.get("group"):
        members = runs.group_text(run["group"])
        verb = "worked on" if run.get("acted_at") else "has not begun to work on"
        outcome = _outcome(run, status, "" if status == Status.SUCCEEDED else message)
        return _with_period(f"{cause}. Trainmedic {verb} a group of {members}; {outcome}")
    acts = "; ".join(_acts(run, index_of)) or _no_act(run, status)
    return _with_period(f"{cause}. Trainmedic {acts}; {_outcome(run, status, message)}")


def _with_period(sentence: str) -> str:
    return sentence if sentence.endswith("?") else f"{sentence}."


def _no_act(run: Document, status: str) -> str:
    if run.get("acted_at"):
        return "carried out no step successfully"
    return "has changed nothing so far" if status in OPEN else "changed nothing"


def _outcome(run: Document, status: str, message: str) -> str:
    match status:
        case Status.SUCCEEDED:
            return f"the run succeeded, and {_alert_state(run)}"
        case Status.FAILED:
            return f"the run failed: {message or 'no reason is recorded'}; {_alert_state(run)}"
        case Status.AWAITING_APPROVAL:
            return f"it asks: {message}" if message else "it asks for approval"
        case Status.CANCELLED | Status.REJECTED:
            return f"the run was {status}{f': {message}' if message else ''}; {_alert_state(run)}"
    return f"{_alert_state(run)}{f' ({message})' if message else ''}"


def _alert_state(run: Document) -> str:
    if not run.get("alerts"):
        return "no alert is tied to it"
    if _has_no_alert(run):
        return "no alert began it"
    if any(map(_fires, run["alerts"])):
        return "the alert still fires" if len(run["alerts"]) == 1 else f"{plain(run.get('alert_name'))} still fires"
    return "the alert has resolved" if len(run["alerts"]) == 1 else "its alerts have resolved"


def _has_no_alert(run: Document) -> bool:
    return all(map(_is_stand_in, run.get("alerts", ())))


def _is_stand_in(alert: Document) -> bool:
    return str(alert.get("fingerprint")).startswith(STAND_INS)


def _fires(alert: Document) -> bool:
    return not alert.get("resolved_at") and not _is_stand_in(alert)


def _action_steps(run: Document) -> list[Document]:
    return [step for step in run.get("steps", ()) if step.get("action")]


def _changed_nothing(step: Document) -> bool:
    return step.get("status") == "succeeded" and (step.get("output") or {}).get("changed") is False


def _acts(run: Document, index_of: IndexOf) -> Iterator[str]:
    for step in _action_steps(run):
        if _changed_nothing(step):
            note = step["output"].get("note")
            yield f"had nothing to change by {step['action']}{f' ({plain(note)})' if note else ''}"
        elif step.get("status") == "succeeded":
            yield steps.done(step, run.get("target"), index_of)
        elif any(attempt.get("status") in _UNCERTAIN for attempt in step.get("attempts", ())):
            phrase = steps.sentence(step, run.get("target"), index_of)
            yield f"tried to {phrase} (whether it was carried out is not known yet)"


def _changed(run: Document, index_of: IndexOf) -> Iterator[str]:
    for change in run.get("changed", ()):
        if change.get("unchanged_because"):
            yield f"Nothing by {change['action']}: {plain(change['unchanged_because'])}."
            continue
        if change.get("is_certain", True):
            past = steps.done(change, run.get("target"), index_of)
        else:
            past = f"perhaps {steps.sentence({**change, 'note': None}, run.get('target'), index_of)}"
        values = f" ({change['before']} → {change['after']})" if change.get("before") and change.get("after") else ""
        error = f". The last attempt to revert it failed: {change['undo_error']}" if change.get("undo_error") else ""
        lost = f" It ended early: {plain(change['lost_because'])}." if change.get("lost_because") else ""
        stated = f"{past[:1].upper()}{past[1:]}{values}.{lost}"
        if change.get("is_reversible", True):
            yield f"{stated} Reverted: {change.get('given_back')}{error}."
        else:
            yield f"{stated} This has no undo."
    if run.get("changed"):
        return
    if run.get("group"):
        pending = _owed_by_members(run["group"].get("owing") or 0, run["group"].get("open") or 0)
        yield f"What its members changed is on their pages. {pending}" if run.get("acted_at") else "Nothing so far."
        return
    undone = [step for step in _action_steps(run) if (step.get("undo") or {}).get("status") == "done"]
    if run.get("undone_at") and not (undone and all(map(_changed_nothing, undone))):
        yield f"Nothing. All changes were reverted at {times.stamp(run['undone_at'])}."
    elif run.get("acted_at"):
        yield "Nothing: its actions have left no lasting change, or a person closed their undo."
    else:
        yield "Nothing. The run has changed nothing."


def _owed_by_members(owing: int, working: int) -> str:
    """`owing` counts ended members only."""
    owed = f"{owing or 'None'} of {'those that ended' if working else 'them'} {'owe' if owing > 1 else 'owes'} an undo"
    return f"{owed}; {working} still at work may owe one." if working else f"{owed}."


def _next(run: Document) -> Iterator[Sentence]:
    if (upcoming := runs.next_words(run.get("next"))) is not None:
        yield from (*upcoming.now, *upcoming.until, upcoming.then)
        if run["next"].get("outcome") != TRIED_AGAIN:
            return  # the run or its undo continues; the effect is stated at the end
    elif run.get("owes_undo"):
        yield ("The run has ended. Its changes are reverted as stated above.",)
    elif any(change.get("is_reversible", True) for change in run.get("changed", ())):
        yield ("Nothing by itself: what it changed stays until a person orders the undo.",)
    elif run.get("status") == Status.FAILED and run.get("alerts") and _has_no_alert(run):
        yield ("Nothing by itself: a person has to look at it.",)
    elif run.get("status") == Status.FAILED and any(map(_fires, run.get("alerts", ()))):
        yield ("Nothing by itself: the alert still fires, and a person has to look at it.",)
    else:
        yield ("Nothing: the run is over.",)
    effect = run.get("effect") or {}
    if effect.get("verdict") == "pending":
        yield "The effect on the alert's metric is measured ", At(effect["due_at"]) if effect.get("due_at") else "later"
