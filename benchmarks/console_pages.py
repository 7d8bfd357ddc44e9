"""The console with 100,000 runs: first byte and size of each page, and the webhook's delay by 200 viewers.

    python -m benchmarks.console_pages [--runs 100000] [--viewers 200]

It fills a store in a temporary directory, starts `trainmedic serve` on it, and requests each page 40 times: the aims
are a p95 of 100 ms to the first byte, and 25 kB compressed. Then it delivers alerts one by one, with and without
`--viewers` open pages, and prints how long a delivery took (median, p95) and how long until a viewer got the new run:
the aim is 300 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx

from benchmarks import history_page
from tests.support.live import Server

PAGES = ("/", "/runs", "/runs?status=failed&since=24h", "/approvals", "/alerts", "/explain", "/playbooks", "/jobs")
MORE = (
    "/playbooks/playbook-1",
    "/playbooks/playbook-1?whole=1",
    "/nodes",
    "/audit",
    "/settings",
    "/report?since=24h",
    "/docs",
)
TRIES = 40
DELIVERIES = 60
HTML = {"Accept": "text/html", "Accept-Encoding": "gzip"}
PLAYBOOK = """
playbook: watch-the-loss
on: {alert: LossHigh}
target: job
mode: observe
steps: [{id: slow_down, action: job.scale_lr, with: {factor: 0.5}}]
---
playbook: playbook-1
on: {alert: Other}
target: job
steps: [{id: slow_down, action: job.scale_lr, with: {factor: 0.5}}]
"""


def p95(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.95)]


def alert(number: int) -> dict[str, object]:
    now = datetime.now(UTC).isoformat()
    labels = {"alertname": "LossHigh", "job_name": f"llm-{number}"}
    entry = {"status": "firing", "labels": labels, "startsAt": now, "fingerprint": f"{number:016x}"}
    return {"version": "4", "alerts": [entry]}


async def first_byte(client: httpx.AsyncClient, path: str) -> tuple[float, int]:
    """Return the seconds to the body's first byte, and the transferred bytes."""
    began = time.perf_counter()
    async with client.stream("GET", path, headers=HTML) as answer:
        assert answer.status_code == 200, (path, answer.status_code)
        chunks = answer.aiter_raw()
        size = len(await anext(chunks))
        took = time.perf_counter() - began
        async for chunk in chunks:
            size += len(chunk)
    return took, size


async def pages(client: httpx.AsyncClient) -> None:
    newest = (await client.get("/history?limit=1")).json()["items"][0]["run_id"]
    for path in (*PAGES, *MORE, f"/runs/{newest}"):
        tries = [await first_byte(client, path) for _ in range(TRIES)]
        times = [took for took, _ in tries[1:]]
        print(
            f"{path[:30]:<31} p95 {p95(times) * 1000:6.1f} ms   {tries[-1][1] / 1000:6.1f} kB gz",
            flush=True,
        )


async def told(url: str, seq: str, ready: asyncio.Semaphore, seen: asyncio.Queue[float] | None) -> None:
    """Hold one page open. Record in `seen`, if given, when a run's row arrived."""
    path = f"/console/live?topics=head,runs&after={seq}"
    async with httpx.AsyncClient(base_url=url, timeout=None) as client, client.stream("GET", path) as answer:
        ready.release()
        async for line in answer.aiter_lines():
            if seen is not None and line == "event: runs":
                seen.put_nowait(time.perf_counter())


async def deliveries(client: httpx.AsyncClient, first: int, seen: asyncio.Queue[float] | None) -> None:
    took, until = [], []
    for number in range(first, first + DELIVERIES):
        began = time.perf_counter()
        answer = await client.post("/webhook", json=alert(number))
        took.append(time.perf_counter() - began)
        assert answer.status_code == 200, answer.text
        if seen is not None:
            until.append(await asyncio.wait_for(seen.get(), 10) - began)
        await asyncio.sleep(0.3)
        while seen is not None and not seen.empty():
            seen.get_nowait()
    line = f"   delivery median {statistics.median(took) * 1000:.1f} ms, p95 {p95(took) * 1000:.1f} ms"
    print(
        line
        + (
            f"; told after median {statistics.median(until) * 1000:.0f} ms, p95 {p95(until) * 1000:.0f} ms"
            if until
            else ""
        )
    )


async def live(url: str, viewers: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        print("without viewers", flush=True)
        await deliveries(client, 0, None)
        print(f"with {viewers} viewers", flush=True)
        ready, seen = asyncio.Semaphore(0), asyncio.Queue[float]()
        newest = (await client.get("/", headers=HTML)).text.partition('data-seq="')[2].partition('"')[0]
        watching = [
            asyncio.create_task(told(url, newest, ready, seen if number == 0 else None)) for number in range(viewers)
        ]
        for _ in watching:
            await asyncio.wait_for(ready.acquire(), 30)
        await deliveries(client, 10_000, seen)
        for task in watching:
            task.cancel()
        await asyncio.wait(watching)


async def main(runs: int, viewers: int) -> None:
    history_page.START = datetime.now(UTC) - timedelta(seconds=runs)
    with tempfile.TemporaryDirectory() as directory:
        store = await history_page.filled(Path(directory), runs)
        await store.close()
        database = f"sqlite:///{directory}/{runs}.db"
        server = Server(Path(directory) / "server", PLAYBOOK, "--database", database)
        with server:
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                await pages(client)
            await live(url, viewers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--viewers", type=int, default=200)
    asked = parser.parse_args()
    asyncio.run(main(asked.runs, asked.viewers))
