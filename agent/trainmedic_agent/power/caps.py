"""Power caps of a GPU, and the resulting limit, without clock or driver.

The lowest active cap counts, and no cap raises a limit. Power is in milliwatts, times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from trainmedic_agent.ports.gpus import PowerLimits

KEPT_ENDED = 64
"""Ended caps per GPU, to answer a late undo or renewal."""

EXPIRED = "lease"
"""End reason of an unrenewed cap, which can be reapplied."""

_STORED_SEPARATELY = ("boot", "ends_at")  # see `GpuPowerState.to_json`
_SAME_MW = 1000  # limits less than this apart are equal: drivers round


class PowerCap(Struct, frozen=True):
    """Upper bound of a GPU's power, set by one command.

    - ``id``: the command's
    - ``limit_mw``: within the bounds of card and policy
    - ``lease_until``: end of the lease in Unix seconds, used after a reboot; before that `ends_at` counts
    - ``previous_mw``, ``requested_mw``: the driver's limit before, and the requested one
    - ``clamped``: deciding bound, ``floor`` or ``card``
    - ``ended_by``: ``lease``, ``overridden``, ``failed: <why>``, ``release`` or ``undo <command id>``
    - ``boot``: boot ID for `ends_at`; empty if an earlier agent wrote the cap
    - ``ends_at``: end of the lease in seconds since that boot, a clock that cannot be set
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
    boot: str = ""
    ends_at: float = 0.0

    @property
    def is_active(self) -> bool:
        return self.ended_by is None


class LeaseEnd(Struct, frozen=True):
    """In Unix seconds, and in seconds since the boot with that ID."""

    unix: float
    boot: str
    since_boot: float


class PowerBaseline(Struct, frozen=True):
    """Known limits of a GPU that this agent controls.

    If the driver shows ``set_mw`` or ``pending_mw``, no other process has changed it.

    - ``original_mw``: before the first cap
    - ``set_mw``: last confirmed one
    - ``session``: driver session then
    - ``pending_mw``: about to be set
    """

    original_mw: int
    set_mw: int
    session: str
    pending_mw: int | None = None


class GpuPowerState(Struct, frozen=True):
    """- ``baseline``: None while the agent does not control the limit
    - ``caps``: active ones, and the last ended ones
    """

    baseline: PowerBaseline | None = None
    caps: tuple[PowerCap, ...] = ()

    @property
    def active(self) -> tuple[PowerCap, ...]:
        return tuple(cap for cap in self.caps if cap.is_active)

    @property
    def needs_reconciling(self) -> bool:
        """True if the original limit must be restored, or a change is unconfirmed."""
        return self.baseline is not None and (not self.active or self.baseline.pending_mw is not None)

    def has_active(self, cap_ids: Collection[str]) -> bool:
        return any(cap.id in cap_ids for cap in self.active)

    def has_expired(self, cap_id: str) -> bool:
        cap = self.cap(cap_id)
        return cap is not None and cap.ended_by == EXPIRED

    def cap(self, cap_id: str) -> PowerCap | None:
        return next((cap for cap in self.caps if cap.id == cap_id), None)

    def desired_mw(self) -> int | None:
        """Return the intended limit; None if not controlled by the agent."""
        if self.baseline is None:
            return None
        return min([self.baseline.original_mw, *(cap.limit_mw for cap in self.active)])

    def is_overridden(self, present: PowerLimits) -> bool:
        """Return whether another process has changed the limit.

        The default is the driver's own change in a new session, or if it forgot the agent's limit (`forgotten_mw`).
        """
        baseline = self.baseline
        if baseline is None or is_same(present.limit_mw, self.desired_mw()):
            return False
        own = (baseline.set_mw, baseline.pending_mw)
        if any(is_same(present.limit_mw, limit) for limit in own):
            return False
        is_forgotten = any(is_same(present.forgotten_mw, limit) for limit in own)
        is_new = present.session != baseline.session or is_forgotten
        return not (is_new and is_same(present.limit_mw, present.default_mw))

    def with_cap(self, cap: PowerCap, present: PowerLimits) -> GpuPowerState:
        """Add a cap, in place of an ended one with the same ID."""
        baseline = self.baseline or PowerBaseline(present.limit_mw, present.limit_mw, present.session)
        return GpuPowerState(baseline, _pruned((*self.without(cap.id).caps, cap)))

    def about_to_set(self, present: PowerLimits) -> GpuPowerState:
        """Record the intended limit before the driver call."""
        if is_same(present.limit_mw, self.desired_mw()):
            return self
        assert self.baseline is not None
        baseline = PowerBaseline(self.baseline.original_mw, present.limit_mw, present.session, self.desired_mw())
        return replace(self, baseline=baseline)

    def confirmed(self, present: PowerLimits) -> GpuPowerState:
        assert self.baseline is not None
        if not self.active:
            return replace(self, baseline=None)
        return replace(self, baseline=PowerBaseline(self.baseline.original_mw, present.limit_mw, present.session))

    def ending(self, cap_ids: Collection[str], by: str, at: float) -> GpuPowerState:
        """End these caps. An expired one gets the new reason, so that it cannot be reapplied."""
        caps = (
            replace(cap, ended_by=by, ended_at=at)
            if cap.id in cap_ids and (cap.is_active or cap.ended_by == EXPIRED)
            else cap
            for cap in self.caps
        )
        return replace(self, caps=_pruned(tuple(caps)))

    def without(self, cap_id: str) -> GpuPowerState:
        """Remove a cap as if never set. The baseline stays, to be restored."""
        return replace(self, caps=tuple(cap for cap in self.caps if cap.id != cap_id))

    def overridden(self, at: float) -> GpuPowerState:
        """End all caps without restoring a limit, because another process has set one."""
        return replace(self.ending({cap.id for cap in self.caps}, "overridden", at), baseline=None)

    def renewed(self, ends: Mapping[str, LeaseEnd]) -> GpuPowerState:
        caps = (
            replace(cap, lease_until=end.unix, boot=end.boot, ends_at=end.since_boot)
            if cap.is_active and (end := ends.get(cap.id)) is not None
            else cap
            for cap in self.caps
        )
        return replace(self, caps=tuple(caps))

    def to_json(self) -> dict[str, Any]:
        """Return the stored form.

        Never rename ``holds`` or fields. Older agents reject a cap's unknown fields, so these are stored separately.
        """
        caps = [asdict(cap) for cap in self.caps]
        ends = {cap["id"]: {name: cap.pop(name) for name in _STORED_SEPARATELY} for cap in caps}
        return {"baseline": asdict(self.baseline) if self.baseline else None, "holds": caps, "ends": ends}

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> GpuPowerState:
        baseline = PowerBaseline(**value["baseline"]) if value["baseline"] else None
        ends = value.get("ends", {})
        return cls(baseline, tuple(PowerCap(**cap, **ends.get(cap["id"], {})) for cap in value["holds"]))


class ClampedLimit(Struct, frozen=True):
    """A clamped request. ``by`` is the deciding bound, ``floor`` (the policy's) or ``card``; None if unchanged."""

    limit_mw: int
    by: str | None = None


def clamp(requested_mw: int, limits: PowerLimits, floor_percent: float) -> ClampedLimit:
    """Clamp a request to the card's limits, and to the policy's share of its default (or highest) limit."""
    base = limits.default_mw if limits.default_mw is not None else limits.max_mw
    floor_mw = round(base * floor_percent / 100) if base is not None else 0
    lowest_mw = limits.min_mw or 0
    if requested_mw < max(floor_mw, lowest_mw):
        return ClampedLimit(max(floor_mw, lowest_mw), "floor" if floor_mw > lowest_mw else "card")
    if limits.max_mw is not None and requested_mw > limits.max_mw:
        return ClampedLimit(limits.max_mw, "card")
    return ClampedLimit(requested_mw)


def is_same(limit_mw: int | None, other_mw: int | None) -> bool:
    return limit_mw is not None and other_mw is not None and abs(limit_mw - other_mw) < _SAME_MW


def _pruned(caps: tuple[PowerCap, ...]) -> tuple[PowerCap, ...]:
    ended = [cap for cap in caps if not cap.is_active]
    dropped = set(map(id, ended[: max(0, len(ended) - KEPT_ENDED)]))
    return tuple(cap for cap in caps if id(cap) not in dropped)
