"""Both frameworks with two ranks under torchrun, over gloo and a real Redis: no rank does what the other does not."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RedisServer
from tests.integration.frameworks.test_verified import flip_huggingface, flip_lightning
from tests.support.command_sender import Commander
from tests.support.programs import PYTHON_PATH, Program, eventually
from trainmedic.wire import envelope

RANKS = 2
PROGRAM = Path(__file__).with_name("ranks.py")
LOADING = 120.0  # seconds, for both processes to import their frameworks on a busy machine


@dataclass
class Story:
    """What became of the commands, by rank, and what each rank saw."""

    replies: dict[str, dict[int | None, envelope.Reply]]
    lines: list[list[dict[str, Any]]]

    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines[0] if "step" in line]


@pytest.fixture(scope="module")
def stories(shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Story]:
    """One start of the processes for both frameworks, as loading those takes most of the time."""
    if shared_redis.process is None:
        shared_redis.start()
    directory = tmp_path_factory.mktemp("ranks")
    environment = {
        "PYTHONPATH": PYTHON_PATH,
        "TRAINMEDIC_REDIS_URL": shared_redis.url,
        "OMP_NUM_THREADS": "1",
    }
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
    with Program([sys.executable, *launcher, PROGRAM], directory / "log", environment) as torchrun:
        stories = {job: command(job, directory, shared_redis.url, torchrun) for job in ("huggingface", "lightning")}
        assert torchrun.process.wait(LOADING) == 0, torchrun.tail()
    return stories


def command(job: str, directory: Path, url: str, torchrun: Program) -> Story:
    """Halve the learning rate, go back once there is a checkpoint, and once more to one that is damaged; stop."""
    commander = Commander(url, job)

    def done(action: str, **params: Any) -> dict[int | None, envelope.Reply]:
        sent = commander.send(action, LOADING, **params)

        def final() -> list[envelope.Reply] | None:
            assert torchrun.process.poll() is None, torchrun.tail()
            replies = [reply for reply in commander.replies(sent) if reply.is_final]
            return replies if {reply.rank for reply in replies} == set(range(RANKS)) else None

        try:
            return {reply.rank: reply for reply in eventually(final, LOADING, f"both ranks answer {action}", 0.05)}
        except AssertionError as error:
            raise AssertionError(f"{error}\n{commander.replies(sent)}\n{torchrun.tail()}") from error

    try:
        replies = {"scale_lr": done("job.scale_lr", factor=0.5)}
        eventually(lambda: list((directory / job / "out").glob("*[=-]5*")), LOADING, "a checkpoint", 0.05)
        replies["rollback"] = done("job.rollback")
        replies["past_damage"] = done("job.rollback", step=damaged(directory / job / "out"))
        replies["stop"] = done("job.stop")
    finally:
        commander.close()
    logs = [directory / f"{job}-{rank}.jsonl" for rank in range(RANKS)]
    eventually(lambda: all('"ended"' in log.read_text() for log in logs), LOADING, f"the ranks of {job} end")
    return Story(replies, [[json.loads(line) for line in log.read_text().splitlines()] for log in logs])


def damaged(checkpoints: Path) -> int:
    """Flip a bit of a weight in the third newest checkpoint, once there are so many, and return its step."""

    def complete() -> list[tuple[int, Path]] | None:
        names = {
            path: re.search(r"(?:checkpoint-|step=)(\d+)(?:\.ckpt)?$", path.name) for path in checkpoints.iterdir()
        }
        found = sorted((int(name[1]), path) for path, name in names.items() if name)
        return found if len(found) >= 4 else None

    step, path = eventually(complete, LOADING, "four checkpoints", 0.05)[-3]
    flip_huggingface(path) if path.is_dir() else flip_lightning(path)
    return step


@pytest.mark.parametrize("job", ["huggingface", "lightning"])
def test_all_ranks_carry_out_each_command_at_the_same_step(stories: dict[str, Story], job: str) -> None:
    """Each rank answers for itself, with the same step and output, whether or not the command needs a restart."""
    story = stories[job]
    for action, replies in story.replies.items():
        assert {rank: reply.status for rank, reply in replies.items()} == {0: "applied", 1: "applied"}, action
        assert replies[0].output == replies[1].output
    assert story.lines[0] == story.lines[1]


@pytest.mark.parametrize("job", ["huggingface", "lightning"])
def test_all_ranks_skip_a_damaged_checkpoint_together(stories: dict[str, Story], job: str) -> None:
    """None of them does a step with data loaded from it."""
    story = stories[job]
    steps, output = story.steps(), story.replies["past_damage"][0].output
    (why,) = output["unusable"]
    assert "was loaded otherwise than it was saved: 1 of" in why
    assert output["verified"]["parameters"]["agreed"] == output["verified"]["parameters"]["compared"] > 0
    back = [(before, after) for before, after in itertools.pairwise(steps) if after != before + 1]
    assert back[1:] == [(output["left_step"], output["checkpoint_step"] + 1)]


@pytest.mark.parametrize("job", ["huggingface", "lightning"])
def test_all_ranks_roll_back_once_to_the_same_checkpoint(stories: dict[str, Story], job: str) -> None:
    """The loop restarts on all of them, and continues with the halved rate until it is told to stop."""
    story = stories[job]
    steps, output = story.steps(), story.replies["rollback"][0].output
    for compared in output["verified"].values():
        assert compared["agreed"] == compared["compared"] > 0
    back = [(before, after) for before, after in itertools.pairwise(steps) if after != before + 1]
    assert back[0] == (output["left_step"], output["checkpoint_step"] + 1)
    rates = [line["rate"] for line in story.lines[0] if "rate" in line]
    halved = story.replies["scale_lr"][0].output["step"]
    assert rates == [rates[0]] * halved + [rates[0] / 2] * (len(rates) - halved)
    assert story.lines[0][-1] == {"ended": story.replies["stop"][0].output["step"]}
