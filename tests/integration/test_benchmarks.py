"""The benchmarks' own parts work: a benchmark that measures the wrong thing is worse than none."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import alert_storm, sender, webhook_throughput
from tests.support.programs import PYTHON_PATH, ROOT, inherited

BENCHMARKS = (
    "agent_idle",
    "agents_thousand",
    "agreement_by_collective",
    "alert_storm",
    "beside_revision",
    "command_to_limit",
    "disk_clean",
    "finding_to_alert",
    "groups",
    "log_rules",
    "receipt_to_handler",
    "replay",
    "runs_end_to_end",
    "sdk_bad_redis",
    "sdk_step_meter",
    "sdk_step_overhead",
    "several_servers",
    "time_to_ready",
    "webhook_throughput",
)
SMALL = {
    "agent_idle": (
        ("--seconds", "1", "--scrape-every", "0.5"),
        r"idle agent: (\d+\.\d) MB resident .* of one core \(8 GPUs",
    ),
    "agents_thousand": (("--agents", "30", "--alerts-each", "10"), r"30 agents: (\d+\.\d+) s from the first webhook"),
    "finding_to_alert": (("--rounds", "3"), r"finding to alert: (\d+\.\d) ms, p95 .* counted in (\d+\.\d\d) s"),
    "groups": (("--nodes", "3"), r"24 members on 3 nodes[^\n]*\n(\d+\.\d) s, [^$]*given back once: yes"),
    "log_rules": (("--lines", "2000"), r"log rules: (\d+) lines a second and core"),
    "replay": (("--alerts", "3000"), r"replay: (\d+) alerts a second and core of 3,000"),
    "command_to_limit": (("--rounds", "5"), r"command to limit: (\d+\.\d) ms, p95 .* \(median of 5, 8 GPUs\)"),
}
"""Options for a small run of those that can be short, and what they print then."""


@pytest.mark.long
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_explains_its_options(name: str) -> None:
    """``--help`` works, so the module can at least be loaded."""
    argv = [sys.executable, "-W", "error", "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(argv, cwd=ROOT, env={"PYTHONPATH": PYTHON_PATH}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SMALL)
def test_a_small_run_prints_a_figure(name: str) -> None:
    """It runs from start to end with all its measurements."""
    arguments, figure = SMALL[name]
    argv = [sys.executable, "-W", "error", "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env={**inherited(), "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = re.match(figure, done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 0


def test_the_sender_gets_a_reply_for_every_request(tmp_path: Path) -> None:
    """More requests than connections: each is answered once, with its status and times."""
    endpoint, url = webhook_throughput.start_endpoint(tmp_path, "empty")
    with endpoint:
        requests = [sender.webhook([sender.alert({"alertname": "A", "number": str(n)})]) for n in range(50)]
        exchanges = asyncio.run(sender.send_all(url, requests, concurrency=4))
        unknown = asyncio.run(sender.send_all(url, [sender.get("/nowhere")], concurrency=1))
    assert [exchange.status for exchange in exchanges] == [200] * 50
    assert all(exchange.json() == {} and exchange.seconds > 0 for exchange in exchanges)
    assert [exchange.status for exchange in unknown] == [404]


def test_a_lost_server_connection_is_an_error_not_a_silence(tmp_path: Path) -> None:
    """A request whose connection is lost raises an exception."""

    async def ask_a_server_that_hangs_up() -> None:
        hang_up = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with hang_up:
            host, port = hang_up.sockets[0].getsockname()
            await sender.send_all(f"http://{host}:{port}", [sender.get("/")], concurrency=1)

    with pytest.raises(ConnectionError):
        asyncio.run(ask_a_server_that_hangs_up())


def test_a_storm_names_every_job_once() -> None:
    """Jobs and fingerprints are distinct, and the number of webhooks is as promised."""
    bodies = [json.loads(request.partition(b"\r\n\r\n")[2]) for request in alert_storm.deliveries(100, 10)]
    alerts = [entry for body in bodies for entry in body["alerts"]]
    assert (len(bodies), len(alerts)) == (10, 100)
    assert len({entry["labels"]["job_name"] for entry in alerts}) == 100
    assert len({entry["fingerprint"] for entry in alerts}) == 100
