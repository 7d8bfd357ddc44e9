"""A rollback takes the weights of a rollout engine along that lives in another process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.plain_torch.rollout_engine import Engine, Story, engine_process, train
from tests.support.command_sender import Commander, Sent
from trainmedic.wire.envelope import utc_now, write_time

STEPS, SPOILED, LEFT, SAVED = 24, 12, 17, 10


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One process for all trainings, each of which begins by sending its weights."""
    with engine_process() as started:
        yield started


def repaired(commander: Commander, engine: Engine, directory: Path, names_engine: bool) -> tuple[str, Story]:
    """The policy is spoiled after a step, and the engine gets that; some steps later all goes back. Return the status
    of the rollback, and the steps from then on."""
    began: list[str] = []
    with commander.connect() as medic:
        sent = Sent(commander, medic)

        def each(number: int, policy: torch.nn.Linear) -> None:
            if number == SPOILED and not sent.ids:
                began.append(write_time(utc_now()))
                with torch.no_grad():
                    policy.weight.mul_(-5)
            if number == LEFT and not sent.ids:
                sent("job.rollback", 600.0, before=began[0])(None)

        story = train(medic, engine, directory, STEPS, each, names_engine)
        status = commander.final(sent.ids[0], 120.0).status
    return status, story[[number for number, *_ in story].index(SAVED, LEFT) :]


def test_the_engine_samples_from_the_weights_of_the_checkpoint(
    tmp_path: Path, commander: Commander, engine: Engine
) -> None:
    """Its weight digests, actions and losses in the repeated and the following steps are those of an
    undisturbed training. With an
    engine that attach was not given they are not, so the program shows what it is to show."""
    with commander.connect() as medic:
        plain = train(medic, engine, tmp_path / "plain", STEPS, lambda *_: None)[SAVED:]
    assert repaired(commander, engine, tmp_path / "repaired", names_engine=True) == ("applied", plain)
    assert repaired(commander, engine, tmp_path / "left-out", names_engine=False)[1] != plain
