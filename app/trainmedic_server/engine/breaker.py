"""The breaker: blocks runs that would touch too many nodes.

A run's target node counts at admission; others count before each attempt. A group never opens it, and members of an
approved list do not count, nor do undos.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from datetime import datetime

from msgspec.structs import replace

from trainmedic_server import telemetry
from trainmedic_server.domain import places
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import BreakerOpened
from trainmedic_server.domain.run import Controls, Run
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import guards
from trainmedic_server.engine.recorder import Recorder
from trainmedic_server.engine.timeline import Timeline
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.store import Transaction

log = telemetry.logger(__name__)


class Breaker:
    """`on_opened` is called after the change is durable."""

    def __init__(
        self,
        recorder: Recorder,
        clock: Clock,
        timeline: Timeline,
        limits: EngineLimits,
        topology: Callable[[], Topology],
        controls: Callable[[], Controls],
        on_opened: Callable[[Controls], None],
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._timeline = timeline
        self._limits = limits
        self._topology = topology
        self._controls = controls
        self._on_opened = on_opened

    async def count_or_bar(self, run: Run, nodes: Set[str], *, has_acted: bool) -> str | None:
        """Record that the run touches these nodes and return None, or return why it must not.

        `has_acted`: it acted before on its target's node, which is then not new.
        """
        if not nodes:
            return None
        since = self._counts_from(self._controls())
        of_target = places.counted_nodes(run.target) if run.target is not None else frozenset[str]()
        if nodes <= of_target and run.created_at > since:
            return None  # admission has counted it
        own = of_target if has_acted else frozenset[str]()
        known_nodes = self._topology().nodes
        reason, opened = await self._recorder.transact(
            lambda tx: self._check_and_count(tx, run, nodes, own, known_nodes)
        )
        if opened is not None:
            log.error("breaker opened", why=reason, run_id=run.id)
            self._on_opened(opened)
        return reason

    def _check_and_count(
        self, tx: Transaction, run: Run, nodes: Set[str], own: Set[str], known_nodes: Set[str]
    ) -> tuple[str | None, Controls | None]:
        """`own` are nodes touched before."""
        now, controls = self._clock.now(), tx.controls()
        new = nodes - tx.touched_nodes(run.id) - own
        if new and controls.breaker_open:
            return controls.breaker_reason or "the breaker is open", None
        if new and not run.is_vouched_for:
            acted_on = tx.nodes_acted_on(self._counts_from(controls))
            reason = guards.why_breaker_opens(new, acted_on, tx.known_nodes() | known_nodes, self._limits)
            if reason is not None and run.parent is not None:
                return reason, None  # a group never opens the breaker
            if reason is not None:
                opened = replace(controls, breaker_open=True, breaker_opened_at=now, breaker_reason=reason)
                tx.save_controls(opened)
                tx.append([recorded(BreakerOpened(reason, run.id), now)])
                return reason, opened
        tx.touch_nodes(run.id, nodes, now, count=not run.is_vouched_for)
        tx.remember_nodes(nodes, now)
        return None, None

    def _counts_from(self, controls: Controls) -> datetime:
        return controls.breaker_counts_from(self._timeline.by_clock()(self._limits.breaker_window))
