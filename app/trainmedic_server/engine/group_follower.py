"""A parent's driver's view of its group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from trainmedic_server.domain.group import Member
from trainmedic_server.domain.run import OperatorOrder, OrderKind, Run
from trainmedic_server.engine import capacity, group_members, undoing
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.plan_values import OutsideState
from trainmedic_server.engine.rollout import GroupProgress, StartMembers
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import Transaction


class GroupFollower:
    def __init__(self, services: EngineServices, parent: Run) -> None:
        self._services = services
        self._parent_id, self._is_open = parent.id, parent.is_open
        self.progress: GroupProgress | None = None
        self.news = asyncio.Event()
        self._forwarded: tuple[bool, tuple[OperatorOrder, ...]] | None = None  # what the members were last woken for

    async def follow(self) -> None:
        """Read the members. News during the read are applied after it."""
        news: list[Member] = []
        self._services.group_news.follow(self._parent_id, news.append)
        progress = await self._services.recorder.transact(lambda tx: group_members.read_progress(tx, self._parent_id))
        for member in news:
            progress.note(member)
        self.progress = progress
        self._services.group_news.follow(self._parent_id, self._note)

    def leave(self) -> None:
        self._services.group_news.leave(self._parent_id)

    def _note(self, member: Member) -> None:
        assert self.progress is not None
        if member.has_acted and not member.is_open and self.progress.begun[member.target].is_open:
            self.progress.settling[member.target] = self._services.clock.now() + capacity.SETTLES_AFTER
        self.progress.note(member)
        self.news.set()

    def allow_next_start(self) -> None:
        if self.progress is not None:
            # The reason why members could not start, and the time that belongs to it.
            self.progress.held, self.progress.tries_again = "", None

    async def start(
        self, order: StartMembers, parent: Run, playbook: CompiledPlaybook, outside: OutsideState
    ) -> Sequence[str]:
        """Start members; return the IDs of their open runs."""
        progress = self.progress
        assert progress is not None
        started = await group_members.start(self._services, parent, playbook, outside, progress, order)
        progress.held, progress.refused = started.held, started.refused
        progress.waits_for_own, progress.tries_again = started.waits_for_own, started.tries_again
        if started.changes is None:
            return ()
        for run in started.changes.runs:
            progress.note(Member.of(run))
        self._services.on_admitted(replace(started.changes, outside=outside))
        return [run.id for run in started.changes.runs if run.is_open]

    async def wake_members(self, outside: OutsideState) -> None:
        """Make the members reload after the end of the alert or an order to the whole group."""
        known = (outside.resolved, tuple(outside.orders))
        if known == self._forwarded:
            return
        if self._forwarded is None and self._is_open and known == (False, ()):
            self._forwarded = known
            return  # a new driver of an open parent, and nothing has happened
        undo = outside.last(OrderKind.UNDO) is not None

        def work(tx: Transaction) -> set[str]:
            possible = tx.members_with_undo(self._parent_id, undoing.OPEN_TO_ORDERS) if undo else ()
            return {*tx.unfinished_members(self._parent_id), *possible}

        self._services.touch(sorted(await self._services.recorder.transact(work)))
        self._forwarded = known
