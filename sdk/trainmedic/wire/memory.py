"""What became of which command, so that each is applied at most once.

Commands arrive at least once: again after a lost connection, again after the job was killed, again
because the server asks once more. The memory is in this process, and in one expiring Redis key per
command, which outlives it. A command is entered before the training loop sees it; one that is found
entered by a process that is no more was interrupted, and is never applied again.

Not here: deciding what to answer (``reader``). A command that expired before it was applied is
forgotten, so that the same one may still come in time later.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Mapping

import redis

from trainmedic.wire import envelope

SECONDS = 30 * 24 * 3600
"""How long Redis remembers. An undo can come as late as its alert resolves, which can take days."""
_KEPT_HERE = 10_000
_KEPT_BYTES = 2048
"""What is remembered of a larger outcome in this process is its status; the whole is in Redis."""
_LARGEST_IN_REDIS = 1024 * 1024
INTERRUPTED = "interrupted: the job's process ended while it had the command"
_TAKEN_BACK = "it was taken back before it was applied"


Outcome = tuple[str, Mapping[str, Any]]
"""Status and output of one rank."""


@dataclass(frozen=True)
class Known:
    """A command that was seen before: where it stands, and since which process.

    ``ranks`` has the outcomes of ranks that differ from ``status`` and ``output``. ``is_cut`` says
    that outputs were left out.
    """

    owner: str
    status: str
    output: Mapping[str, Any] = field(default_factory=dict)
    ranks: Mapping[int, Outcome] = field(default_factory=dict)
    is_cut: bool = False

    @property
    def is_final(self) -> bool:
        return self.status in envelope.FINAL

    def of_rank(self, rank: int) -> Outcome:
        return self.ranks.get(rank, (self.status, self.output))

    def cut(self) -> Known:
        """The same without outputs."""
        ranks: dict[int, Outcome] = {
            rank: (status, {}) for rank, (status, _) in self.ranks.items() if status != self.status
        }
        return Known(self.owner, self.status, {}, ranks, is_cut=True)

    def encode(self) -> bytes:
        fields: dict[str, Any] = {"by": self.owner, "status": self.status, "output": dict(self.output)}
        if self.ranks:
            fields["ranks"] = {str(rank): [status, dict(output)] for rank, (status, output) in self.ranks.items()}
        raw = json.dumps(fields).encode()
        return raw if len(raw) <= _LARGEST_IN_REDIS or self.is_cut else self.cut().encode()

    @classmethod
    def decode(cls, raw: bytes) -> Known:
        """What cannot be read counts as taken by a stranger: better not applied than applied twice."""
        try:
            fields = json.loads(raw)
            status, output = fields["status"], fields["output"]
            told = fields.get("ranks", {})
            ranks: dict[int, Outcome] = {int(rank): (one, dict(said)) for rank, (one, said) in told.items()}
            statuses = {status, *(one for one, _ in ranks.values())}
            if statuses <= envelope.STATUSES and isinstance(output, dict):
                return cls(str(fields["by"]), status, output, ranks)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        return cls("", envelope.ACCEPTED)


class Memory:
    """Keeps the commands of one receiver. Redis is only touched by the background threads."""

    def __init__(self, receiver: str, owner: str) -> None:
        self._prefix = f"trainmedic:memory:{receiver}:"
        self.owner = owner
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Known] = OrderedDict()
        # Held over a round trip to Redis, so never taken by the training thread.
        self._marking = threading.Lock()

    def key(self, command_id: str) -> str:
        return self._prefix + command_id

    def here(self, command_id: str) -> Known | None:
        """What this process knows of a command."""
        with self._lock:
            return self._known.get(command_id)

    def look_up(self, client: redis.Redis, command_id: str) -> Known | None:
        """What is known of a command. Raises redis-py's errors."""
        here = self.here(command_id)
        if here is not None and not here.is_cut:
            return here
        raw: Any = client.get(self.key(command_id))
        known = None if raw is None else Known.decode(raw)
        if here is not None:
            return known if known is not None and known.is_final else here
        if known is not None and known.is_final:
            self.note(command_id, known)
        elif known is not None and known.owner == self.owner:
            return None  # our own mark without a memory of it: it expired here, and the mark is about to go
        return known

    def claim(self, client: redis.Redis, command_id: str) -> Known | None:
        """Enter a command as ours to apply; None where that succeeded, else what it already is."""
        mine = Known(self.owner, envelope.ACCEPTED)
        with self._marking:
            if not client.set(self.key(command_id), mine.encode(), nx=True, ex=SECONDS):
                known = self.look_up(client, command_id)
                if known is not None:
                    return known
                client.set(self.key(command_id), mine.encode(), ex=SECONDS)
            self.note(command_id, mine)
        return None

    def revoke(self, client: redis.Redis, command_id: str) -> None:
        """An undo came for a command that was never applied: from now on it never will be."""
        known = Known(self.owner, envelope.REJECTED, {"reason": _TAKEN_BACK})
        if client.set(self.key(command_id), known.encode(), nx=True, ex=SECONDS):
            self.note(command_id, known)

    def note(self, command_id: str, known: Known) -> None:
        """Remember in this process; the writer takes a final one to Redis with its reply."""
        kept = known if len(known.encode()) <= _KEPT_BYTES else known.cut()
        with self._lock:
            self._known[command_id] = kept
            self._known.move_to_end(command_id)
            if len(self._known) > _KEPT_HERE:
                self._known.popitem(last=False)

    def forget(self, command_id: str) -> None:
        """It expired unapplied. The mark in Redis is taken away by `unmark`."""
        with self._lock:
            self._known.pop(command_id, None)

    def unmark(self, client: redis.Redis, command_id: str) -> None:
        """Take the mark away, unless the same command has been entered again in between."""
        with self._marking:
            if self.here(command_id) is None:
                client.delete(self.key(command_id))
