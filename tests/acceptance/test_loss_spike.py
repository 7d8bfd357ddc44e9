"""The main job, all of it real: a training run whose loss jumps is brought back, and the history tells how.

PyTorch trains a small model on the CPU and reports through the SDK; Prometheus scrapes it and evaluates the
shipped rules; Alertmanager posts to ``trainmedic serve``; the shipped playbook rolls the job back.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance import scene
from tests.support.programs import alertmanagers, eventually, start_server

LOSS = 'training_loss{job_name="char-model"}'
LEARNING_RATE = 'training_learning_rate{job_name="char-model"}'


@pytest.fixture(params=["installed", "current"])
def alertmanager(request: pytest.FixtureRequest) -> Path:
    """The installed Alertmanager, and the one that scripts/fetch-alertmanager got."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    binary = alertmanagers().get(request.param)
    if binary is None:
        pytest.fail(f"no {request.param} Alertmanager; see scripts/fetch-alertmanager")
    return binary


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A server in mode enforce with the shipped playbook; its URL."""
    playbooks = scene.faster_playbook(tmp_path / "playbooks", "training-loss-spike.yaml")
    program, url = start_server(tmp_path / "server", "--mode", "enforce", playbooks=playbooks)
    with program:
        yield url


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def in_order(story: list[str], kinds: list[str]) -> bool:
    """Whether the events of `story` all happened, in that order, whatever happened between them."""
    remaining = iter(kinds)
    return all(kind in remaining for kind in story)


def only_run(server: str, status: str) -> dict[str, Any] | None:
    """The one run for the loss spike, once it has that status."""
    items = httpx.get(f"{server}/history", params={"alertname": "TrainingLossSpike"}).raise_for_status().json()["items"]
    assert len(items) <= 1, "one spike, one run"
    return items[0] if items and items[0]["status"] == status else None


def test_a_loss_spike_is_rolled_back_and_the_history_shows_how(alertmanager: Path, server: str, tmp_path: Path) -> None:
    """The job loads a checkpoint from before the alert and halves the learning rate until the loss recovers."""
    environment = {"TRAINMEDIC_STATE_DIR": str(tmp_path / "server" / "state")}
    with scene.running(tmp_path / "scene", alertmanager, server, environment) as watched:
        eventually(lambda: (watched.checkpoints / "step-00000150").exists(), 60, "the last step before the poison")
        item = eventually(lambda: only_run(server, "succeeded"), 60, "the run's success", every=0.5)
        eventually(lambda: "TrainingLossSpike" not in watched.firing(), 60, "the alert's end in Prometheus")
        eventually(lambda: watched.newest(LEARNING_RATE) == 3e-3, 60, "the learning rate's return")
        run = httpx.get(f"{server}/history/{item['run_id']}").raise_for_status().json()
        the_job_went_back(watched, run)
    the_history_tells_how(item, run)


def the_job_went_back(watched: scene.Scene, run: dict[str, Any]) -> None:
    """To the last good checkpoint; at half the learning rate; and it helped."""
    told = {step["action"]: step["output"] for step in run["steps"] if step["phase"] == "steps"}
    rolled_back, scaled = told["job.rollback"], told["job.scale_lr"]
    good = rolled_back["loss_at_checkpoint"]
    assert good < 3.0
    assert watched.highest(LOSS, 60) > good + 1.0

    assert rolled_back["step"] == 150
    assert moment(rolled_back["saved_at"]) < moment(run["alerts"][0]["starts_at"])
    assert rolled_back["left_step"] > 158  # the first spoiled one; at full speed there was one more checkpoint
    assert (rolled_back["data"], rolled_back["skipped_batches"]) == ("the same batches again", 200)

    assert (scaled["before"], scaled["after"]) == pytest.approx((3e-3, 1.5e-3))
    # The alert can end before Prometheus asks again, and then the rate comes back. The updates in between were seen.
    used = scaled["verified"]["learning_rate"]
    assert used["updates"] == 2, used
    assert used["used"] == pytest.approx(1.5e-3)
    assert watched.newest(LOSS) < good + 1.0


def the_history_tells_how(item: dict[str, Any], run: dict[str, Any]) -> None:
    """What was decided, what was done in which order, and what came of it."""
    assert (item["decision"], item["success"]) == ("started", True)
    assert item["alert_labels"]["job_name"] == "char-model"
    assert item["action_taken"] == "job.rollback, job.scale_lr"

    assert [alert["status"] for alert in run["alerts"]] == ["resolved"]
    healed, rollback, scale_lr, recovered = (step for step in run["steps"] if step["phase"] == "steps")
    assert (healed["kind"], healed["status"]) == ("wait_for", "timed_out")
    assert (rollback["action"], rollback["status"]) == ("job.rollback", "succeeded")
    assert "150" in str(rollback["output"])
    assert (scale_lr["action"], scale_lr["status"]) == ("job.scale_lr", "succeeded")
    assert scale_lr["params"] == {"factor": 0.5}
    assert (recovered["kind"], recovered["status"]) == ("wait_for", "succeeded")
    in_turn = (healed, rollback, scale_lr, recovered)
    times = [moment(step[which]) for step in in_turn for which in ("started_at", "ended_at")]
    assert times == sorted(times)

    story = ["started", "wait_started", "wait_ended"]
    story += ["step_started", "step_succeeded", "step_started", "step_succeeded"]
    story += ["closed"]
    events = run["events"]
    assert in_order(story, [event["kind"] for event in events])
    # With a fast job the loss can recover before the rate is halved; then there is no wait for it.
    assert in_order(["started", "alert_resolved", "closed"], [event["kind"] for event in events])
    assert [event["seq"] for event in events] == sorted(event["seq"] for event in events)
    assert [moment(event["at"]) for event in events] == sorted(moment(event["at"]) for event in events)
