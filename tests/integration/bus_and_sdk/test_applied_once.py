"""A command is delivered at least once and applied at most once, over repeats, restarts and kills of the job."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.integration.bus_and_sdk.training_loop import again, ask, eventually, finals, put, until
from tests.support.messages import KEY, make_command
from trainmedic.wire import envelope
from trainmedic_server.adapters.redis_bus import RedisBus

ROOT = Path(__file__).parents[3]


async def test_a_repeated_command_is_answered_again_but_not_applied_again(
    redis_server: Any, client: Redis, start_job: Any
) -> None:
    """The answer comes from the process's memory, also after the expiry, because it was applied in time."""
    job = start_job(redis_server.url, signing_key=KEY)
    sent = make_command(seconds=2)  # enough for a slow machine to take it
    await put(client, sent)
    first = await finals(client, sent.id)
    await until(sent.expires_at)
    await put(client, sent)
    both = await finals(client, sent.id, count=2)
    assert both[1].status == envelope.APPLIED
    assert both[1].output == first[0].output
    assert job.done == [sent.id]


async def test_a_restarted_job_remembers_applied_commands(redis_server: Any, client: Redis, start_job: Any) -> None:
    """The memory is in Redis too: the new process answers and does not apply."""
    sent = make_command()
    first = start_job(redis_server.url, lambda given: given.applied(after=0.05), signing_key=KEY)
    await put(client, sent)
    await finals(client, sent.id)
    first.end()
    second = start_job(redis_server.url, signing_key=KEY)
    await put(client, sent)
    replies = await finals(client, sent.id, count=2)
    assert (replies[1].status, replies[1].output["after"]) == (envelope.APPLIED, 0.05)
    assert second.done == []


async def test_a_repeated_request_extends_the_time_of_a_running_command(
    redis_server: Any, bus: RedisBus, start_job: Any
) -> None:
    """The server timed out and asks again with the same id: one effect, one answer, no expiry in between."""
    job = start_job(redis_server.url, signing_key=KEY)
    job.hold()
    sent = make_command(seconds=3)  # enough for a slow machine to take it
    asked = [asyncio.create_task(bus.request(sent)), asyncio.create_task(bus.request(again(sent)))]
    waiting = job.medic._queue.waiting
    await eventually(lambda: sent.id in waiting and waiting[sent.id].expires_at > sent.expires_at)
    await until(sent.expires_at)
    job.go_on()
    assert [reply.status for reply in await asked[1]] == [envelope.APPLIED]
    await asked[0]
    assert job.done == [sent.id]


@pytest.mark.parametrize("moment", ["before", "while", "after"])
async def test_a_killed_job_applies_nothing_twice(
    redis_server: Any, bus: RedisBus, tmp_path: Path, moment: str
) -> None:
    """Killed before it answers, the next process reports that and does not apply; killed after, it answers again."""
    log = tmp_path / "effects"
    sent = make_command(seconds=20)
    with _process(redis_server.url, log, moment) as first:
        asked = asyncio.create_task(bus.request(sent))
        if moment == "after":
            assert [reply.status for reply in await asked] == [envelope.APPLIED]
        else:
            await eventually(lambda: log.exists() and moment in log.read_text())
        first.send_signal(signal.SIGKILL)
        first.wait()
    with _process(redis_server.url, log, "answer"):
        if moment == "after":
            assert (await ask(bus, again(sent))).status == envelope.APPLIED
        else:
            (reply,) = await asked
            assert reply.status == envelope.FAILED
            assert "interrupted" in reply.output["reason"]
        fresh = make_command()
        assert (await ask(bus, fresh)).status == envelope.APPLIED
    assert log.read_text().split().count(f"applied:{sent.id}") == (0 if moment == "before" else 1)


_PROGRAM = """
import sys, time, trainmedic
url, path, moment = sys.argv[1:]
log = open(path, "a", buffering=1)
medic = trainmedic.connect(job="llm-1", redis_url=url, signing_key="a signing key of the tests")
print("ready", flush=True)
for step in range(1, 100_000):
    time.sleep(0.002)
    if moment == "before" and medic._queue.arrived:
        log.write("before\\n")
        time.sleep(60)
    for command in medic.commands(step):
        log.write(f"applied:{command.id}\\n")
        if moment == "while":
            log.write("while\\n")
            time.sleep(60)
        command.applied()
"""


def _process(url: str, log: Path, moment: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "sdk")}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, url, str(log), moment],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )

    class Running:
        def __enter__(self) -> Any:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        def __exit__(self, *_: object) -> None:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    return Running()
