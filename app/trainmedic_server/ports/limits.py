"""Limits of the engine."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

from msgspec import Struct

from trainmedic_core.target import Target
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.target_modes import TargetModes
from trainmedic_server.domain.topology import Topology


class EngineLimits(Struct, frozen=True):
    mode: Mode = Mode.OBSERVE
    target_modes: TargetModes = TargetModes()
    """Modes of parts of the cluster, which replace `mode` there."""
    max_age: timedelta = timedelta(minutes=15)  # An older alert starts no repair.
    assume_resolved_after: timedelta = timedelta(hours=12)  # Silence of an alert that counts as its end.
    breaker_window: timedelta = timedelta(minutes=10)
    breaker_share: float = 0.5
    """Share of known nodes, 0 to 1, that runs may act on within the window."""
    breaker_min_nodes: int = 10  # Acting on up to this many nodes never opens the breaker.
    queue: int = 1000  # Most deliveries that wait for admission.
    external_url: str = ""  # Without a trailing slash; empty for none.

    def mode_for(self, target: Target | None, topology: Topology, also: Collection[Target] = ()) -> tuple[Mode, str]:
        """Return the strictest of the modes for `target` and `also`, and why it differs from `mode` ("" if not)."""
        if not self.target_modes.entries:
            return self.mode, ""
        modes = [self.target_modes.of(each, self.mode, topology) for each in (target, *also)]
        return min(modes, key=lambda mode: list(Mode).index(mode[0]))  # The strictest is first in `Mode`.
