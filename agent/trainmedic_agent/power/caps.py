"""What limit a GPU should have, as values: the caps that are active on it, and what it had before the first of them.

A cap has a lease. Several caps can be active on one GPU; the lowest counts, and no cap ever raises a limit. When the
last one ends, the GPU gets back the limit from before the first.

Nothing here knows a clock or a driver. Power is in milliwatts, times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from trainmedic_agent.ports.gpus import PowerLimits

KEPT_ENDED = 64
"""How many ended caps of a GPU are remembered, so that a late undo or renewal learns what became of them."""

EXPIRED = "lease"
"""`PowerCap.ended_by` of a cap that was not renewed in time. A server that still needs it can have it set again."""

_BESIDE = ("boot", "ends_at")
_SAME_MW = 1000
"""Limits that are nearer than this count as the same: drivers round."""


class PowerCap(Struct, frozen=True):
    """An upper bound of one GPU's power, set by one command.

    ``id``: the id of the command that set it.
    ``limit_mw``: the cap in milliwatts, within the card's and the policy's bounds.
    ``lease_until``: when it ends unless it is renewed, Unix seconds. It counts after a reboot; before that `ends_at`.
    ``lease_seconds``: the lease that was granted.
    ``previous_mw``: the limit that the driver showed before.
    ``requested_mw``: what the command asked for.
    ``clamped``: what kept it from the request, ``floor`` or ``card``; None where it is as requested.
    ``ended_at``: Unix seconds; None while it is active.
    ``ended_by``: why it is no longer active: ``lease``, ``overridden``, ``failed: <why>``, ``release`` or
    ``undo <command id>``; None while it is active.
    ``boot``: the id of the machine's boot in which `ends_at` was written; empty where an earlier agent wrote it.
    ``ends_at``: when it ends unless it is renewed, in seconds since that boot, which nobody can set.
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
    """When a lease ends: in Unix seconds, and in seconds since the boot of that id."""

    unix: float
    boot: str
    since_boot: float


class PowerBaseline(Struct, frozen=True):
    """What is known of a GPU's limit while this agent controls it. Whichever of ``set_mw`` and ``pending_mw`` the
    driver shows, nobody else has changed it.

    ``original_mw``: the limit from before the first cap.
    ``set_mw``: the limit that was last seen after this agent had set it.
    ``session``: the driver's session at that time (`PowerLimits.session`).
    ``pending_mw``: the limit that was about to be set then; None once the driver has shown it.
    """

    original_mw: int
    set_mw: int
    session: str
    pending_mw: int | None = None


class GpuPowerState(Struct, frozen=True):
    """Everything that the agent remembers of the power of one GPU.

    ``baseline``: None while the agent does not control the limit.
    ``caps``: the active caps, and the last `KEPT_ENDED` that have ended.
    """

    baseline: PowerBaseline | None = None
    caps: tuple[PowerCap, ...] = ()

    @property
    def active(self) -> tuple[PowerCap, ...]:
        return tuple(cap for cap in self.caps if cap.is_active)

    @property
    def needs_reconciling(self) -> bool:
        """Whether the baseline must still be restored, or a change was begun and its end not seen."""
        return self.baseline is not None and (not self.active or self.baseline.pending_mw is not None)

    def has_active(self, cap_ids: Collection[str]) -> bool:
        return any(cap.id in cap_ids for cap in self.active)

    def has_expired(self, cap_id: str) -> bool:
        """Whether there was such a cap, and nothing but its lease has ended it."""
        cap = self.cap(cap_id)
        return cap is not None and cap.ended_by == EXPIRED

    def cap(self, cap_id: str) -> PowerCap | None:
        return next((cap for cap in self.caps if cap.id == cap_id), None)

    def desired_mw(self) -> int | None:
        """The limit that the GPU should have; None if the agent does not control it."""
        if self.baseline is None:
            return None
        return min([self.baseline.original_mw, *(cap.limit_mw for cap in self.active)])

    def is_overridden(self, present: PowerLimits) -> bool:
        """Whether another party has set the limit since this agent did.

        A limit that is back at the card's default, in a session in which the driver may have forgotten what was set,
        was forgotten. Its caps are still active, so the agent sets it again.
        """
        baseline = self.baseline
        if baseline is None or is_same(present.limit_mw, self.desired_mw()):
            return False
        if is_same(present.limit_mw, baseline.set_mw) or is_same(present.limit_mw, baseline.pending_mw):
            return False
        return present.session == baseline.session or not is_same(present.limit_mw, present.default_mw)

    def with_cap(self, cap: PowerCap, present: PowerLimits) -> GpuPowerState:
        """Add a cap, on a GPU that shows these limits; it replaces an ended one with its id."""
        baseline = self.baseline or PowerBaseline(present.limit_mw, present.limit_mw, present.session)
        return GpuPowerState(baseline, _pruned((*self.without(cap.id).caps, cap)))

    def about_to_set(self, present: PowerLimits) -> GpuPowerState:
        """Note the intent to set the target, before the driver is called; no intent where the driver shows it."""
        if is_same(present.limit_mw, self.desired_mw()):
            return self
        assert self.baseline is not None
        baseline = PowerBaseline(self.baseline.original_mw, present.limit_mw, present.session, self.desired_mw())
        return replace(self, baseline=baseline)

    def confirmed(self, present: PowerLimits) -> GpuPowerState:
        """The driver shows the target, or what it made of it. With the last cap the baseline goes too."""
        assert self.baseline is not None
        if not self.active:
            return replace(self, baseline=None)
        return replace(self, baseline=PowerBaseline(self.baseline.original_mw, present.limit_mw, present.session))

    def ending(self, cap_ids: Collection[str], by: str, at: float) -> GpuPowerState:
        """End those of these caps that are active. One that has expired gets the new reason, so that it is not set
        again."""
        caps = (
            replace(cap, ended_by=by, ended_at=at)
            if cap.id in cap_ids and (cap.is_active or cap.ended_by == EXPIRED)
            else cap
            for cap in self.caps
        )
        return replace(self, caps=_pruned(tuple(caps)))

    def without(self, cap_id: str) -> GpuPowerState:
        """Forget a cap as if it had never been set; the baseline stays, and must still be restored."""
        return replace(self, caps=tuple(cap for cap in self.caps if cap.id != cap_id))

    def overridden(self, at: float) -> GpuPowerState:
        """Another party has set the limit: every cap ends, and nothing is restored."""
        return replace(self.ending({cap.id for cap in self.caps}, "overridden", at), baseline=None)

    def renewed(self, ends: Mapping[str, LeaseEnd]) -> GpuPowerState:
        """Change the ends of the leases of these active caps."""
        caps = (
            replace(cap, lease_until=end.unix, boot=end.boot, ends_at=end.since_boot)
            if cap.is_active and (end := ends.get(cap.id)) is not None
            else cap
            for cap in self.caps
        )
        return replace(self, caps=tuple(caps))

    def to_json(self) -> dict[str, Any]:
        """Return the stored form. ``holds`` and the fields of both classes are names on disk, which agents of every
        version read: never rename them. They refuse a field of a cap that they do not know, so `PowerCap.boot` and
        `PowerCap.ends_at` stand beside the caps."""
        caps = [asdict(cap) for cap in self.caps]
        ends = {cap["id"]: {name: cap.pop(name) for name in _BESIDE} for cap in caps}
        return {"baseline": asdict(self.baseline) if self.baseline else None, "holds": caps, "ends": ends}

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> GpuPowerState:
        baseline = PowerBaseline(**value["baseline"]) if value["baseline"] else None
        ends = value.get("ends", {})
        return cls(baseline, tuple(PowerCap(**cap, **ends.get(cap["id"], {})) for cap in value["holds"]))


class ClampedLimit(Struct, frozen=True):
    """The limit that a request comes to.

    ``limit_mw``: milliwatts, within all bounds.
    ``by``: the bound that counted, ``floor`` (of the agent's policy) or ``card``; None where it is as requested.
    """

    limit_mw: int
    by: str | None = None


def clamp(requested_mw: int, limits: PowerLimits, floor_percent: float) -> ClampedLimit:
    """Bring a request within the card's constraints, and not below the policy's share of its default limit.

    Where the card does not report its default, the share is of its highest limit.
    """
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
