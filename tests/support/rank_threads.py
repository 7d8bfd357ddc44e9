"""Ranks of a job as threads of one process, agreeing through a store in memory; no Redis, no sockets.

Each rank is the real thing (`trainmedic.ranks.share.Share`, with a queue on rank 0); what would go to Redis is
kept in ``replies``. Who uses it: the integration tests of sharing, of
checkpoints of several ranks, and of long trainings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]

from trainmedic.job.command import JobCommand
from trainmedic.job.group import Group
from trainmedic.job.handlers import HandlerRegistry
from trainmedic.job.queue import CommandQueue
from trainmedic.ranks.share import LocalRank, Share
from trainmedic.wire import envelope
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.writer import OutgoingReplies


class RankThread:
    """One rank: its `Share`, and what it has carried out as (step, id)."""

    def __init__(self, ranks: RankThreads, rank: int, store: Any, **options: Any) -> None:
        self.job, self.rank, self.world_size = "llm-1", rank, ranks.size
        self.done: list[tuple[int, str]] = []
        self.step = 0
        self.waited = 0.0
        self.handlers = HandlerRegistry("llm-1", {}, nullcontext)
        self.handlers.handlers["job.scale_lr"] = self._note
        self.queue: CommandQueue | None = None
        if rank == 0:
            self.queue = CommandQueue("llm-1", "host", ranks.memory, self.handlers, ranks.put, self._report_outcome)
            self.queue.ranks = range(ranks.size)
        about = {"node": f"n{rank}"}
        local = LocalRank(
            "llm-1", rank, ranks.size, self.handlers, self.queue, self._report_outcome, lambda: about, dict
        )
        self.share = Share(store, local, **options)

    def _note(self, taken: JobCommand) -> Mapping[str, Any]:
        self.done.append((self.step, taken.id))
        return {"by": self.rank}

    def _report_outcome(self, taken: JobCommand, status: str, output: Mapping[str, Any]) -> None:
        self.handlers.in_progress.pop(taken.id, None)
        if taken.sync_key is not None:
            self.share.report_outcome(taken, status, output)
        elif self.queue is not None:
            self.queue.close(taken, status, output)

    def group(self, name: str) -> Group:
        return self.share.group(name)

    def call(self, step: int) -> None:
        """What `Medic.commands` does."""
        self.step = step
        began = time.monotonic()
        due = self.share.tick(step)
        self.waited += time.monotonic() - began
        self.handlers.carry_out(due)


class RankThreads:
    """``size`` ranks over one store."""

    def __init__(self, size: int, store: Any = None, stores: Mapping[int, Any] | None = None, **options: Any) -> None:
        self.size = size
        self.store = store if store is not None else HashStore()
        self.replies: list[envelope.Reply] = []
        self.memory = CommandMemory("job:llm-1", envelope.new_id())
        self.members = [RankThread(self, rank, (stores or {}).get(rank, self.store), **options) for rank in range(size)]

    def __enter__(self) -> RankThreads:
        return self

    def __exit__(self, *_: object) -> None:
        for member in reversed(self.members):  # rank 0 hears the goodbyes of the others
            member.share.close(0.5)

    def put(self, outgoing: OutgoingReplies) -> None:
        self.replies.extend(outgoing.replies)

    def send(self, sent: envelope.Command) -> envelope.Command:
        """Put a command in as the receiver does."""
        queue = self.members[0].queue
        assert queue is not None
        queue.enter(sent, b"1-0")
        return sent

    def joined(self) -> int:
        """How many other ranks rank 0 has let in."""
        coordinator = self.members[0].share._coordinator
        assert coordinator is not None
        return len(coordinator.membership.others)

    def finals(self, sent: envelope.Command) -> dict[int | None, envelope.Reply]:
        return {reply.rank: reply for reply in list(self.replies) if reply.command_id == sent.id and reply.is_final}

    def train(
        self,
        until: Callable[[], bool],
        within: float = 60.0,
        loop: Callable[[RankThread, int], None] | None = None,
        absent: tuple[int, ...] = (),
    ) -> None:
        """Let the ranks step together, as an all-reduce would make them, until something holds."""
        present = [member for member in self.members if member.rank not in absent]
        over = threading.Event()
        barrier = threading.Barrier(len(present))
        deadline = time.monotonic() + within
        faults: list[BaseException] = []

        def run(member: RankThread) -> None:
            step = member.step
            try:
                while not over.is_set():
                    step += 1
                    if loop is not None:
                        loop(member, step)
                    else:
                        member.call(step)
                    barrier.wait(within)
                    if member is present[0] and (until() or time.monotonic() > deadline):
                        over.set()
                    barrier.wait(within)
            except threading.BrokenBarrierError:
                pass
            except BaseException as fault:
                faults.append(fault)
                barrier.abort()

        threads = [threading.Thread(daemon=True, target=run, args=(member,)) for member in present]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(within + 5)
        if faults:
            raise faults[0]
        assert until(), f"not within {within:g} s"


def everywhere(ranks: RankThreads, act: Callable[[RankThread], Any]) -> list[Any]:
    """What `act` returns on each rank, or has raised there."""
    found: list[Any] = [None] * ranks.size

    def run(member: RankThread) -> None:
        try:
            found[member.rank] = act(member)
        except Exception as error:
            found[member.rank] = error

    threads = [threading.Thread(daemon=True, target=run, args=(member,)) for member in ranks.members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found
