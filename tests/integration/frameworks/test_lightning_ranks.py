"""Ranks that Lightning starts itself: what comes after a rollback is what the answer says, on each of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RedisServer
from tests.integration.frameworks.lightning_ranks import EPOCH, STEPS
from tests.support.long_tests import some_of
from tests.support.programs import PYTHON_PATH, Program

PROGRAM = "tests.integration.frameworks.lightning_ranks"
LOADING = 240.0  # seconds, for all processes to import Lightning on a busy machine, and to train
ACCUMULATION = 2

Line = dict[str, Any]


def lines(directory: Path, job: str, rank: int) -> list[Line]:
    return [json.loads(line) for line in (directory / f"{job}-{rank}.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("strategy", some_of(["ddp_spawn", "ddp"]))
def test_each_rank_returns_to_its_position_in_the_data(
    shared_redis: RedisServer, tmp_path: Path, strategy: str
) -> None:
    """One rollback repeats batches and losses bit for bit; one with a skip continues after the skipped batches."""
    if shared_redis.process is None:
        shared_redis.start()
    command = [sys.executable, "-m", PROGRAM, strategy, shared_redis.url]
    environment = {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    with Program(command, tmp_path / "log", environment) as program:
        assert program.process.wait(LOADING) == 0, program.tail()

    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [[status for status, _ in answer] for answer in answers] == [["applied", "applied"]] * 2
    (repeated, same), (skipped, as_well) = ([output for _, output in answer] for answer in answers)
    assert (repeated, skipped) == (same, as_well)
    assert (repeated["data"], repeated["skipped_batches"]) == ("the same batches again", 0)
    assert (skipped["data"], skipped["skipped_batches"]) == ("the same batches again", 4)
    for output in (repeated, skipped):
        parameters, batches = output["verified"]["parameters"], output["verified"]["batches"]
        assert parameters["agreed"] == parameters["compared"] > 12
        assert (parameters["ranks"], batches["agreed"]) == (2, batches["compared"])
        assert batches["compared"] > 0
    for rank in range(2):
        plain, repaired = lines(tmp_path, "plain", rank), lines(tmp_path, "repaired", rank)
        left, back = (ACCUMULATION * repeated[name] for name in ("left_step", "checkpoint_step"))
        end, place = (ACCUMULATION * skipped[name] for name in ("left_step", "checkpoint_step"))
        assert repaired[:left] == plain[:left]
        repeats = left + end - back
        assert repaired[left:repeats] == plain[back:end]
        after = [line["batch"] for line in repaired[repeats:]]
        assert after[:-4] == without(plain, place, 4)  # as many as were left out follow where the other run has ended
        assert repaired[-1]["step"] == STEPS


def without(plain: list[Line], place: int, skipped: int) -> list[Any]:
    """The batches that follow in the undisturbed run, from `place` on, where some are left out: never a whole rest of
    an epoch, so that the others may be left out in the next."""
    batches = [line["batch"] for line in plain]
    rest = -place % EPOCH or EPOCH
    first = min(skipped, (rest - 1) // ACCUMULATION * ACCUMULATION)
    second = skipped - first
    return batches[place + first : place + rest] + batches[place + rest + second :]
