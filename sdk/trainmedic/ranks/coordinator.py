"""What rank 0 does for the ranks of a job, beyond its own part: it takes the chair.

It lets each rank in, calls up the commands that have arrived, gives the verdict, gathers every rank's
outcome into the replies to the server, knows who lives, and sweeps away what all ranks have read.

Who calls it: ``courier``, in rank 0's background thread; `gather` and `placement` from any thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Iterable, Mapping

from trainmedic.job.command import JobCommand
from trainmedic.job.group import ranks_named
from trainmedic.job.queue import CommandQueue
from trainmedic.ranks.decisions import Decision, Verdict, judge
from trainmedic.ranks.rounds import SILENT_AFTER
from trainmedic.ranks.shared_store import Board
from trainmedic.wire import envelope
from trainmedic.wire.envelope import utc_now
from trainmedic.wire.output import fitting

log = logging.getLogger("trainmedic")

TOO_LATE = "the ranks did not come to it in time; with several ranks a step that hangs is not interrupted"
_WELCOME_FIRST, _WELCOME_LAST = 0.005, 1.0
_LOOK_FIRST, _LOOK_LAST = 0.005, 0.5
_GATHER = 2.0
_MOST_COMMANDS = 16
_MOST_BYTES = 512 * 1024
_OVERDUE = timedelta(seconds=30)
_SWEPT_AT_ONCE = 200
_MOST_LITTER = 20_000


@dataclass
class Seen:
    """What a rank has last shown of itself."""

    beat: int
    passed: int
    about: Mapping[str, Any]
    stats: Mapping[str, Any]
    at: float


@dataclass
class Open:
    """A command that the ranks are carrying out."""

    command: JobCommand
    told: set[int] = field(default_factory=set)
    signed: int = 0
    due: float = 0.0
    delay: float = _LOOK_FIRST


class Chair:
    """Rank 0 of ``world_size``."""

    def __init__(self, queue: CommandQueue, base: Board) -> None:
        token = envelope.new_id()
        self._queue = queue
        self._base = base
        self._token = token
        self.board = base.under(token)
        self._others = range(1, base.world_size)
        self._about: Mapping[str, Any] = {}
        self._seen: dict[int, Seen] = {}
        self._nonces: dict[int, str] = {}
        self._welcome_due, self._welcome_delay = 0.0, _WELCOME_FIRST
        self._gather_due = 0.0
        self._own: tuple[int, Mapping[str, Any]] = (-1, {})
        # Commands whose turn it is, that were not carried out yet.
        self._pending: list[JobCommand] = []
        # Those of them that are in a decision which stands, until its verdict.
        self._up: set[str] = set()
        self._failed_at = -1
        self._why_late = ""
        self._open: dict[tuple[int, int], Open] = {}
        # Keys, and the look after which nobody reads them.
        self._litter: deque[tuple[int, str]] = deque()
        self._floor = 0
        self._goodbye = False

    def open(self) -> Board:
        """Where this start of the job writes; from now on the current one."""
        self._base.put("current", self._token)
        return self.board

    # --- who is there -------------------------------------------------------------------------------------

    def turn(self, now: float, passed: int, about: Mapping[str, Any], stats: Mapping[str, Any]) -> float:
        """Do what is due; seconds until something is due again. The others are rank 0's own."""
        self._own = (passed, stats)
        self._about = about
        delay = self._welcome(now)
        delay = min(delay, self._gather(now), self._collect(now))
        self._sweep()
        return delay

    def is_silent(self, rank: int, now: float) -> bool:
        """Whether a rank that was there does not show itself any more."""
        if rank == 0:
            return False
        seen = self._seen.get(rank)
        return seen is not None and now - seen.at > SILENT_AFTER

    def gather(self) -> Mapping[int, Mapping[str, Any]]:
        now = time.monotonic()
        found = {rank: seen.stats for rank, seen in list(self._seen.items()) if not self.is_silent(rank, now)}
        return {0: self._own[1], **found}

    def placement(self) -> list[Mapping[str, Any]]:
        found = [(0, self._about), *sorted((rank, seen.about) for rank, seen in list(self._seen.items()))]
        return [{"rank": rank, "node": about.get("node"), "gpu": about.get("gpu")} for rank, about in found]

    def _welcome(self, now: float) -> float:
        """Answer the number that a rank has drawn, until it shows itself under ours."""
        absent = [rank for rank in self._others if rank not in self._seen]
        if not absent:
            return _GATHER
        if now < self._welcome_due:
            return self._welcome_due - now
        if self._base.peek("current") != self._token:
            return _GATHER  # the courier is about to find that out
        for rank in absent:
            nonce = self._base.peek(f"hello/{rank}")
            if nonce is not None and nonce != self._nonces.get(rank):
                self._nonces[rank] = str(nonce)
                self._base.put(f"welcome/{nonce}", self._token)
                self._welcome_delay, self._gather_due = _WELCOME_FIRST, 0.0
            self._look_at(rank, now)
        self._welcome_delay = min(self._welcome_delay * 1.5, _WELCOME_LAST)
        self._welcome_due = now + self._welcome_delay
        return self._welcome_delay

    def _gather(self, now: float) -> float:
        if now < self._gather_due:
            return self._gather_due - now
        self._gather_due = now + _GATHER
        for rank in list(self._seen):
            self._look_at(rank, now)
        self._pending.extend(self._queue.take_due(utc_now(), self._lateness()))
        self._drop_expired()
        return _GATHER

    def _look_at(self, rank: int, now: float) -> None:
        said = self.board.peek(f"p/{rank}")
        if said is None:
            return
        before = self._seen.get(rank)
        if before is None:
            self._base.remove(f"hello/{rank}")
            self._base.remove(f"welcome/{self._nonces.get(rank)}")
        at = before.at if before is not None and before.beat == said["beat"] else now
        self._seen[rank] = Seen(said["beat"], said["passed"], said["about"], said["stats"], at)
        if before is None or before.about != said["about"]:
            hosts = {one: str(seen.about.get("host")) for one, seen in self._seen.items()}
            self._queue.hosts = {**hosts, 0: str(self._about.get("host"))}

    # --- calling commands up ------------------------------------------------------------------------------

    def call_up(self) -> list[JobCommand]:
        """The commands to write into the decision that is made now. They stay pending until the verdict.

        None before every rank is there, nor after one has failed to come until it has passed that look:
        the others have waited for it once.
        """
        self._pending.extend(self._queue.take_due(utc_now(), self._lateness()))
        self._drop_expired()
        if not self._pending or len(self._seen) < len(self._others):
            return []
        if any(seen.passed < self._failed_at for seen in self._seen.values()):
            return []
        found: list[JobCommand] = []
        size = 0
        for command in self._pending[:_MOST_COMMANDS]:
            size += len(command.sent.encode())
            if found and size > _MOST_BYTES:
                break
            found.append(command)
        return found

    def put_up(self, commands: Iterable[JobCommand]) -> None:
        """They are in the decision of the next look: only its verdict says what becomes of them."""
        self._up = {command.id for command in commands}

    def judge(self, decision: Decision, told: dict[int, Any], missing: list[int]) -> Any:
        """The verdict, as it is written."""
        now = utc_now()
        in_time = {command.id for command in self._pending if now < command.expires_at}
        expired = {sent.id for sent in decision.commands} - in_time
        absent = f"{ranks_named(missing)} did not come to look {decision.number}" if missing else ""
        return judge(decision, told, absent, expired, TOO_LATE).fields()

    def called(self, decision: Decision, verdict: Verdict) -> None:
        """The verdict stands: begin what goes, answer what does not."""
        if verdict.missing:
            self._failed_at = decision.number
            self._why_late = verdict.missing
            log.warning("no command was carried out: %s; trying again", verdict.missing)
        self._up = set()
        by_id = {command.id: command for command in self._pending}
        for index, sent in enumerate(decision.commands):
            command = by_id.get(sent.id)
            if command is not None and sent.id in verdict.go:
                self._open[decision.number, index] = Open(command)
                self._pending.remove(command)
            elif command is not None and sent.id in verdict.refused:
                self._pending.remove(command)
                self._refuse(command, *verdict.refused[sent.id])

    def opened(self, turn: tuple[int, int]) -> JobCommand | None:
        one = self._open.get(turn)
        return one.command if one is not None else None

    def _refuse(self, command: JobCommand, status: str, reason: str) -> None:
        if status == envelope.EXPIRED:
            self._queue.expire(command, reason)
        else:
            command.answer(status, {"reason": reason})

    def _drop_expired(self) -> None:
        now = utc_now()
        for command in list(self._pending):
            if now >= command.expires_at and command.id not in self._up:
                self._pending.remove(command)
                self._queue.expire(command, self._lateness())

    def _lateness(self) -> str:
        absent = [rank for rank in self._others if rank not in self._seen]
        if absent:
            return f"{ranks_named(absent)} did not join the others in time"
        return f"{TOO_LATE}: {self._why_late}" if self._why_late else TOO_LATE

    # --- what became of them ------------------------------------------------------------------------------

    def note(self, turn: tuple[int, int], status: str, output: Mapping[str, Any]) -> None:
        """Rank 0's own outcome."""
        one = self._open.get(turn)
        if one is not None:
            one.command.outcomes[0] = (status, fitting(output))
            one.due = 0.0

    def _collect(self, now: float) -> float:
        delay = _GATHER
        for turn, one in list(self._open.items()):
            if now >= one.due:
                self._collect_one(turn, one, now)
                one.due = now + one.delay
                one.delay = min(one.delay * 1.5, _LOOK_LAST)
            if turn in self._open:
                delay = min(delay, max(one.due - now, 0.0))
        return delay

    def _collect_one(self, turn: tuple[int, int], one: Open, now: float) -> None:
        key, command = f"o/{turn[0]}/{turn[1]}", one.command
        signed = self.board.signed(key)
        if signed != one.signed:
            one.signed = signed
            absent = [rank for rank in self._others if rank not in command.outcomes]
            for rank, (status, output) in self.board.signatures(key, absent).items():
                command.outcomes[rank] = (status, fitting(output))
        missing = [rank for rank in range(self.board.world_size) if rank not in command.outcomes]
        if missing and self._is_hopeless(command, missing, now):
            for rank in missing:
                command.outcomes[rank] = (envelope.FAILED, {"reason": "it did not say what became of the command"})
            missing = []
        if not missing:
            del self._open[turn]
            self._why_late = ""
            self._queue.close_ranks(command, one.told)
            self.litter_list(turn[0], key)
        elif 0 in command.outcomes and one.delay > 0.1:
            untold = command.outcomes.keys() - one.told
            self._queue.reply_so_far(command, untold)
            one.told |= untold

    def _is_hopeless(self, command: JobCommand, missing: list[int], now: float) -> bool:
        if 0 in missing:
            return False  # rank 0 is still at it
        return utc_now() > command.expires_at + _OVERDUE or all(self.is_silent(rank, now) for rank in missing)

    def abandon(self, reason: str) -> None:
        """Nothing is carried out any more: everything that waits is answered."""
        for one in list(self._open.values()):
            for rank in range(self.board.world_size):
                one.command.outcomes.setdefault(rank, (envelope.FAILED, {"reason": reason}))
            self._queue.close_ranks(one.command, one.told)
        self._open.clear()
        for command in self._pending:
            command.failed(reason)
        self._pending.clear()
        self._queue.fail_all(reason)

    def say_goodbye(self, number: int) -> bool:
        """Tell the others that rank 0 ends; whether all have been heard by now."""
        if not self._goodbye:
            self._goodbye = True
            last = Decision(number, 0, 1, (), "rank 0 has ended").fields()
            if self.board.settle(f"d/{number}", last) != last:  # it was decided ahead of time
                self.board.settle(f"d/{number + 1}", last)
        return not self._open and self.board.signed("bye") >= len(self._seen)

    # --- sweeping -----------------------------------------------------------------------------------------

    def litter(self, number: int, *keys: str) -> None:
        """Nobody reads `keys` who has passed look `number`."""
        self._litter.extend((number, key) for key in keys)

    def litter_list(self, number: int, key: str) -> None:
        self.litter(number, f"{key}/end", *self.board.list_keys(key))

    def _sweep(self) -> None:
        passed = min([self._own[0], *(seen.passed for seen in self._seen.values())])
        if len(self._seen) < len(self._others):
            passed = -1
        if len(self._litter) > _MOST_LITTER:  # a rank is gone for good, or as good as that
            self._floor = max(self._litter[len(self._litter) // 2][0], self._floor)
            self.board.put("floor", self._floor)
        for _ in range(min(_SWEPT_AT_ONCE, len(self._litter))):
            number, key = self._litter[0]
            if number >= max(passed, self._floor):
                return
            self._litter.popleft()
            self.board.remove(key)
