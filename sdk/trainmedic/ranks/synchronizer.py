"""The thread that carries what the ranks of a job write for each other; it alone touches their store.

Any call of the store may block where the machine that hosts it is gone, so the training thread never
makes one: it leaves an `Ask`, and waits for it for a bounded time. The courier fetches the next decision
before it is asked for, shows the others that this rank lives, and hands over what became of commands.

Once a rank is lost (`Courier.over`), because the store is gone or this rank is too far behind, it
carries out nothing any more; so the others, who miss it when a command is called up, do not either.
Who calls it: ``share``. What only rank 0 does is in ``chair``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Mapping

from trainmedic.ranks.coordinator import Chair
from trainmedic.ranks.decisions import AHEAD, Decision, Pace, Verdict
from trainmedic.ranks.rounds import SILENT_AFTER, Round, Rounds
from trainmedic.ranks.shared_store import Board
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

GRACE = 15.0
"""Seconds for a store that answers slowly, beyond every other patience, before sharing is given up."""
JOIN_PATIENCE = 60.0
"""Seconds for rank 0 to let this rank in."""
_BEAT = 2.0
_BEAT_OF_MANY = 5.0
_MANY = 64
_RETRY_FIRST, _RETRY_LAST = 0.01, 0.25
_ASK_FIRST = 0.001
_WIDEST = 32


class Lost(Exception):
    """This rank cannot take part any more, and why."""


@dataclass(frozen=True)
class Passed:
    """Where the training thread is: which look it has passed last, at which call, and when."""

    number: int = -1
    calls: int = 0
    span: int = 1
    at: float = 0.0


class Ask:
    """Something that the training thread waits for: `attempt` is called until it returns something."""

    def __init__(self, attempt: Callable[[float, float], Any]) -> None:
        self.attempt = attempt
        self.since = time.monotonic()
        self.delay = _ASK_FIRST
        self.done = threading.Event()
        self.result: Any = None


class Courier:
    """One rank's. ``passed``, ``about`` and ``published`` are set by the training thread, ``ahead`` is read by it."""

    def __init__(
        self,
        base: Board,
        pace: Pace,
        chair: Chair | None,
        stats: Callable[[], Mapping[str, Any]],
        patience: float,
    ) -> None:
        self.over: str | None = None
        self.passed = Passed(at=time.monotonic())
        self.published: Mapping[str, Any] = {}
        self.about: Mapping[str, Any] = {}
        self.ahead: Decision | None = None
        self._base = base
        self._rank = base.rank
        self._pace = pace
        self._chair = chair
        self._stats = stats
        self._patience = patience
        self._asks: deque[Ask] = deque()
        self._outcomes: deque[tuple[tuple[int, int], str, Mapping[str, Any]]] = deque()
        self._closing_at: float | None = None
        self._board: Board | None = None
        self._rounds: Rounds | None = None
        self._nonce: str | None = None
        self._beats, self._beat_due = 0, 0.0
        self._measured: Mapping[str, Any] = {}
        self._retry = _RETRY_FIRST
        self._missed_at: int | None = None
        self._beat_of_0: tuple[int, float] = (-1, time.monotonic())
        self._beat_of_0_due = 0.0
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainmedic-courier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- called by the training thread --------------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    def ask(self, attempt: Callable[[float, float], Any], limit: float) -> Any:
        """What `attempt` returns at last, called with the time of asking and the present. Raises Lost."""
        ask = Ask(attempt)
        self._asks.append(ask)
        self._wake.set()
        try:
            if self.over is None and not ask.done.wait(limit + GRACE):
                self.lose(f"the store that the ranks share has not answered for {GRACE:g} s")
        except BaseException:
            # The caller leaves a round that the others count on; how that ends is not known here.
            self.lose("the training loop was interrupted while the ranks agreed on a command")
            raise
        if ask.result is None:
            raise Lost(self.over or "sharing has ended")
        return ask.result

    def hand_over(self, turn: tuple[int, int], status: str, output: Mapping[str, Any]) -> None:
        """This rank's outcome of a command."""
        self._outcomes.append((turn, status, output))
        self._wake.set()

    def lose(self, reason: str, level: int = logging.WARNING) -> None:
        """From now on this rank carries out nothing; whoever waits goes on."""
        if self.over is None:
            self.over = reason
            log.log(level, "rank %d carries out no commands any more: %s", self._rank, reason)
        while self._asks:
            self._asks.popleft().done.set()
        self._wake.set()

    def close(self, timeout: float) -> None:
        """Hand over what there is to say, say goodbye, end. Gives up after `timeout` seconds."""
        self._closing_at = time.monotonic() + timeout
        self._wake.set()
        self._thread.join(timeout + 0.5)
        self.lose("the job has ended", logging.DEBUG)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        delay = 0.0
        while self.over is None:
            self._wake.wait(delay)
            self._wake.clear()
            try:
                delay = self._turn(time.monotonic())
                if self._closing_at is not None:
                    delay = min(delay, 0.005)
                    if self._has_said_goodbye(time.monotonic()):
                        return
            except Lost as error:
                self.lose(str(error))
            except Exception as error:  # of the store's library, or what another rank has written
                level = logging.WARNING if self._closing_at is None else logging.DEBUG
                self.lose(f"the store that the ranks share is gone ({type(error).__name__}: {_line(error)})", level)
        if self._chair is not None and self._closing_at is None:
            self._chair.abandon(f"the ranks do not agree on commands any more: {self.over}")

    def _turn(self, now: float) -> float:
        """Do what is due; seconds until something is due again."""
        board = self._board or self._join()
        delay = self._answer_asks(now)
        if board is None:
            return min(delay, 0.02)
        delay = min(delay, self._beat(board, now))
        if self._board is None:
            return 0.0
        self._hand_over(board)
        if self._chair is not None:
            delay = min(delay, self._chair.turn(now, self.passed.number, self.about, self._measured))
        return min(delay, self._look_ahead(board, now))

    def _join(self) -> Board | None:
        """Find the prefix under which rank 0 of this very start of the job writes.

        The store may hold what an earlier start has left, and torchrun's count of restarts is not the
        same on all nodes. So each rank shows a number that it has drawn, and rank 0 answers that.
        """
        if self._chair is not None:
            self._board = self._chair.open()
        else:
            if self._nonce is None:
                self._nonce = envelope.new_id()
                self._base.put(f"hello/{self._rank}", self._nonce)
            token = self._base.peek(f"welcome/{self._nonce}")
            if token is not None and token == self._base.peek("current"):
                self._board = self._base.under(str(token))
        if self._board is not None:
            self._rounds = Rounds(self._board, self._chair or self)
        return self._board

    def _answer_asks(self, now: float) -> float:
        delay = _BEAT
        for _ in range(len(self._asks)):
            ask = self._asks[0]
            ask.result = ask.attempt(ask.since, now)
            if ask.result is not None:
                ask.done.set()
                self._asks.popleft()
                continue
            self._asks.rotate(-1)
            delay = min(delay, ask.delay)
            ask.delay = min(ask.delay * 1.5, min(0.02 + self._base.world_size * 0.0005, _RETRY_LAST))
        return delay

    def _hand_over(self, board: Board) -> None:
        while self._outcomes:
            turn, status, output = self._outcomes.popleft()
            if self._chair is not None:
                self._chair.note(turn, status, output)
            else:
                board.sign(f"o/{turn[0]}/{turn[1]}", [status, output])

    def _beat(self, board: Board, now: float) -> float:
        """Show the others that this rank lives, where it is, and its figures."""
        if now < self._beat_due:
            return self._beat_due - now
        if not self._is_current(board):
            return 0.0
        every = _BEAT if board.world_size <= _MANY else _BEAT_OF_MANY
        self._beat_due = now + every
        self._beats += 1
        try:
            self._measured = {**self._stats(), **self.published}
        except Exception:
            if self._beats == 1:
                log.exception("the figures of rank %d cannot be measured", self._rank)
        said = {"beat": self._beats, "passed": self.passed.number, "calls": self.passed.calls}
        board.put(f"p/{self._rank}", {**said, "about": dict(self.about), "stats": dict(self._measured)})
        return every

    def _is_current(self, board: Board) -> bool:
        """Whether no later start of the job has taken over. Before its first look a rank follows that one."""
        if board.token == self._base.peek("current"):
            return True
        if self.passed.number >= 0 or self._chair is not None:
            raise Lost("another start of this job has taken over")
        self._board, self._rounds, self._nonce, self.ahead = None, None, None, None
        return False

    def _has_said_goodbye(self, now: float) -> bool:
        """Whether all is said and heard that is to be at the end, or there is no more time for it."""
        board = self._board
        if board is None or self._closing_at is None or now > self._closing_at:
            return True
        if self._chair is not None:
            return self._chair.say_goodbye(self.passed.number + 1)
        board.sign("bye", 1)
        return True

    # --- decisions ----------------------------------------------------------------------------------------

    def find(self, number: int, since: float, now: float) -> Decision | None:
        """An attempt at the decision that the training thread waits for."""
        board = self._board
        if board is None:
            if now - since > JOIN_PATIENCE:
                raise Lost(f"rank 0 has not answered for {JOIN_PATIENCE:g} s: has it called share()?")
            return None
        if self._chair is not None:
            self.ahead = self._decide(board, number)
            return self.ahead
        found = self._read(board, number)
        if found is None and (now - since >= self._patience or self._is_known_to_be_late(board)):
            found = self._decide_nothing(board, number)
        self.ahead = found
        return found

    def meet(self, decision: Decision, mine: Any, patience: float, since: float, now: float) -> Verdict | None:
        """An attempt at the verdict, after this rank has come to a look with commands."""
        if self._chair is None:
            found = self.hold(Round(f"c/{decision.number}", _by_rank_0, None, patience), mine, since, now)
            return None if found is None else Verdict.read(found)
        conclude = partial(self._chair.judge, decision)
        found = self.hold(Round(f"c/{decision.number}", conclude, None, patience), mine, since, now)
        if found is None:
            return None
        verdict = Verdict.read(found)
        self._chair.called(decision, verdict)
        return verdict

    def hold(self, one: Round, mine: Any, since: float, now: float) -> Any:
        """An attempt at the conclusion of a round."""
        if self._rounds is None:
            return None
        found = self._rounds.attempt(one, mine, since, now)
        if found is not None and self._chair is not None:
            self._chair.litter_list(self.passed.number + 2, one.key)
        return found

    def is_silent(self, rank: int, now: float) -> bool:
        """Of rank 0, on the others: whether it has not shown itself for long."""
        if now >= self._beat_of_0_due and self._board is not None:
            self._beat_of_0_due = now + _BEAT
            said = self._board.peek("p/0")
            beat = said["beat"] if said is not None else -1
            if beat != self._beat_of_0[0]:
                self._beat_of_0 = (beat, now)
        return now - self._beat_of_0[1] > SILENT_AFTER + _BEAT_OF_MANY

    def _look_ahead(self, board: Board, now: float) -> float:
        """Find the next decision before the training thread asks for it; on rank 0, make it."""
        passed = self.passed
        number = passed.number + 1
        if self.ahead is not None and self.ahead.number >= number:
            return _BEAT
        early = AHEAD if self._chair is not None else AHEAD / 2
        due = passed.at + self._pace.seconds(passed.span) - early
        if now < due:
            return due - now
        self.ahead = self._decide(board, number) if self._chair is not None else self._read(board, number)
        if self.ahead is not None:
            self._retry = _RETRY_FIRST
            return _BEAT
        self._retry = min(self._retry * 1.5, _RETRY_LAST)
        return self._retry

    def _decide(self, board: Board, number: int) -> Decision:
        assert self._chair is not None
        commands = self._chair.call_up()
        mine = Decision(number, 0, self._pace.next_span(), tuple(command.sent for command in commands))
        found = Decision.read(number, board.settle(f"d/{number}", mine.fields()))
        if found.by == 0:
            self._chair.put_up(commands)
        self._chair.litter(number, f"d/{number}")
        return found

    def _read(self, board: Board, number: int) -> Decision | None:
        fields = board.peek(f"d/{number}")
        if fields is None:
            return None
        found = Decision.read(number, fields)
        if found.by == 0:
            self._missed_at = None
        else:
            self._refuse_what_was_swept(board, number)
        return found

    def _decide_nothing(self, board: Board, number: int) -> Decision:
        """Rank 0 has not decided in time: whoever comes first does. In more and more calls, so that a
        store that nobody sweeps does not fill up."""
        span = min(self.passed.span * 2, self._pace.next_span() * _WIDEST)
        mine = Decision(number, self._rank, max(span, 1))
        found = Decision.read(number, board.settle(f"d/{number}", mine.fields()))
        self._refuse_what_was_swept(board, number)
        if found.by != 0:
            if self._missed_at is None:
                log.warning("rank 0 did not decide on commands for %g s; going on without", self._patience)
            self._missed_at = self._looks_of_rank_0(board)
        return found

    def _is_known_to_be_late(self, board: Board) -> bool:
        """Whether a decision was missed, and rank 0 has not moved since: then nobody waits again."""
        return self._missed_at is not None and self._looks_of_rank_0(board) <= self._missed_at

    def _looks_of_rank_0(self, board: Board) -> int:
        said = board.peek("p/0")
        return int(said["passed"]) if said is not None else -1

    def _refuse_what_was_swept(self, board: Board, number: int) -> None:
        """A decision that rank 0 has swept away may have been written again by one who came too late."""
        floor = board.peek("floor")
        if floor is not None and number < floor:
            raise Lost("this rank is too far behind the others")


def _by_rank_0(heard: dict[int, Any], missing: list[int]) -> Any:
    raise AssertionError("rank 0 draws the conclusion")


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
