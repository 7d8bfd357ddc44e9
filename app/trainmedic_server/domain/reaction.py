"""A playbook's reaction to an alert, stored with the alert."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import force_setattr


class NoReaction(StrEnum):
    """Why a playbook for the alertname made no decision (`domain.run.Decision`)."""

    NOT_MATCHED = "not_matched"
    MATCH_FAILED = "match_failed"  # a condition could not be evaluated
    NO_PROOF = "no_proof"  # the alert lacks the playbook's ``proof``
    EXCLUDED = "excluded"
    """Another playbook is ``exclusive``."""
    RESOLVED = "resolved"  # already at the first report
    NOT_ACCEPTED = "not_accepted"
    """The alert map's ``accept`` refuses the alert; the reaction names no playbook."""


_WITHOUT_EFFECT = frozenset({*map(str, NoReaction), "target_unknown", "target_ambiguous"})
_DUPLICATE = "duplicate"
_LONGEST_REASON = 500  # characters


class Reaction(Struct, frozen=True):
    playbook: str
    """Empty in ``not_accepted`` and in the count of playbooks without a stored reason."""
    decision: str
    reason: str = ""
    run_id: str | None = None
    """The run started or joined, or the history item stating why not; None for a `NoReaction`."""

    def __post_init__(self) -> None:
        if len(self.reason) > _LONGEST_REASON:
            force_setattr(self, "reason", self.reason[: _LONGEST_REASON - 1] + "…")

    @property
    def is_effective(self) -> bool:
        """True if conditions held and a target was found, regardless of guards."""
        return self.decision not in _WITHOUT_EFFECT


def merged(earlier: Iterable[Reaction], later: Iterable[Reaction]) -> tuple[Reaction, ...]:
    """Merge reactions of one alert. One with a run stays until another run replaces it."""
    by_playbook = {reaction.playbook: reaction for reaction in earlier if reaction.run_id is not None}
    for reaction in later:
        is_minor = reaction.run_id is None or reaction.decision == _DUPLICATE
        if not is_minor or reaction.playbook not in by_playbook:
            by_playbook[reaction.playbook] = reaction
    return tuple(by_playbook.values())
