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

from trainmedic import envelope

SECONDS = 30 * 24 * 3600
"""How long Redis remembers. An undo can come as late as its alert resolves, which can take days."""
_KEPT_HERE = 10_000
INTERRUPTED = "interrupted: the job's process ended while it had the command"
_TAKEN_BACK = "it was taken back before it was applied"


@dataclass(frozen=True)
class Known:
    """A command that was seen before: where it stands, and since which process."""

    owner: str
    status: str
    output: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        return self.status in envelope.FINAL

    def encode(self) -> bytes:
        return json.dumps({"by": self.owner, "status": self.status, "output": dict(self.output)}).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Known:
        """What cannot be read counts as taken by a stranger: better not applied than applied twice."""
        try:
            fields = json.loads(raw)
            status, output = fields["status"], fields["output"]
            if status in envelope.STATUSES and isinstance(output, dict):
                return cls(str(fields["by"]), status, output)
        except (ValueError, KeyError, TypeError, RecursionError):
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
        known = self.here(command_id)
        if known is not None:
            return known
        raw: Any = client.get(self.key(command_id))
        known = None if raw is None else Known.decode(raw)
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
        with self._lock:
            self._known[command_id] = known
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
