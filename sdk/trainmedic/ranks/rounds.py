"""Rounds: every rank enters a value, rank 0 combines them, and all read the result.

Missing ranks are gone, have finished the command, or are too late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, TypeVar

from trainmedic.errors import NotAgreed, Refusal, Rejected, Unsupported, described
from trainmedic.job.group import PATIENCE
from trainmedic.ranks.shared_store import SharedStore

Value = TypeVar("Value")

SILENT_AFTER = 30.0  # seconds without a heartbeat
GONE = "gone"  # member of a result that states why there is none
RESULT_GRACE = 15.0  # seconds after `Round.patience` for rank 0's result
_READ_INTERVAL = 1.0  # seconds between two reads of all entries


@dataclass(frozen=True)
class Round:
    key: str
    # Makes the result on rank 0, from values by rank and the missing ranks. None: rank 0's value is the result.
    combine: Callable[[dict[int, Any], list[int]], Any] | None
    outcomes_key: str | None = None  # of the command; a rank with an outcome enters no more values
    patience: float = PATIENCE  # seconds for all ranks


class Rounds:
    def __init__(self, store: SharedStore, is_silent: Callable[[int, float], bool]) -> None:
        self._store = store
        self._is_silent = is_silent
        self._entered: str | None = None  # key of the last round with this rank's value
        self._entries_read_at = 0.0

    def attempt(self, round_: Round, value: Any, since: float, now: float) -> Any:
        """Return the result, or None so far. The caller has waited since ``since``."""
        store, end = self._store, f"{round_.key}/end"
        if round_.combine is not None and self._entered != round_.key:
            store.add_entry(round_.key, value)
            self._entered = round_.key
        result = store.get(end)
        if result is not None:
            return result
        if store.rank != 0:
            if now - since < round_.patience + RESULT_GRACE and not self._is_silent(0, now):
                return None
            return store.set_if_absent(end, {GONE: "rank 0 did not answer"})
        if round_.combine is None:
            return store.set_if_absent(end, value)
        values = self._values_by_rank(round_, now - since, now)
        if values is None:
            return None
        missing = [rank for rank in range(store.world_size) if rank not in values]
        return store.set_if_absent(end, round_.combine(values, missing))

    def _values_by_rank(self, round_: Round, waited: float, now: float) -> dict[int, Any] | None:
        """Return values by rank; None until every rank has entered one, or the patience is over."""
        store = self._store
        is_complete = store.count_entries(round_.key) >= store.world_size
        # Reading all entries costs a call per rank, so limit it while one is missing.
        if not is_complete and waited < round_.patience and now - self._entries_read_at < _READ_INTERVAL:
            return None
        self._entries_read_at = now
        values = store.entries(round_.key, range(store.world_size))
        if is_complete or waited >= round_.patience:
            return values
        awaited = [rank for rank in range(store.world_size) if rank not in values]
        return values if all(self._will_not_come(round_, rank, now) for rank in awaited) else None

    def _will_not_come(self, round_: Round, rank: int, now: float) -> bool:
        if self._is_silent(rank, now):
            return True
        return round_.outcomes_key is not None and self._store.get(f"{round_.outcomes_key}/{rank}") is not None


class RankGroup:
    def __init__(
        self, store: SharedStore, key: str, outcomes_key: str | None, run_round: Callable[[Round, Any], Any]
    ) -> None:
        self.rank = store.rank
        self.world_size = store.world_size
        self._key = key
        self._outcomes_key = outcomes_key
        self._run_round = run_round
        self._count = 0

    def choose(self, make: Callable[[], Value], patience: float = PATIENCE) -> Value:
        choice: Mapping[str, Any] = {}
        fault: Exception | None = None
        if self.rank == 0:
            try:
                choice = {"value": make()}
            except Refusal as refusal:
                choice = {"unsupported" if isinstance(refusal, Unsupported) else "rejected": str(refusal)}
            # Catch everything: other ranks wait for this choice. It is raised again below.
            except Exception as error:
                fault = error
                choice = {GONE: f"rank 0 could not choose: {described(error)}"}
        result = self._run_round(Round(self._next_key(), None, self._outcomes_key, patience), choice)
        if fault is not None:
            raise fault
        if "rejected" in result:
            raise Rejected(str(result["rejected"]))
        if "unsupported" in result:
            raise Unsupported(str(result["unsupported"]))
        _raise_if_gone(result)
        value: Value = result["value"]
        return value

    def poll(self, value: Any = None, patience: float = PATIENCE) -> Mapping[int, Any]:
        result = self._run_round(Round(self._next_key(), _all_values, self._outcomes_key, patience), {"value": value})
        _raise_if_gone(result)
        return {int(rank): entry["value"] for rank, entry in result["values"].items()}

    def _next_key(self) -> str:
        self._count += 1
        return f"{self._key}/{self._count}"


def _raise_if_gone(result: Mapping[str, Any]) -> None:
    if GONE in result:
        raise NotAgreed(str(result[GONE]))


def _all_values(values: dict[int, Any], missing: list[int]) -> Any:
    return {"values": {str(rank): entry for rank, entry in values.items()}}
