"""A run's questions to people, persisted as plain data in a step's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from trainmedic_server.domain.run import OperatorOrder, Run, Status, StepState, StepStatus


class StepAhead(Struct, frozen=True):
    """A step after an approval, as known when it is asked."""

    id: str
    action: str
    params: Mapping[str, Any]  # rendered; empty if they depend on the run
    targets: tuple[str, ...]  # what it would change; empty if nothing
    nodes: tuple[str, ...]
    gpus: int | None  # number; None if unknown
    note: str | None = None  # condition of the step, for a person


class Terms(Struct, frozen=True):
    """Content of a question, as persisted."""

    steps: tuple[StepAhead, ...] = ()
    by: tuple[str, ...] = ()
    """Allowed approvers: ``user:NAME``, ``group:NAME``, or a name of either kind. Empty allows any operator."""
    count: int = 1  # people who must approve
    on_timeout: str = "fail"  # `ApproveStep.without_answer`
    asked: int = 1  # how often it was asked
    escalated: bool = False
    lapsed: bool = False  # True if it timed out and will be asked again. It can still be answered.
    to: str | None = None  # notification channel; None for all
    void: tuple[str, ...] = ()  # IDs of orders of an earlier release that answered an earlier question

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(node for step in self.steps for node in step.nodes)

    @property
    def gpus(self) -> int | None:
        """Largest known number of GPUs of one step; None if none is known."""
        known = [step.gpus for step in self.steps if step.gpus is not None]
        return max(known, default=None)

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "steps": [asdict(step) for step in self.steps]}

    @classmethod
    def of(cls, step: StepState) -> Terms:
        if not step.params:
            return cls()
        written = dict(step.params)
        steps = tuple(StepAhead(**_tuples(each)) for each in written.pop("steps", ()))
        return cls(steps=steps, **_tuples(written))

    def may_be_answered_by(self, name: str, groups: Sequence[str] | frozenset[str] = ()) -> bool:
        return is_named(self.by, name, groups)


def is_named(by: Sequence[str], name: str, groups: Sequence[str] | frozenset[str] = ()) -> bool:
    """Return whether `by` names the operator. Empty names all."""
    return not by or any(_names_operator(entry, name, groups) for entry in by)


def _names_operator(entry: str, name: str, groups: Sequence[str] | frozenset[str]) -> bool:
    kind, _, rest = entry.partition(":")
    match kind:
        case "user" if rest:
            return rest == name
        case "group" if rest:
            return rest in groups
        case _:
            return entry == name or entry in groups


class Unanswered(StrEnum):
    """How a question ended without an answer."""

    RESOLVED = "resolved"
    TIMED_OUT = "timed_out"
    REJECTED_BY_TIMEOUT = "rejected_by_timeout"
    APPROVED_BY_TIMEOUT = "approved_by_timeout"
    ASKED_AGAIN_LATER = "unanswered"


class AskedQuestion(Struct, frozen=True):
    """The question of a chat message, whose buttons must not answer a later one."""

    step: str
    asked: int


def _tuples(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in members.items()}


def waiting_step(run: Run) -> StepState | None:
    if run.status is not Status.AWAITING_APPROVAL:
        return None
    return next((step for step in run.steps if step.kind == "approve" and step.status is StepStatus.WAITING), None)


def answers(step: StepState, orders: Sequence[OperatorOrder]) -> list[OperatorOrder]:
    """Return the answers to the step's current question, oldest first: a repeated question may differ."""
    terms = Terms.of(step)

    def counts(order: OperatorOrder) -> bool:
        return order.id not in terms.void if order.asked is None else order.asked == terms.asked

    return [order for order in orders if order.step == step.id and counts(order)]


def approvers(step: StepState) -> tuple[str, ...]:  # those who approved so far
    given = step.output.get("approved_by")
    if given is not None:
        return tuple(given)
    by = step.output.get("by")  # from an earlier release with a single approval
    return (by,) if by and step.status is StepStatus.SUCCEEDED else ()


def approved_by(run: Run) -> tuple[str, ...]:
    names = (name for step in run.steps if step.kind == "approve" for name in approvers(step))
    return tuple(dict.fromkeys(names))
