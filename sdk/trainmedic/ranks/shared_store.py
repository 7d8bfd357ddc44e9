"""What the ranks of a job write for each other: keys in the store that they share.

The store is that of PyTorch's process group, or anything with the same four calls. Each of them is
answered at once: nothing here waits for a key, because such a wait could neither be cut short nor
share its connection. Values are JSON.

Who calls it: ``courier`` and ``chair``, in their background thread only. A store that has gone raises
whatever its library raises; the thread's loop deals with that.
"""

from __future__ import annotations

import json
from typing import Any, Iterable, Mapping, Protocol

_NOTHING = "?"
"""No value is this text: expecting it and setting it leaves a key as it is, and tells what it holds."""


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str, /) -> None: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...


class Board:
    """The keys of one group of ranks."""

    def __init__(self, store: Store, prefix: str, rank: int, world_size: int) -> None:
        self._store = store
        self._prefix = prefix
        self.token = prefix.rstrip("/")
        self.rank = rank
        self.world_size = world_size

    def under(self, prefix: str) -> Board:
        """The same store, deeper down."""
        return Board(self._store, f"{self._prefix}{prefix}/", self.rank, self.world_size)

    def peek(self, key: str) -> Any:
        """What is written there, or None."""
        raw = self._store.compare_set(self._prefix + key, _NOTHING, _NOTHING)
        return None if raw == _NOTHING.encode() else json.loads(raw)

    def put(self, key: str, value: Any) -> None:
        self._store.set(self._prefix + key, json.dumps(value))

    def settle(self, key: str, value: Any) -> Any:
        """Write `value` unless something is there; what is there now, the same for everybody for ever."""
        return json.loads(self._store.compare_set(self._prefix + key, "", json.dumps(value)))

    def remove(self, key: str) -> None:
        self._store.delete_key(self._prefix + key)

    # --- lists that every rank enters itself on -----------------------------------------------------------

    def sign(self, key: str, value: Any) -> None:
        """Enter this rank, with something to say; once."""
        self.put(f"{key}/{self.rank}", value)
        self._store.add(f"{self._prefix}{key}/signed", 1)

    def signed(self, key: str) -> int:
        """How many ranks have entered themselves."""
        return self._store.add(f"{self._prefix}{key}/signed", 0)

    def signatures(self, key: str, ranks: Iterable[int]) -> dict[int, Any]:
        """What those of `ranks` that are on the list have said."""
        found = {rank: self.peek(f"{key}/{rank}") for rank in ranks}
        return {rank: value for rank, value in found.items() if value is not None}

    def list_keys(self, key: str) -> list[str]:
        """The keys that such a list consists of, to `remove`."""
        return [f"{key}/signed", *(f"{key}/{rank}" for rank in range(self.world_size))]


def whole_number(fields: Mapping[str, Any], name: str) -> int:
    """The number that another rank has written. Raises ValueError."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, and should be a number")
    return value
