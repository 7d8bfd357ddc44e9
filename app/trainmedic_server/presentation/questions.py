from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from trainmedic_core.words import count, how_often, words
from trainmedic_server.domain.approval import Terms, Unanswered
from trainmedic_server.domain.event_kinds import ApprovalEscalated, ApprovalReminded, QuestionEvent
from trainmedic_server.domain.run import Run, StepState
from trainmedic_server.presentation import runs, steps, targets

UNASKED = "May this run act?"
"""Question of a step that has none of its own."""
AGAIN: Mapping[type[QuestionEvent], str] = {ApprovalReminded: "Reminder", ApprovalEscalated: "No answer yet"}
"""Text before a repeated question."""
UNANSWERED: Mapping[Unanswered, str] = {
    Unanswered.REJECTED_BY_TIMEOUT: "no answer in time: rejected",
    Unanswered.APPROVED_BY_TIMEOUT: "no answer in time: approved",
    Unanswered.TIMED_OUT: "no answer in time",
    Unanswered.ASKED_AGAIN_LATER: "no answer in time; it is asked again later",
    Unanswered.RESOLVED: "no answer is needed any more: the alert has resolved",
}
"""By the outcome in ``approval_ended``."""


_WITHOUT_ANSWER = {
    "fail": "the run fails",
    "reject": "the run is rejected",
    "approve": "it counts as approved",
    "escalate": "it is escalated",
    "continue": "the run continues",
    "ask_again": "it is asked again later, while the alert fires",
}


def without_answer(on_timeout: object) -> str:
    # `on_timeout` is of the API, or of a step's terms.
    return _WITHOUT_ANSWER.get(str(on_timeout), words(on_timeout))


def opening(run: Run) -> str:
    return f"{runs.title_of(run)} asks, because of {run.alert_name}:"


def who_may_answer(by: Sequence[str] | None, number: int | None) -> str:
    """Return who has to approve: ``any operator``, ``ann or hardware, 2 different people``."""
    different = f", {number} different people" if (number or 1) > 1 else ""
    return (" or ".join(by or ()) or "any operator") + different


def state_parts(terms: Mapping[str, Any]) -> Iterator[str]:
    """Yield what has happened to a question. `terms` is a question of the API, or a step's terms."""
    if (number := terms.get("asked") or 1) > 1:
        yield f"asked {how_often(number)}"
    if terms.get("escalated"):
        yield "handed on"
    if given := terms.get("approved_by"):
        yield f"approved so far by {', '.join(given)}"


def answer_text(kind: str, actor: str, note: str) -> str:
    return f"{kind} by {actor}{f': {note}' if note else ''}"


def steps_if_approved(run: Run, step: StepState) -> list[str]:
    terms = Terms.of(step)
    if not terms.steps:
        return []
    gpus = f" ({count(terms.gpus, 'GPU')})" if terms.gpus else ""
    lines = steps.sentences(list(map(asdict, terms.steps)), run.target_key, targets.index_in(run.alert_labels))
    return [f"If approved{gpus}:", *(f"{number}. {each}" for number, each in enumerate(lines, 1))]
