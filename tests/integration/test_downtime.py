"""After a downtime: nothing stale acts, and an alert that ended unheard of gives back what was taken for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live import Job, Server
from tests.support.messages import delivery
from tests.support.programs import Program, alertmanagers, eventually, free_port

PLAYBOOK = """
playbook: slow-down
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, undo: on_resolve}
  - {id: better, wait_for: resolved, timeout: 1h}
  - {id: keep, action: job.checkpoint}
"""


def because(run: dict[str, Any]) -> list[str]:
    """How each of the run's alerts is known to have resolved."""
    return [event["data"]["because"] for event in run["events"] if event["kind"] == "alert_resolved"]


def test_a_run_from_before_a_long_downtime_is_stale_and_its_undo_still_pending(tmp_path: Path, redis_url: str) -> None:
    """It no longer acts; the alert, which no source reports, counts as resolved, and the undo runs."""
    options = ("--redis", redis_url, "--max-age", "3s", "--assume-resolved-after", "8s")
    with Server(tmp_path, PLAYBOOK, *options) as server, Job("llm", redis_url) as job:
        assert server.ask("/webhook", delivery("Spike", "llm")).status == 200
        eventually(lambda: job.done, 60, "applied")
        server.kill()
        time.sleep(4)
        server.start()
        run = server.closed_run(within=60)
        assert (run["status"], run["decision"]) == ("cancelled", "stale")
        assert "was down for up to" in run["message"]
        assert run["owes_undo"] is True
        run = server.undone_run(within=60)
        assert because(run) == ["assumed"]
        assert job.done == ["job.scale_lr 0.5", "job.scale_lr 2"]


def test_an_alert_from_before_the_downtime_does_not_start_a_run(tmp_path: Path, redis_url: str) -> None:
    """Alertmanager retained the delivery during the downtime; by then it is too old to act on."""
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url, "--max-age", "2s") as server, Job("llm", redis_url) as job:
        late = delivery("Spike", "llm")
        time.sleep(2.5)
        (decided,) = server.ask("/webhook", late).body["runs"]
        assert decided["decision"] == "stale"
        assert [run["status"] for run in server.runs()] == ["not_started"]
        assert job.done == []


@pytest.fixture(params=["installed", "current"])
def start_alertmanager(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Callable[[], Any]]:
    """An Alertmanager's URL, and how to start it there, again and again. It tells nobody of anything."""
    binary = alertmanagers().get(request.param)
    if binary is None:
        pytest.fail(f"no {request.param} Alertmanager; see scripts/fetch-alertmanager")
    config = tmp_path / "alertmanager.yml"
    config.write_text("route: {receiver: nobody}\nreceivers: [{name: nobody}]\n")
    address = f"127.0.0.1:{free_port()}"

    def start() -> AbstractContextManager[Program]:
        options = ("--cluster.listen-address=", f"--web.listen-address={address}")
        argv = [binary, f"--config.file={config}", f"--storage.path={tmp_path / 'alerts'}", *options]
        return Program(argv, tmp_path / "alertmanager.log").wait_for(f"http://{address}/-/ready")

    return f"http://{address}", start


def test_alertmanager_is_asked_about_an_alert_that_ended_during_the_downtime(
    tmp_path: Path, redis_url: str, start_alertmanager: tuple[str, Callable[[], Any]]
) -> None:
    """Nothing is undone while the alert fires, or while a restarted Alertmanager knows of no alert."""
    url, start = start_alertmanager
    options = ("--redis", redis_url, "--alertmanager", url, "--assume-resolved-after", "8s")
    fired = delivery("Spike", "llm")
    alert = {"labels": fired["alerts"][0]["labels"], "startsAt": fired["alerts"][0]["startsAt"]}

    def tell(**changes: str) -> None:
        httpx.post(f"{url}/api/v2/alerts", json=[{**alert, **changes}]).raise_for_status()

    with Server(tmp_path / "server", PLAYBOOK, *options) as server, Job("llm", redis_url) as job:
        with start():
            tell()
            (listed,) = httpx.get(f"{url}/api/v2/alerts").json()
            fired["alerts"][0]["fingerprint"] = listed["fingerprint"]
            assert server.ask("/webhook", fired).status == 200
            eventually(lambda: job.done, 60, "applied")
            time.sleep(6)
            assert job.done == ["job.scale_lr 0.5"], "it fires still, as the Alertmanager says"
        with start():
            time.sleep(1.5)
            assert job.done == ["job.scale_lr 0.5"], "it has just started, and does not know yet"
            tell()
            server.kill()
            tell(endsAt=datetime.now(UTC).isoformat())
            server.start()
            run = server.undone_run(within=60)
            assert because(run) == ["asked"]
            assert job.done == ["job.scale_lr 0.5", "job.checkpoint", "job.scale_lr 2"]
