"""How the ranks of a job come to carry out the same commands at the same call of `Medic.commands`.

Calls are counted from `trainmedic.distributed.share` on, and every rank makes the same ones. At certain
calls, the *looks*, each rank reads the decision of that look (``decisions``): the same for all, because
the first that is written stays. Rank 0 writes it ahead of time. One that does not come is settled as
"nothing" by whoever has waited for it too long, and then nobody waits again until rank 0 is seen to
move. Only where a decision holds commands do the ranks wait for each other: each says which step it is
at, and the verdict lets all of them go on with a command, or none.

Here: the training thread's part. It counts, and at a look takes what the background thread
(``courier``) has found. Who makes a `Share`: ``distributed``.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import partial
from typing import Any, Callable, Mapping, Sequence

from trainmedic.errors import NotAgreed
from trainmedic.job.command import Conclude, JobCommand
from trainmedic.job.handlers import CommandHandlers
from trainmedic.job.parameters import parse
from trainmedic.job.queue import CommandQueue
from trainmedic.ranks.coordinator import Chair
from trainmedic.ranks.decisions import Decision, Pace, Verdict
from trainmedic.ranks.rounds import Fellows, Round
from trainmedic.ranks.shared_store import Board, Store
from trainmedic.ranks.synchronizer import GRACE, JOIN_PATIENCE, Courier, Lost, Passed
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

PATIENCE = 10.0
"""Seconds that a rank waits at a look for a decision that is late, once."""
CALL_PATIENCE = 30.0
"""Seconds that the ranks wait for each other at a look where there is a command."""
_MOST_GROUPS = 1000


class Share:
    """One rank's part. ``queue`` is rank 0's; ``about`` says where this rank runs."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        handlers: CommandHandlers,
        conclude: Conclude,
        about: Callable[[], Mapping[str, Any]],
        stats: Callable[[], Mapping[str, Any]],
        queue: CommandQueue | None,
        every: int | None = None,
        patience: float = PATIENCE,
        call_patience: float = CALL_PATIENCE,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._handlers = handlers
        self._about = about
        self._conclude_command = conclude
        self._patience = patience
        self._call_patience = call_patience
        self._pid = os.getpid()
        self._calls = 0
        self._next = 1
        self._groups: dict[str, int] = {}
        self._pace = Pace(every)
        base = Board(store, "", rank, world_size)
        self._chair = Chair(queue, base) if queue is not None else None
        self._courier = Courier(base, self._pace, self._chair, stats, patience)
        self._courier.about = about()
        self._courier.start()

    # --- for users ----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """``on``, or why this rank carries out no commands any more."""
        return self._courier.over or "on"

    def publish(self, stats: Mapping[str, Any]) -> None:
        """Figures of this rank for rank 0, beside those of `Medic.stats`. The latest ones go out every
        few seconds."""
        self._courier.published = dict(stats)

    def gather(self) -> Mapping[int, Mapping[str, Any]]:
        """On rank 0 the latest figures of every rank that lives; elsewhere nothing. Waits for nothing."""
        return self._chair.gather() if self._chair is not None else {}

    def group(self, name: str) -> Fellows:
        """The ranks together, outside of a command: every rank asks for it alike, by the same name.
        ``f"save-{step}"``, say."""
        self._groups[name] = count = self._groups.pop(name, 0) + 1
        if len(self._groups) > _MOST_GROUPS:
            del self._groups[next(iter(self._groups))]
        return self._fellows(f"u/{name}/{count}", None)

    def describe(self) -> Mapping[str, Any]:
        """What rank 0 adds to the job's presence."""
        assert self._chair is not None
        return {"ranks": list(range(self.world_size)), "placement": self._chair.placement(), "sharing": self.state}

    # --- the training thread ------------------------------------------------------------------------------

    def tick(self, step: int | None) -> Sequence[JobCommand]:
        """Count one call; the commands to carry out in it."""
        self._calls += 1
        if self._calls < self._next:
            return ()
        if self._courier.over is not None or os.getpid() != self._pid:
            self._next = sys.maxsize
            return ()
        try:
            return self._look(step)
        except Lost:
            self._next = sys.maxsize
            return ()

    def conclude(self, command: JobCommand, status: str, output: Mapping[str, Any]) -> None:
        """This rank's outcome, on its way to the server."""
        assert command.turn is not None
        self._courier.hand_over(command.turn, status, output)

    def close(self, timeout: float) -> None:
        """Hand over what there is to say, and end. On rank 0 what waits is answered."""
        self._courier.close(timeout)
        if self._chair is not None and not self._courier.is_alive:
            self._chair.abandon("the job ended before it came to the command")

    def _look(self, step: int | None) -> Sequence[JobCommand]:
        courier = self._courier
        passed = courier.passed
        number = passed.number + 1
        decision = courier.ahead
        if decision is None or decision.number != number:
            decision = courier.ask(partial(courier.find, number), max(self._patience, JOIN_PATIENCE))
        assert decision is not None
        if decision.over is not None:
            courier.lose(decision.over, logging.INFO)
            raise Lost(decision.over)
        agreed = self._meet(decision, step) if decision.commands else ()
        now = time.monotonic()
        if number > 0:
            self._pace.note(passed.span, now - passed.at)
        self._next = self._calls + decision.span
        courier.about = self._about()
        courier.passed = Passed(number, self._calls, decision.span, now)
        courier.wake()
        return agreed

    def _meet(self, decision: Decision, step: int | None) -> list[JobCommand]:
        """Wait for the others and for the verdict; the commands that go."""
        cannot = {one.id: reason for one in decision.commands if (reason := self._unable(one))}
        mine = {"step": step, "cannot": cannot}
        attempt = partial(self._courier.meet, decision, mine, self._call_patience)
        verdict: Verdict = self._courier.ask(attempt, self._call_patience + GRACE)
        found = []
        for index, sent in enumerate(decision.commands):
            if sent.id in verdict.go:
                found.append(self._command((decision.number, index), sent))
        return found

    def _unable(self, sent: envelope.Command) -> str | None:
        try:
            parse(sent.action, sent.params)
        except ValueError as error:  # an SDK of another version than rank 0's
            return str(error)
        return self._handlers.cannot(sent.action)

    def _command(self, turn: tuple[int, int], sent: envelope.Command) -> JobCommand:
        command = self._chair.opened(turn) if self._chair is not None else None
        if command is None:
            command = JobCommand(sent, parse(sent.action, sent.params), None, self._conclude_command)
        command.turn = turn
        command.group = self._fellows(f"g/{turn[0]}/{turn[1]}", f"o/{turn[0]}/{turn[1]}")
        return command

    def _fellows(self, key: str, left: str | None) -> Fellows:
        return Fellows(self.rank, self.world_size, key, left, self._hold)

    def _hold(self, one: Round, mine: Any) -> Any:
        try:
            return self._courier.ask(partial(self._courier.hold, one, mine), one.patience + GRACE)
        except Lost as error:
            raise NotAgreed(str(error)) from None
