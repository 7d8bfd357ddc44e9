"""A job that is killed after it has applied a command, and before it could say so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import RedisServer
from tests.support.command_sender import Commander
from tests.support.programs import PYTHON_PATH, Program

PROGRAM = """
import os, sys, time, torch, trainmedic, trainmedic.torch
from trainmedic.job.command import JobCommand

url, moment = sys.argv[1:]
if moment == "dies":
    def answer(command, status, output):
        os._exit(9)
    JobCommand.answer = answer
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with trainmedic.connect(job="llm-1", redis_url=url) as medic:
    run = trainmedic.torch.attach(
        medic, model=model, optimizer=optimizer, loader=[torch.ones(2)] * 10, checkpoints="checkpoints"
    )
    if moment == "resumes":
        run.resume()
    else:
        run.checkpoint()
    for batch in run.batches(epochs=100_000):
        with run.step() as step:
            time.sleep(0.01)
            step.report(loss=model(batch).sum())
        print(optimizer.param_groups[0]["lr"], flush=True)
"""


@pytest.mark.parametrize("action", ["job.scale_lr", "job.checkpoint"])
def test_the_record_determines_whether_a_command_was_applied(
    shared_redis: RedisServer, tmp_path: Path, action: str
) -> None:
    """A recorded rate change is answered applied, so that it is not halved again. Other commands are interrupted."""
    if shared_redis.process is None:
        shared_redis.start()
    environment = {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    commander = Commander(shared_redis.url)

    def start(moment: str) -> Program:
        return Program([sys.executable, "-c", PROGRAM, shared_redis.url, moment], tmp_path / moment, environment)

    with start("dies") as job:
        sent = commander.send(action, 120.0, **({"factor": 0.5} if action == "job.scale_lr" else {}))
        assert job.process.wait(60) == 9, job.tail()
    with start("resumes"):
        reply = commander.final(sent, 60.0)
    commander.close()
    if action == "job.scale_lr":
        assert (reply.status, "recorded says" in reply.output["recovered"]) == ("applied", True)
        told, *rates = sorted((tmp_path / "resumes").read_text().splitlines(), reverse=True)
        assert "job.scale_lr" in told
        assert set(rates) == {"0.05"}
    else:
        assert (reply.status, "interrupted" in reply.output["reason"]) == ("failed", True)
