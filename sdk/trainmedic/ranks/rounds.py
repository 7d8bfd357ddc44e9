"""Rounds: every rank says something, rank 0 draws the conclusion, every rank reads the same one.

A round waits for ranks that live. One that is gone, or has left the command that the round is part of,
or does not come in time, is missing from it; where rank 0 is gone, the others close the round without a
conclusion. `Fellows` are the ranks that carry out a command together, as its handler sees them.

Who calls it: ``courier`` in the background thread (`Rounds`), handlers in the training thread (`Fellows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Protocol, TypeVar

from trainmedic.errors import NotAgreed, Refusal, Rejected, Unsupported
from trainmedic.job.group import PATIENCE
from trainmedic.ranks.shared_store import Board

Value = TypeVar("Value")

SILENT_AFTER = 30.0
"""Seconds without a sign of life after which a rank counts as gone."""
GONE = "gone"
_GRACE = 15.0
_LOOK_EVERY = 1.0


@dataclass(frozen=True)
class Round:
    """``key`` is its place on the board. ``conclude`` gets what each rank has said and who is missing, on
    rank 0; without it rank 0 alone speaks, and what it says is the conclusion. ``left`` is a list on which
    those enter themselves who will not come any more."""

    key: str
    conclude: Callable[[dict[int, Any], list[int]], Any] | None
    left: str | None = None
    patience: float = PATIENCE


class Signs(Protocol):
    """Who lives."""

    def is_silent(self, rank: int, now: float) -> bool: ...


class Rounds:
    """This rank's part in the rounds, one after the other."""

    def __init__(self, board: Board, signs: Signs) -> None:
        self._board = board
        self._signs = signs
        self._signed: str | None = None
        self._looked = 0.0

    def attempt(self, one: Round, mine: Any, since: float, now: float) -> Any:
        """The conclusion, or None while there is none. `since` is when this rank came."""
        board = self._board
        if one.conclude is not None and self._signed != one.key:
            board.sign(one.key, mine)
            self._signed = one.key
        found = board.peek(f"{one.key}/end")
        if found is not None:
            return found
        if board.rank != 0:
            if now - since < one.patience + _GRACE and not self._signs.is_silent(0, now):
                return None
            return board.settle(f"{one.key}/end", {GONE: "rank 0 did not answer"})
        if one.conclude is None:
            return board.settle(f"{one.key}/end", mine)
        heard = self._heard(one, now - since, now)
        if heard is None:
            return None
        missing = [rank for rank in range(board.world_size) if rank not in heard]
        return board.settle(f"{one.key}/end", one.conclude(heard, missing))

    def _heard(self, one: Round, waited: float, now: float) -> dict[int, Any] | None:
        """What each has said, once there is nobody left to wait for."""
        board = self._board
        is_complete = board.signed(one.key) >= board.world_size
        if not is_complete and waited < one.patience and now - self._looked < _LOOK_EVERY:
            return None
        self._looked = now
        heard = board.signatures(one.key, range(board.world_size))
        if is_complete or waited >= one.patience:
            return heard
        awaited = [rank for rank in range(board.world_size) if rank not in heard]
        return heard if all(self._will_not_come(one, rank, now) for rank in awaited) else None

    def _will_not_come(self, one: Round, rank: int, now: float) -> bool:
        if self._signs.is_silent(rank, now):
            return True
        return one.left is not None and self._board.peek(f"{one.left}/{rank}") is not None


class Fellows:
    """See `trainmedic.job.group.Group`. ``hold`` holds a round; ``left`` as in `Round`."""

    def __init__(
        self, rank: int, world_size: int, key: str, left: str | None, hold: Callable[[Round, Any], Any]
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._key = key
        self._left = left
        self._hold = hold
        self._count = 0

    def choose(self, make: Callable[[], Value], patience: float = PATIENCE) -> Value:
        told: Mapping[str, Any] = {}
        fault: Exception | None = None
        if self.rank == 0:
            try:
                told = {"value": make()}
            except Refusal as refusal:
                told = {"unsupported" if isinstance(refusal, Unsupported) else "rejected": str(refusal)}
            except Exception as error:
                fault = error
                told = {GONE: f"rank 0 could not choose: {type(error).__name__}: {error}"}
        found = self._hold(Round(self._next_key(), None, self._left, patience), told)
        if fault is not None:
            raise fault
        if "rejected" in found:
            raise Rejected(str(found["rejected"]))
        if "unsupported" in found:
            raise Unsupported(str(found["unsupported"]))
        self._raise_if_gone(found)
        chosen: Value = found["value"]
        return chosen

    def poll(self, value: Any = None, patience: float = PATIENCE) -> Mapping[int, Any]:
        found = self._hold(Round(self._next_key(), _all_said, self._left, patience), {"value": value})
        self._raise_if_gone(found)
        return {int(rank): said["value"] for rank, said in found["said"].items()}

    def _next_key(self) -> str:
        self._count += 1
        return f"{self._key}/{self._count}"

    def _raise_if_gone(self, found: Mapping[str, Any]) -> None:
        if GONE in found:
            raise NotAgreed(str(found[GONE]))


def _all_said(heard: dict[int, Any], missing: list[int]) -> Any:
    return {"said": {str(rank): said for rank, said in heard.items()}}
