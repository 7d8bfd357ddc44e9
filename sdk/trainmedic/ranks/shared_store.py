"""What the ranks of a job write for each other: keys in the store that they share.

The store is that of PyTorch's process group, or anything with the same four calls. Each call is answered at once:
nothing here waits for a key, because such a wait could neither be cut short nor share its connection. Values are
JSON.

Who calls it: a rank's background thread alone (``synchronizer``). A store that has gone raises whatever its library
raises; the thread's loop deals with that.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any, Iterable, Mapping, Protocol

_NOTHING = "?"
"""No value is this text, as it is not JSON. Expecting it and setting it leaves a key as it is and returns its value."""
_DELETED_AT_ONCE = 200
_MOST_EXPIRED = 20_000


class KeyValueStore(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str, /) -> None: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...


class SharedStore:
    """The keys of one group of ranks, under one prefix."""

    def __init__(self, store: KeyValueStore, prefix: str, rank: int, world_size: int) -> None:
        self._store = store
        self._prefix = prefix
        self.token = prefix.rstrip("/")
        self.rank = rank
        self.world_size = world_size

    def under(self, prefix: str) -> SharedStore:
        """The same store with a longer prefix."""
        return SharedStore(self._store, f"{self._prefix}{prefix}/", self.rank, self.world_size)

    def get(self, key: str) -> Any:
        """The value of a key, or None."""
        raw = self._store.compare_set(self._prefix + key, _NOTHING, _NOTHING)
        return None if raw == _NOTHING.encode() else json.loads(raw)

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._prefix + key, json.dumps(value))

    def set_if_absent(self, key: str, value: Any) -> Any:
        """Write `value` unless the key has one; return the value that it has now, the same on every rank."""
        return json.loads(self._store.compare_set(self._prefix + key, "", json.dumps(value)))

    def delete(self, key: str) -> None:
        self._store.delete_key(self._prefix + key)

    # --- keys with an entry of each rank ------------------------------------------------------------------

    def add_entry(self, key: str, value: Any) -> None:
        """Write this rank's entry, once. It is written before it is counted, so that a counted entry can be read."""
        self.set(f"{key}/{self.rank}", value)
        self._store.add(f"{self._prefix}{key}/count", 1)

    def count_entries(self, key: str) -> int:
        return self._store.add(f"{self._prefix}{key}/count", 0)

    def entries(self, key: str, ranks: Iterable[int]) -> dict[int, Any]:
        """The entries of those of `ranks` that have written one."""
        values = {rank: self.get(f"{key}/{rank}") for rank in ranks}
        return {rank: value for rank, value in values.items() if value is not None}

    def entry_keys(self, key: str) -> list[str]:
        """All keys that entries consist of, to `delete`."""
        return [f"{key}/count", *(f"{key}/{rank}" for rank in range(self.world_size))]


class ExpiredKeys:
    """Keys that are not read any more once every rank has passed a certain sync point. Rank 0 deletes them.

    If a rank never gets there and the keys become too many, the older half is deleted all the same. The key
    ``deleted_before`` then says which ones, so that a rank that arrives later sees that it is too late.
    """

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._keys: deque[tuple[int, str]] = deque()
        self._deleted_before = 0

    def add(self, number: int, *keys: str) -> None:
        """Delete `keys` later: no rank that has passed sync point `number` reads them any more."""
        self._keys.extend((number, key) for key in keys)

    def add_entries(self, number: int, key: str) -> None:
        """The same for the entries under `key`, and for the result of a round with that key."""
        self.add(number, f"{key}/end", *self._store.entry_keys(key))

    def delete_due(self, passed_by_all: int) -> None:
        """Delete a few hundred of the keys that every rank has passed: all of them at once would take too long."""
        if len(self._keys) > _MOST_EXPIRED:
            self._deleted_before = max(self._keys[len(self._keys) // 2][0], self._deleted_before)
            self._store.set("deleted_before", self._deleted_before)
        for _ in range(min(_DELETED_AT_ONCE, len(self._keys))):
            number, key = self._keys[0]
            if number >= max(passed_by_all, self._deleted_before):
                return
            self._keys.popleft()
            self._store.delete(key)


def whole_number(fields: Mapping[str, Any], name: str) -> int:
    """A number that another rank has written. Raises ValueError."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, and should be a number")
    return value
