"""What limit a GPU should have, as values: the caps that stand on it, and what it had before the first of them.

A cap is a hold with a lease. Several may stand on one GPU; the lowest counts, and no cap ever raises a limit.
When the last one ends, the GPU gets back the limit from before the first.

Pure: no clock, no driver. Power is in milliwatts, times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainmedic_server.ports.gpus import PowerLimits

KEPT_ENDED = 64
"""How many ended holds of a GPU are remembered, so that a late undo or renewal can be told what became of them."""

LAPSED = "lease"
"""How a hold has ended that nobody renewed in time. Whoever still wants it can have it set again."""

_SAME_MW = 1000
"""Limits that are nearer than this count as the same: drivers round."""


@dataclass(frozen=True, slots=True)
class PowerCap:
    """A cap. ``id`` is that of the command that made it, ``lease_seconds`` what it was granted.

    ``ended_by`` says why it no longer stands: ``lease``, ``overridden``, ``failed: <why>``, or ``undo <command id>``.
    """

    id: str
    limit_mw: int
    lease_until: float
    lease_seconds: float
    previous_mw: int
    requested_mw: int
    clamped: str | None = None
    ended_at: float | None = None
    ended_by: str | None = None


@dataclass(frozen=True, slots=True)
class PowerBaseline:
    """What is known of a GPU's limit while this agent has a hand in it.

    ``original_mw`` was there before the first cap. ``set_mw`` is what the limit was last seen to be by our
    doing, ``pending_mw`` what was then about to be set: whichever of the two the driver shows, nobody else
    has changed it. ``session`` is the driver's at that time.
    """

    original_mw: int
    set_mw: int
    session: str
    pending_mw: int | None = None


@dataclass(frozen=True, slots=True)
class GpuPowerState:
    """Everything that the agent remembers of the power of one GPU. No baseline: it has no hand in it."""

    baseline: PowerBaseline | None = None
    holds: tuple[PowerCap, ...] = ()

    @property
    def standing(self) -> tuple[PowerCap, ...]:
        return tuple(hold for hold in self.holds if hold.ended_by is None)

    @property
    def is_owed(self) -> bool:
        """Whether the GPU is to be given back what it had, or something was begun that nobody saw the end of."""
        return self.baseline is not None and (not self.standing or self.baseline.pending_mw is not None)

    def has_lapsed(self, hold_id: str) -> bool:
        """Whether there was such a hold, and nothing but its lease has ended it."""
        hold = self.hold(hold_id)
        return hold is not None and hold.ended_by == LAPSED

    def hold(self, hold_id: str) -> PowerCap | None:
        return next((hold for hold in self.holds if hold.id == hold_id), None)

    def wanted_mw(self) -> int | None:
        """What the limit should be; None where that is nobody's business here."""
        if self.baseline is None:
            return None
        return min([self.baseline.original_mw, *(hold.limit_mw for hold in self.standing)])

    def is_somebody_elses(self, present: PowerLimits) -> bool:
        """Whether another party has set the limit since this agent did.

        A limit that is back at the card's default, after the driver may have forgotten what was set, was
        forgotten; the caps still stand, so that is for the agent to mend.
        """
        known = self.baseline
        if known is None or is_same(present.limit_mw, self.wanted_mw()):
            return False
        if is_same(present.limit_mw, known.set_mw) or is_same(present.limit_mw, known.pending_mw):
            return False
        return present.session == known.session or not is_same(present.limit_mw, present.default_mw)

    def with_hold(self, hold: PowerCap, present: PowerLimits) -> GpuPowerState:
        """One more cap, on a GPU that shows these limits."""
        baseline = self.baseline or PowerBaseline(present.limit_mw, present.limit_mw, present.session)
        return GpuPowerState(baseline, _kept((*self.holds, hold)))

    def about_to_set(self, present: PowerLimits) -> GpuPowerState:
        """The intent to set what is wanted, before the driver is told."""
        assert self.baseline is not None
        baseline = PowerBaseline(self.baseline.original_mw, present.limit_mw, present.session, self.wanted_mw())
        return replace(self, baseline=baseline)

    def settled(self, present: PowerLimits) -> GpuPowerState:
        """The driver shows what is wanted, or what it made of it. With the last cap the baseline goes too."""
        assert self.baseline is not None
        if not self.standing:
            return replace(self, baseline=None)
        return replace(self, baseline=PowerBaseline(self.baseline.original_mw, present.limit_mw, present.session))

    def ending(self, hold_ids: Collection[str], by: str, at: float) -> GpuPowerState:
        """Those of them that stand, stand no longer; and one that has lapsed is not to be set again."""
        holds = (
            replace(hold, ended_by=by, ended_at=at)
            if hold.id in hold_ids and (hold.ended_by is None or hold.ended_by == LAPSED)
            else hold
            for hold in self.holds
        )
        return replace(self, holds=_kept(tuple(holds)))

    def without(self, hold_id: str) -> GpuPowerState:
        """As if there had never been such a hold; what the GPU had before is still owed to it."""
        return replace(self, holds=tuple(hold for hold in self.holds if hold.id != hold_id))

    def overridden(self, at: float) -> GpuPowerState:
        """Somebody else decides now: no cap stands, and nothing is to be given back."""
        return replace(self.ending({hold.id for hold in self.holds}, "overridden", at), baseline=None)

    def renewed(self, hold_id: str, until: float) -> GpuPowerState:
        """A lease only ever grows."""
        holds = (
            replace(hold, lease_until=max(hold.lease_until, until))
            if hold.id == hold_id and hold.ended_by is None
            else hold
            for hold in self.holds
        )
        return replace(self, holds=tuple(holds))

    def to_json(self) -> dict[str, Any]:
        return {
            "baseline": asdict(self.baseline) if self.baseline else None,
            "holds": [asdict(one) for one in self.holds],
        }

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> GpuPowerState:
        baseline = PowerBaseline(**value["baseline"]) if value["baseline"] else None
        return cls(baseline, tuple(PowerCap(**one) for one in value["holds"]))


@dataclass(frozen=True, slots=True)
class ClampedLimit:
    """What becomes of a request. ``by`` is ``floor`` (the agent's policy) or ``card``, None where it is as asked."""

    limit_mw: int
    by: str | None = None


def clamp(requested_mw: int, limits: PowerLimits, floor_percent: float) -> ClampedLimit:
    """Into the card's constraints, and not below the policy's share of its default; of its most, where the
    default is not told."""
    base = limits.default_mw if limits.default_mw is not None else limits.max_mw
    floor_mw = round(base * floor_percent / 100) if base is not None else 0
    lowest_mw = limits.min_mw or 0
    if requested_mw < max(floor_mw, lowest_mw):
        return ClampedLimit(max(floor_mw, lowest_mw), "floor" if floor_mw > lowest_mw else "card")
    if limits.max_mw is not None and requested_mw > limits.max_mw:
        return ClampedLimit(limits.max_mw, "card")
    return ClampedLimit(requested_mw)


def is_same(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and abs(one - other) < _SAME_MW


def _kept(holds: tuple[PowerCap, ...]) -> tuple[PowerCap, ...]:
    ended = [hold for hold in holds if hold.ended_by is not None]
    dropped = set(map(id, ended[: max(0, len(ended) - KEPT_ENDED)]))
    return tuple(hold for hold in holds if id(hold) not in dropped)
