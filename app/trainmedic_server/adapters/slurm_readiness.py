"""Nodes out of service in Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.slurm import Slurm, SlurmNode

FRESH = timedelta(seconds=5)
_OUT = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "MAINTENANCE")


class SlurmReadiness:
    def __init__(self, slurm: Slurm, clock: Clock) -> None:
        self._slurm = slurm
        self._clock = clock
        self._known: tuple[datetime, Mapping[str, str]] | None = None

    async def nodes(self) -> Mapping[str, str]:
        """Return why nodes are out of service, empty if in service.

        Raises ClusterUnavailable, ClusterRefused.
        """
        now = self._clock.now()
        if self._known is None or not timedelta(0) <= now - self._known[0] < FRESH:
            self._known = now, {node.name: _why_out(node) for node in await self._slurm.nodes()}
        return self._known[1]


def _why_out(node: SlurmNode) -> str:
    states = [state.lower() for state in _OUT if state in node.states]
    if not states:
        return ""
    return f"Slurm: {', '.join(states)}{f', {node.reason}' if node.reason else ''}"
