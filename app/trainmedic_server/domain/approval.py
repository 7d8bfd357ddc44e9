"""An approval: a question of a run that waits for people, as it is on record.

The terms of a question stand in the parameters of its step, as plain data: what is on record is what was asked. Who
calls it: ``steps`` in the engine asks, ``plan`` and the API read. Not here: what the playbook says (``playbook``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from trainmedic_server.domain.run import OperatorOrder, Run, Status, StepState, StepStatus


class StepAhead(Struct, frozen=True):
    """A step that would be carried out after an approval, as far as that is known when the question is asked."""

    id: str
    """Its name in the playbook."""
    action: str
    """The name of its action."""
    params: Mapping[str, Any]
    """Its rendered parameters; empty where they depend on how the run goes."""
    targets: tuple[str, ...]
    """The keys of the targets that it works on."""
    nodes: tuple[str, ...]
    """The nodes that it may change something on, sorted; empty for one that only reads or tells."""
    gpus: int | None
    """How many GPUs that concerns; None where nobody knows."""
    note: str | None = None
    """For a person: on what it depends whether or how it is carried out."""


class Terms(Struct, frozen=True):
    """What was asked, of whom, and what follows if nobody answers."""

    steps: tuple[StepAhead, ...] = ()
    by: tuple[str, ...] = ()
    """Who may approve: ``user:NAME``, ``group:NAME``, or a name of either kind. Any operator if it is empty."""
    count: int = 1
    """How many different people have to approve."""
    on_timeout: str = "fail"
    """What follows where nobody has answered in time."""
    asked: int = 1
    """How often the question was asked."""
    escalated: bool = False
    """Whether it was handed to those whom it names for when nobody answers."""
    lapsed: bool = False
    """Whether nobody has answered in time, so that it is asked again later. It can be answered meanwhile."""
    to: str | None = None
    """The notification channel for it; None for all."""
    void: tuple[str, ...] = ()
    """The ids of the answers before it was asked again of which an earlier release did not note which round they are
    of; they count no more."""

    @property
    def nodes(self) -> frozenset[str]:
        """All nodes that the steps may change something on."""
        return frozenset(node for step in self.steps for node in step.nodes)

    @property
    def gpus(self) -> int | None:
        """How many GPUs the steps concern, which all work on one target; None where nobody knows."""
        known = [step.gpus for step in self.steps if step.gpus is not None]
        return max(known, default=None)

    def as_data(self) -> dict[str, Any]:
        """The terms as the parameters of the step."""
        return {**asdict(self), "steps": [asdict(step) for step in self.steps]}

    @classmethod
    def of(cls, step: StepState) -> Terms:
        """The terms of a question that was asked. Of one asked by an earlier release nothing but the defaults."""
        if not step.params:
            return cls()
        written = dict(step.params)
        steps = tuple(StepAhead(**_tuples(each)) for each in written.pop("steps", ()))
        return cls(steps=steps, **_tuples(written))

    def may_be_answered_by(self, name: str, groups: Sequence[str] | frozenset[str] = ()) -> bool:
        """Return whether an operator of this name, who is in these groups, may approve."""
        return not self.by or any(_is_meant(entry, name, groups) for entry in self.by)


def _is_meant(entry: str, name: str, groups: Sequence[str] | frozenset[str]) -> bool:
    """Return whether an entry of `by` means the operator. Names of operators have no colon, so forms are distinct."""
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
    """The question that somebody has seen and answers, so that the answer counts for no other one."""

    step: str
    """The id of the step that asks."""
    asked: int
    """How often it had been asked then."""


def _tuples(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in members.items()}


def waiting_step(run: Run) -> StepState | None:
    """The step whose question waits for an answer; None where the run asks nothing."""
    if run.status is not Status.AWAITING_APPROVAL:
        return None
    return next((step for step in run.steps if step.kind == "approve" and step.status is StepStatus.WAITING), None)


def answers(step: StepState, orders: Sequence[OperatorOrder]) -> list[OperatorOrder]:
    """The answers among a run's `orders` to what the step asks, the oldest first.

    A question that is asked again is rendered anew, and so another one: those who approved what it was before have not
    approved what it is now, however late their answer came to be known.
    """
    terms = Terms.of(step)

    def counts(order: OperatorOrder) -> bool:
        return order.id not in terms.void if order.asked is None else order.asked == terms.asked

    return [order for order in orders if order.step == step.id and counts(order)]


def approvers(step: StepState) -> tuple[str, ...]:
    """Who has approved what this step asks, in the order in which they did."""
    given = step.output.get("approved_by")
    if given is not None:
        return tuple(given)
    by = step.output.get("by")  # of an earlier release, which took one approval
    return (by,) if by and step.status is StepStatus.SUCCEEDED else ()


def approved_by(run: Run) -> tuple[str, ...]:
    """Who has approved anything that the run asked, each once, in the order in which they did."""
    names = (name for step in run.steps if step.kind == "approve" for name in approvers(step))
    return tuple(dict.fromkeys(names))
