"""Replies to commands: composed for every rank that owes one, and handed to the writer.

A job of several ranks owes the server a reply of each. Where the ranks never came to a command (it
was refused, or had expired), rank 0 says the same for all of them.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any, Callable, Iterable, Mapping, Sequence

from trainmedic import envelope
from trainmedic.memory import Known, Outcome
from trainmedic.writer import LARGEST_REPLY, Outgoing, too_large

_LARGEST_OUTPUT = LARGEST_REPLY - 1024


class Answers:
    """Made by rank 0; its methods may be called from any thread and wait for nothing."""

    def __init__(self, job: str, host: str, owner: str, put: Callable[[Outgoing], object]) -> None:
        self._job = job
        self._owner = owner
        self._put = put
        self.ranks: Sequence[int] = (0,)
        self.hosts: Mapping[int, str] = {0: host}

    def known(self, status: str, output: Mapping[str, Any]) -> Known:
        """An outcome that is the same on all ranks."""
        return Known(self._owner, status, output)

    def accept(self, command_id: str) -> None:
        """The job has the command. Said by rank 0 alone."""
        self._put(Outgoing((self._reply(command_id, 0, (envelope.ACCEPTED, {})),)))

    def give(
        self, command_id: str, known: Known, entry: bytes | None, remember: bool = False, forget: bool = False
    ) -> None:
        """The final reply of every rank; then the entry is off the stream."""
        ranks = sorted({*self.ranks, *known.ranks})
        replies = tuple(self._reply(command_id, rank, known.of_rank(rank)) for rank in ranks)
        self._put(Outgoing(replies, entry, known if remember else None, forget))

    def tell(self, command_id: str, outcomes: Mapping[int, Outcome]) -> None:
        """What some ranks have said by now. The command stays on the stream."""
        replies = tuple(self._reply(command_id, rank, outcome) for rank, outcome in sorted(outcomes.items()))
        if replies:
            self._put(Outgoing(replies))

    def conclude(self, command_id: str, known: Known, entry: bytes | None, untold: Iterable[int]) -> None:
        """Every rank has answered; the replies of those that were not told yet go out with it."""
        replies = tuple(self._reply(command_id, rank, known.of_rank(rank)) for rank in sorted(untold))
        self._put(Outgoing(replies or (self._reply(command_id, 0, known.of_rank(0)),), entry, known))

    def _reply(self, command_id: str, rank: int, outcome: Outcome) -> envelope.Reply:
        status, output = outcome
        sender = f"{self._job}/{rank}"
        if rank in self.hosts:
            sender += f"@{self.hosts[rank]}"
        return envelope.Reply(command_id, sender, status, rank, output, datetime.now(timezone.utc))


def fitting(output: Mapping[str, Any]) -> Mapping[str, Any]:
    """`output`, or a note in its place where it is too large to be kept."""
    size = len(json.dumps(output))
    return output if size <= _LARGEST_OUTPUT else too_large(size)
