"""JSON values in the ranks' store.

Calls return at once, because a blocking wait would occupy the connection.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any, Callable, Iterable, Mapping, Protocol, TypeVar

from trainmedic.errors import described
from trainmedic.ranks.rank_state import RankLost

Result = TypeVar("Result")

_NO_VALUE = "?"  # not JSON, so never stored: a `compare_set` from and to it only reads
_DELETED_AT_ONCE = 200  # keys in a call
_MOST_EXPIRED = 20_000  # keys


class KeyValueStore(Protocol):
    """Methods of ``torch.distributed.Store`` in use. ``compare_set`` from "" sets an absent key."""

    def set(self, key: str, value: str, /) -> None: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...


class SharedStore:
    """Methods raise RankLost if the store fails, and ValueError for another rank's unreadable value."""

    def __init__(self, store: KeyValueStore, prefix: str, rank: int, world_size: int) -> None:
        self._store = store
        self._prefix = prefix
        self.token = prefix.rstrip("/")  # names this start of the job
        self.rank = rank
        self.world_size = world_size

    def under(self, prefix: str) -> SharedStore:
        return SharedStore(self._store, f"{self._prefix}{prefix}/", self.rank, self.world_size)

    def get(self, key: str) -> Any:
        raw = _asked(lambda: self._store.compare_set(self._prefix + key, _NO_VALUE, _NO_VALUE))
        return None if raw == _NO_VALUE.encode() else json.loads(raw)

    def set(self, key: str, value: Any) -> None:
        text = json.dumps(value)
        _asked(lambda: self._store.set(self._prefix + key, text))

    def set_if_absent(self, key: str, value: Any) -> Any:
        """Return the value, perhaps another rank's."""
        text = json.dumps(value)
        return json.loads(_asked(lambda: self._store.compare_set(self._prefix + key, "", text)))

    def delete(self, key: str) -> None:
        _asked(lambda: self._store.delete_key(self._prefix + key))

    def add_entry(self, key: str, value: Any) -> None:
        """Write this rank's entry once, before counting it."""
        self.set(f"{key}/{self.rank}", value)
        _asked(lambda: self._store.add(f"{self._prefix}{key}/count", 1))

    def count_entries(self, key: str) -> int:
        return _asked(lambda: self._store.add(f"{self._prefix}{key}/count", 0))

    def entries(self, key: str, ranks: Iterable[int]) -> dict[int, Any]:
        values = {rank: self.get(f"{key}/{rank}") for rank in ranks}
        return {rank: value for rank, value in values.items() if value is not None}

    def entry_keys(self, key: str) -> list[str]:
        return [f"{key}/count", *(f"{key}/{rank}" for rank in range(self.world_size))]


class ExpiredKeys:
    """Keys that rank 0 deletes once every rank has passed their sync point.

    Of more than `_MOST_EXPIRED`, the older half is deleted sooner; slow ranks read ``deleted_before`` and leave.
    """

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._keys: deque[tuple[int, str]] = deque()
        self._deleted_before = 0

    def add(self, number: int, *keys: str) -> None:
        self._keys.extend((number, key) for key in keys)

    def add_entries(self, number: int, key: str) -> None:
        self.add(number, f"{key}/end", *self._store.entry_keys(key))

    def delete_due(self, passed_by_all: int) -> None:
        if len(self._keys) > _MOST_EXPIRED:
            self._deleted_before = max(self._keys[len(self._keys) // 2][0], self._deleted_before)
            self._store.set("deleted_before", self._deleted_before)
        for _ in range(min(_DELETED_AT_ONCE, len(self._keys))):
            number, key = self._keys[0]
            if number >= max(passed_by_all, self._deleted_before):
                return
            self._keys.popleft()
            self._store.delete(key)


def _asked(call: Callable[[], Result]) -> Result:
    try:
        return call()
    except Exception as error:  # the store may be of any library
        reason = described(error).splitlines()[0][:200]
        raise RankLost(f"the store that the ranks share is gone ({reason})") from error


def whole_number(fields: Mapping[str, Any], name: str) -> int:
    """Return a member. Raises ValueError."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, and should be a number")
    return value
