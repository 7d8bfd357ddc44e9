"""A long training: memory stays bounded, in the job, in the store of its ranks, and in Redis.

``TRAINMEDIC_SOAK_STEPS`` is how many steps there are (100,000). A command comes every twenty of them.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis

import trainmedic
from tests.support.command_sender import Commander
from tests.support.messages import make_command
from tests.support.rank_threads import RankThread, RankThreads
from trainmedic.wire import envelope

STEPS = int(os.environ.get("TRAINMEDIC_SOAK_STEPS", "100000"))
EVERY = 20
KEPT = 500
"""Commands that a job remembers by itself; lowered, so that it comes to that limit early."""


def blocks() -> int:
    """Pieces of memory that Python has in use."""
    gc.collect()
    return sys.getallocatedblocks()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_does_not_grow_over_many_steps_and_commands(
    redis_server: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first quarter is compared with the end; Redis keeps nothing but the memory of completed commands."""
    monkeypatch.setattr("trainmedic.wire.command_memory._KEPT_HERE", KEPT)
    monkeypatch.setattr(logging.getLogger("trainmedic"), "disabled", True)  # pytest keeps each line of a command
    commander = Commander(redis_url)
    before, after, applied = 0, 0, 0

    with commander.connect() as medic:

        @medic.on("job.scale_lr")
        def scale(_: trainmedic.JobCommand) -> dict[str, Any]:
            nonlocal applied
            applied += 1
            return {"learning_rate": 0.1}

        sent = 0
        for step in range(STEPS):
            if step % EVERY == 0:
                commander.send("job.scale_lr", factor=0.5)
                sent += 1
                while sent - applied > 50:
                    time.sleep(0.0005)
                    medic.commands(step)
            medic.report(step=step, loss=2.0, grad_norm=0.5, learning_rate=0.1, samples=8)
            medic.commands(step)
            if step == STEPS // 4:
                before = blocks(), open_files(), threading.active_count()
        while applied < sent:
            time.sleep(0.001)
            medic.commands(STEPS)
        after = blocks(), open_files(), threading.active_count()
        assert sent == applied == STEPS // EVERY
        with redis.Redis.from_url(redis_url) as client:
            while client.xlen(envelope.job_commands("llm-1")):
                time.sleep(0.01)
    commander.close()
    assert after[0] - before[0] < 5000
    assert after[1:] == before[1:]


def test_ranks_that_agree_for_long_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their shared store does not, either; entries that all have read are deleted."""
    monkeypatch.setattr("trainmedic.wire.command_memory._KEPT_HERE", KEPT)
    monkeypatch.setattr("trainmedic.ranks.coordinator._TAKE_INTERVAL", 0.05)
    monkeypatch.setattr("trainmedic.ranks.membership._REFRESH_INTERVAL", 0.05)
    monkeypatch.setattr("trainmedic.ranks.synchronizer.HEARTBEAT_EVERY", 0.05)
    keys: list[int] = []
    counts: list[int] = []
    until = STEPS // 4
    sent: list[envelope.Command] = []

    def run(member: RankThread) -> None:
        for step in range(until):
            if member.rank == 0 and step % (EVERY * 2) == 0 and len(sent) - len(member.done) < 10:
                sent.append(ranks.send(make_command()))
                keys.append(ranks.store.num_keys())
            member.call(step)
            if member.rank == 0 and step in (until // 4, until - 1):
                del ranks.replies[:]
                counts.append(blocks())

    with RankThreads(2, every=10) as ranks:
        threads = [threading.Thread(daemon=True, target=run, args=(member,)) for member in ranks.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
    assert ranks.members[0].done == ranks.members[1].done
    assert len(ranks.members[0].done) > 20
    assert max(keys[len(keys) // 2 :]) < 1500  # thousands, if nothing were swept
    assert counts[1] - counts[0] < 20_000
