"""What a playbook made of an alert: the decision, its first reason, and the item of the history that it led to.

A reaction is kept with the alert (`domain.alert.AlertRecord`), so that an alert which led to nothing leaves a trace as
well. Who calls it: ``engine.admission`` makes them, the API shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import force_setattr


class NoReaction(StrEnum):
    """Why a playbook that names the alert's alertname made no decision (`domain.run.Decision`) on it."""

    NOT_MATCHED = "not_matched"
    """A matcher or ``on.when`` did not hold."""
    MATCH_FAILED = "match_failed"
    """``on.when`` or a matcher could not be evaluated."""
    NO_PROOF = "no_proof"
    """The alert lacks only the proof that ``on.proof`` requires."""
    RESOLVED = "resolved"
    """The alert was first heard of when it had resolved; nothing begins on that."""
    NOT_ACCEPTED = "not_accepted"
    """The ``accept`` of the alert map refuses the alert. No playbook is asked."""


_WITHOUT_EFFECT = frozenset({*map(str, NoReaction), "target_unknown", "target_ambiguous"})
_DUPLICATE = "duplicate"
_LONGEST_REASON = 500
"""Characters; a reason may quote the value of a label."""


class Reaction(Struct, frozen=True):
    """What one playbook made of one alert."""

    playbook: str
    """Name of the playbook. Empty in ``not_accepted``, where no playbook is asked, and in the reaction that counts the
    playbooks without a kept reason."""
    decision: str
    """A `domain.run.Decision`, or a `NoReaction`."""
    reason: str = ""
    """For a person; empty where the decision says it all."""
    run_id: str | None = None
    """The run that was started or joined, or the item of the history that says why not; None for a `NoReaction`."""

    def __post_init__(self) -> None:
        if len(self.reason) > _LONGEST_REASON:
            force_setattr(self, "reason", self.reason[: _LONGEST_REASON - 1] + "…")

    @property
    def is_effective(self) -> bool:
        """Whether the playbook reacted: its conditions held and a target was found, whatever the guards said then."""
        return self.decision not in _WITHOUT_EFFECT


def merged(earlier: Iterable[Reaction], later: Iterable[Reaction]) -> tuple[Reaction, ...]:
    """Return the reactions to an alert after a further report of it.

    One that led to a run stays until another run takes its place: that a report repeats what is known, or that the
    playbook has changed since, does not take back what was done.
    """
    by_playbook = {reaction.playbook: reaction for reaction in earlier if reaction.run_id is not None}
    for reaction in later:
        if not _is_covered(reaction, by_playbook):
            by_playbook[reaction.playbook] = reaction
    return tuple(by_playbook.values())


def _is_covered(reaction: Reaction, by_playbook: Mapping[str, Reaction]) -> bool:
    has_run = reaction.run_id is not None
    return reaction.playbook in by_playbook and (not has_run or reaction.decision == _DUPLICATE)
