"""Plain loops as people have them: the loss jumps, the alert brings them back, and the answer proves it.

All of it real, as in ``test_loss_spike``: Prometheus with the shipped rules, Alertmanager, ``trainmedic serve`` with
the shipped playbook. The scripts say which of others' they stand for. All jobs train at once beside one server, for a
scene takes a minute whatever is in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance import scene
from tests.support.programs import PYTHON_PATH, Program, alertmanagers, eventually, free_port, start_server
from trainmedic.recovery.batch_log import NOT_DRAWN, RANDOM

HERE = Path(__file__).parent
FAULT = 240
"""The step after which the weights are spoiled: by then the alert's rule has a baseline.

The noise makes the loss jump to at most some 400, whatever is drawn: over 1000 for five steps it would be a divergence,
whose own alert might come first."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
JOBS: dict[str, tuple[str, ...]] = {
    "drawn-batches": ("drawn_batches.py",),
    "ddp-trainer": (*TORCHRUN, "--nproc-per-node=2", "ddp_trainer.py"),
    "accelerated": ("accelerated.py",),
    "hello-deepspeed": (*TORCHRUN, "hello_deepspeed.py"),
}
ENGINES = Path(sys.prefix) / "engines"
"""Where `scripts/setup all` installs DeepSpeed, which only the job that needs it is to see."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """By the name of the job, the server's run for its spike, once the learning rate was given back."""
    alertmanager = next(iter(alertmanagers().values()), None)
    assert alertmanager is not None, "no Alertmanager; see scripts/fetch-alertmanager"
    directory = tmp_path_factory.mktemp("loops")
    playbooks = scene.faster_playbook(directory / "playbooks", "training-loss-spike.yaml")
    server, url = start_server(directory / "server", "--mode", "enforce", playbooks=playbooks)
    ports = {name: free_port() for name in JOBS}
    addresses = [f"127.0.0.1:{port}" for port in ports.values()]
    with server, ExitStack() as stack:
        stack.enter_context(scene.watching(directory / "scene", alertmanager, url, jobs=addresses))
        state = os.fspath(directory / "server" / "state")
        jobs = {name: stack.enter_context(start(directory / name, name, ports[name], state)) for name in JOBS}
        yield {
            name: eventually(partial(given_back, url, name, job), 240, f"{name} is healed", every=1.0)
            for name, job in jobs.items()
        }


def start(directory: Path, name: str, port: int, state: str) -> Program:
    directory.mkdir()
    *launcher, script = JOBS[name]
    argv = [sys.executable, *launcher, os.fspath(HERE / script), str(FAULT), str(port), os.fspath(directory)]
    environment = {"PYTHONPATH": PYTHON_PATH, "TRAINMEDIC_STATE_DIR": state, "OMP_NUM_THREADS": "1"}
    if "deepspeed" in name:
        environment |= {"PYTHONPATH": os.pathsep.join((PYTHON_PATH, str(ENGINES))), "DS_ACCELERATOR": "cpu"}
    return Program(argv, directory / "job.log", environment)


def given_back(server: str, name: str, job: Program) -> dict[str, Any] | None:
    """The job's run, once it has succeeded and what it owed has been taken back; the job is still at work."""
    assert job.process.poll() is None, job.tail()
    items = httpx.get(f"{server}/history", params={"limit": 100}).raise_for_status().json()["items"]
    (item,) = [item for item in items if item["target"] == f"job:{name}"] or [None]
    if item is None or item["status"] in ("running", "waiting"):
        return None
    assert item["alert_name"] == "TrainingLossSpike", item
    run: dict[str, Any] = httpx.get(f"{server}/history/{item['run_id']}").raise_for_status().json()
    assert run["status"] == "succeeded", run
    return run if run["undone_at"] else None


def output_of(run: Mapping[str, Any], action: str) -> Mapping[str, Any]:
    (output,) = (step["output"] for step in run["steps"] if step["action"] == action and step["phase"] == "steps")
    return output  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", JOBS)
def test_a_spike_is_rolled_back_verified_and_reverted(name: str, runs: Mapping[str, Any]) -> None:
    """The rollback loads a checkpoint from before the jump, skips later batches, and compares all ranks. Where
    batches are made with random numbers, others come after a skip, and the answer says that they cannot be compared."""
    went_back = output_of(runs[name], "job.rollback")
    assert went_back["step"] <= FAULT - 5
    assert (went_back["data"], went_back["skipped_batches"]) == ("the same batches again", 200)
    parameters, batches = went_back["verified"]["parameters"], went_back["verified"]["batches"]
    assert parameters["agreed"] == parameters["compared"] > 0
    assert parameters["ranks"] == (2 if name == "ddp-trainer" else 1)
    if name == "hello-deepspeed":  # which masks them at random
        assert batches["compared"] == 0
        assert batches["why"] in (RANDOM, NOT_DRAWN)  # by how far it had come when it was brought back
    else:
        assert batches["agreed"] == batches["compared"] > 0, batches
    scaled = output_of(runs[name], "job.scale_lr")
    assert scaled["after"] == pytest.approx(scaled["before"] / 2)
