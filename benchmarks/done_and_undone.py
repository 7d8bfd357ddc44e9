"""Seconds in which a storm's commands are executed, and undone when its alerts resolve.

Server and Redis are real processes, the jobs simulated as in `runs_end_to_end`. Each job has one alert, whose command
is reverted at its end; all fire, 100 in a webhook, and then all resolve. The time is from the first webhook to the last
answered command; each round begins without pending undos.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis.asyncio
import uvloop

from benchmarks.alert_storm import redis_server
from benchmarks.runs_end_to_end import PLAYBOOK, Load, prepared
from benchmarks.sender import Connection, alert, get, send_all, webhook
from tests.support.programs import start_server

_WITHIN = 60.0
"""Seconds for each half of a round."""


def requests(jobs: int, starts_at: datetime, resolved: bool) -> list[bytes]:
    """Return webhooks with an alert of each job."""
    labels = [{"alertname": "EndToEnd", "severity": "critical", "job_name": f"job-{job}"} for job in range(jobs)]
    alerts = [alert(each, starts_at, resolved) for each in labels]
    return [webhook(alerts[first : first + 100]) for first in range(0, jobs, 100)]


async def until_answered(url: str, load: Load, resolved: bool, starts_at: datetime) -> float:
    """Send the alerts, and return the seconds until each job has answered."""
    due = load.answered + load.jobs
    began = time.monotonic()
    exchanges = await send_all(url, requests(load.jobs, starts_at, resolved), concurrency=4)
    if any(exchange.status != 200 for exchange in exchanges):
        raise SystemExit("not every webhook was accepted")
    async with asyncio.timeout(_WITHIN):
        while load.answered < due:
            await asyncio.sleep(0.002)
    return time.monotonic() - began


async def until_on_record(url: str, key: str, value: Any) -> None:
    """Wait until none of the newest runs has this value in the history."""
    connection = await Connection.open(url)
    try:
        async with asyncio.timeout(_WITHIN):
            while any(run[key] == value for run in (await connection.send(get("/history?limit=1000"))).json()["items"]):
                await asyncio.sleep(0.1)
    finally:
        connection.close()


async def measure(url: str, redis_url: str, load: Load, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of doing and undoing, by round."""
    client = redis.asyncio.Redis.from_url(redis_url, protocol=2)
    answering = asyncio.create_task(load.answer(client))
    done, undone = [], []
    for _ in range(rounds):
        starts_at = datetime.now(UTC)
        done.append(await until_answered(url, load, False, starts_at))
        await until_on_record(url, "status", "running")
        undone.append(await until_answered(url, load, True, starts_at))
        await until_on_record(url, "undone_at", None)
    load.is_over = True
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    await client.aclose()
    return done, undone


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1000, choices=range(100, 1001, 100), metavar="100..1000")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "playbooks").mkdir()
        (directory / "playbooks" / "end-to-end.yaml").write_text(f"{PLAYBOOK}    undo: on_resolve\n")
        with redis_server(directory) as redis_url, prepared(redis_url, options.jobs):
            settings = ("--mode", "enforce", "--redis", redis_url)
            server, url = start_server(directory, *settings, playbooks=directory / "playbooks")
            with server:
                done, undone = uvloop.run(measure(url, redis_url, Load(options.jobs), options.rounds))
    ratio = statistics.median(back / there for there, back in zip(done, undone, strict=True))
    print(
        f"done and undone: {options.jobs} commands in {statistics.median(done):.2f} s, and undone in"
        f" {statistics.median(undone):.2f} s, {ratio:.2f} of it (medians of {options.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
