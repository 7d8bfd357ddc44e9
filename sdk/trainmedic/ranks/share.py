"""The training thread's part: count calls and return agreed commands."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Mapping, Sequence

from trainmedic.errors import NotAgreed
from trainmedic.job.command import JobCommand, OutcomeCallback
from trainmedic.job.handlers import HandlerRegistry
from trainmedic.job.parameters import parse
from trainmedic.job.queue import CommandQueue
from trainmedic.ranks.coordinator import Coordinator
from trainmedic.ranks.decisions import AgreedOutcome, SyncDecision, SyncInterval
from trainmedic.ranks.participant import Participant
from trainmedic.ranks.rank_state import RankLost, TrainingPosition, outcome_key
from trainmedic.ranks.rounds import RESULT_GRACE, RankGroup, Round
from trainmedic.ranks.shared_store import KeyValueStore, SharedStore
from trainmedic.ranks.synchronizer import JOIN_PATIENCE, Role, Synchronizer
from trainmedic.wire import envelope

PATIENCE = 10.0  # seconds for a late decision
CALL_PATIENCE = 30.0  # seconds for ranks at a command
_MOST_GROUPS = 1000  # names whose uses are counted


@dataclass(frozen=True)
class LocalRank:
    """This rank, for `Share`. Only rank 0 has a ``queue``."""

    job: str
    rank: int
    world_size: int
    handlers: HandlerRegistry
    queue: CommandQueue | None
    on_outcome: OutcomeCallback
    location: Callable[[], Mapping[str, Any]]  # returns node, host and GPU; training thread only
    stats: Callable[[], Mapping[str, Any]]  # `Medic.stats`


class Share:
    """Options are those of `trainmedic.distributed.share`."""

    def __init__(
        self,
        store: KeyValueStore,
        local: LocalRank,
        every: int | None = None,
        patience: float = PATIENCE,
        call_patience: float = CALL_PATIENCE,
    ) -> None:
        self._local = local
        self._patience = patience
        self._call_patience = call_patience
        self._pid = os.getpid()
        self._calls = 0  # of `tick`
        self._next_call = 1  # number of the call at the next sync point
        self._groups: dict[str, int] = {}  # uses of each name
        self._interval = SyncInterval(every)
        self._base = SharedStore(store, "", local.rank, local.world_size)
        job, base, interval = local.job, self._base, self._interval
        self._coordinator = Coordinator(job, local.queue, base, interval) if local.queue is not None else None
        role: Role = self._coordinator or Participant(job, base, interval, patience)
        self._synchronizer = Synchronizer(job, base, role, interval, local.stats)
        self._synchronizer.location = local.location()
        self._synchronizer.start()

    @property
    def state(self) -> str:
        """``on``, or why this rank carries out no more commands."""
        return self._synchronizer.ended_because or "on"

    def publish(self, stats: Mapping[str, Any]) -> None:
        self._synchronizer.published = dict(stats)

    def gather(self) -> Mapping[int, Mapping[str, Any]]:
        """Return live ranks' latest figures; empty except on rank 0."""
        return self._coordinator.membership.figures() if self._coordinator is not None else {}

    def group(self, name: str) -> RankGroup:
        """Every rank passes the same name, such as ``f"save-{step}"``."""
        self._groups[name] = count = self._groups.pop(name, 0) + 1
        if len(self._groups) > _MOST_GROUPS:
            del self._groups[next(iter(self._groups))]
        return RankGroup(self._base, f"group/{name}/{count}", None, self._run_round)

    def describe(self) -> Mapping[str, Any]:
        assert self._coordinator is not None
        placement = self._coordinator.membership.placement()
        return {"ranks": list(range(self._local.world_size)), "placement": placement, "sharing": self.state}

    def tick(self, step: int | None) -> Sequence[JobCommand]:
        """Count a call; return the agreed commands at a sync point."""
        self._calls += 1
        if self._calls < self._next_call:
            return ()
        if self._synchronizer.ended_because is not None or os.getpid() != self._pid:
            self._next_call = sys.maxsize
            return ()
        try:
            return self._synchronize(step)
        except RankLost:
            self._next_call = sys.maxsize
            return ()

    def report_outcome(self, command: JobCommand, status: str, output: Mapping[str, Any]) -> None:
        assert command.sync_key is not None
        self._synchronizer.report(command.sync_key, status, output)

    def close(self, timeout: float) -> None:
        """Send the remaining outcomes, and end; rank 0 also answers waiting commands."""
        self._synchronizer.close(timeout)
        if self._coordinator is not None and not self._synchronizer.is_alive:
            self._coordinator.abandon("the job ended before it came to the command")

    def _synchronize(self, step: int | None) -> Sequence[JobCommand]:
        synchronizer = self._synchronizer
        position = synchronizer.position
        number = position.number + 1
        decision = synchronizer.next_decision
        if decision is None or decision.number != number:
            patience = max(self._patience, JOIN_PATIENCE)
            decision = synchronizer.wait_for(synchronizer.attempt_decision, patience)
        assert decision is not None
        if decision.over is not None:
            synchronizer.end(decision.over, logging.INFO)
            raise RankLost(decision.over)
        agreed = self._meet(decision, step) if decision.commands else ()
        now = time.monotonic()
        if number > 0:  # before, the calls include the start
            self._interval.record(position.span, now - position.at)
        self._next_call = self._calls + decision.span
        synchronizer.location = self._local.location()
        synchronizer.position = TrainingPosition(number, self._calls, decision.span, now)
        synchronizer.wake()
        return agreed

    def _meet(self, decision: SyncDecision, step: int | None) -> list[JobCommand]:
        """Agree with the other ranks; return the commands to carry out."""
        cannot = {sent.id: reason for sent in decision.commands if (reason := self._why_unable(sent))}
        statement = {"step": step, "cannot": cannot}
        attempt = partial(self._synchronizer.attempt_meeting, decision, statement, self._call_patience)
        outcome: AgreedOutcome = self._synchronizer.wait_for(attempt, self._call_patience + RESULT_GRACE)
        return [
            self._command((decision.number, index), sent)
            for index, sent in enumerate(decision.commands)
            if sent.id in outcome.go
        ]

    def _why_unable(self, sent: envelope.Command) -> str | None:
        try:
            parse(sent.action, sent.params)
        except ValueError as error:  # another version of the SDK than rank 0's
            return str(error)
        return self._local.handlers.refusal_reason(sent.action)

    def _command(self, sync_key: tuple[int, int], sent: envelope.Command) -> JobCommand:
        command = self._coordinator.running(sync_key) if self._coordinator is not None else None
        if command is None:
            command = JobCommand(sent, parse(sent.action, sent.params), None, self._local.on_outcome)
        command.sync_key = sync_key
        command.group = RankGroup(
            self._base, f"command/{sync_key[0]}/{sync_key[1]}", outcome_key(sync_key), self._run_round
        )
        return command

    def _run_round(self, round_: Round, value: Any) -> Any:
        try:
            attempt = partial(self._synchronizer.attempt_round, round_, value)
            return self._synchronizer.wait_for(attempt, round_.patience + RESULT_GRACE)
        except RankLost as error:
            raise NotAgreed(str(error)) from None
