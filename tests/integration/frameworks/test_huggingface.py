"""A real Trainer with the callback, and with the helper that restarts its loop, over a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainmedic
from tests.commanding import Commander
from tests.integration.frameworks.hf import Script, Windows, make_trainer
from trainmedic import huggingface

QUICK = huggingface.Limits(retries=2, delay=0.0)


@pytest.fixture
def medic(commander: Commander) -> Iterator[trainmedic.Medic]:
    with commander.connect() as connected:
        yield connected


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in trainer.model.parameters()])


def test_a_rollback_without_skip_repeats_the_run_exactly(
    tmp_path: Path, commander: Commander, medic: trainmedic.Medic
) -> None:
    """Back at step 20 from step 27: the same losses again, the same weights at the end, and the answer says where."""
    plain = Script()
    undisturbed = make_trainer(tmp_path / "plain", plain)
    undisturbed.train()

    sent: list[str] = []
    script = Script(at_27=lambda _: sent.append(commander.send_and_wait(medic, "job.rollback", step=25)))
    trainer = make_trainer(tmp_path, script)
    result = huggingface.train(trainer, medic=medic, limits=QUICK)

    assert result.global_step == 60
    assert script.steps == [*range(1, 28), *range(21, 61)]
    assert script.losses == plain.losses
    assert torch.equal(weights(trainer), weights(undisturbed))
    reply = commander.final(sent[0])
    assert reply.status == "applied"
    assert reply.output["checkpoint"] == "checkpoint-20"
    assert (reply.output["step"], reply.output["left_step"], reply.output["skipped_batches"]) == (21, 27, 0)
