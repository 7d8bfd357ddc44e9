"""What is answered to loops of many shapes is what has become of them: the next losses, and the next rates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainmedic
from tests.integration.plain_torch import stranger_loops as loops
from tests.integration.plain_torch.stranger_loops import LOOPS, Course
from tests.support.command_sender import Commander, Sent

Loop = Callable[[trainmedic.Medic, Path, Course], None]

pytestmark = [  # of PyTorch, when it compiles
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


_calm: dict[Loop, Course] = {}  # the courses without commands


class Stranger:
    """Trains one loop, again and again from the same random numbers."""

    def __init__(self, loop: Loop, commander: Commander, medic: trainmedic.Medic, directory: Path) -> None:
        self.loop, self.commander, self.medic, self.directory = loop, commander, medic, directory
        self.sent = Sent(commander, medic)

    def train(self, name: str, acts: dict[int, Any] | None = None, steps: int = 60) -> Course:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        course = Course(steps, acts)
        self.loop(self.medic, self.directory / name, course)
        return course

    def calm(self) -> Course:
        if self.loop not in _calm:
            _calm[self.loop] = self.train("calm")
        return _calm[self.loop]


@pytest.fixture(params=LOOPS, ids=lambda loop: loop.__name__)
def stranger(request: pytest.FixtureRequest, commander: Commander, medic: trainmedic.Medic, tmp_path: Path) -> Stranger:
    return Stranger(request.param, commander, medic, tmp_path)


def ratios(found: Course, calm: Course, steps: range) -> list[float]:
    """Of all groups' rates, without repeating one."""
    pairs = [pair for step in steps for pair in zip(found.rates[step], calm.rates[step], strict=True)]
    return sorted({round(one / other, 6) for one, other in pairs})


def test_a_rollback_is_applied_if_the_same_losses_follow(stranger: Stranger) -> None:
    calm = stranger.calm()
    back = stranger.train("back", {31: stranger.sent("job.rollback", step=20)})
    (reply,) = stranger.sent.replies()
    assert reply.output["step"] == 20
    assert reply.status == ("applied" if back.losses == calm.losses else "failed"), reply.output
    assert (back.losses == calm.losses) == (stranger.loop is not loops.unknown_schedulers)
    losses = reply.output["verified"]["losses"]
    assert losses["compared"] > (10 if reply.status == "applied" else 1)


@pytest.mark.parametrize("at", [12, 31])
def test_a_scaled_rate_is_applied_where_it_is_used(stranger: Stranger, at: int) -> None:
    """Each group uses it from the next update to that of the undo; then the rates are as without it."""
    undo_at = at + 15
    scale, undo = stranger.sent("job.scale_lr", factor=0.5), stranger.sent.undo(0, "job.scale_lr", factor=2.0)
    calm, scaled = stranger.calm(), stranger.train("scaled", {at: scale, undo_at: undo})
    first, second = stranger.sent.replies()
    assert ratios(scaled, calm, range(1, at + 1)) == [1.0]
    is_used = ratios(scaled, calm, range(at + 1, undo_at + 1)) == [0.5]
    assert first.status == ("applied" if is_used else "failed"), first.output
    sets_rates = stranger.loop in (loops.unknown_schedulers, loops.half_scaled, loops.dampened)
    assert is_used == (not sets_rates and not (stranger.loop is loops.detector and at < 25))
    assert ratios(scaled, calm, range((undo_at if is_used else at + 2) + 1, 61)) == [1.0]
    assert second.status == "applied"
    assert ("nothing_to_undo" in second.output) == (not is_used)
    if is_used:
        assert first.output["verified"]["learning_rate"]["updates"] == 2


def test_a_restart_resumes_in_the_middle_of_an_epoch(stranger: Stranger) -> None:
    if stranger.loop is loops.unknown_schedulers:
        pytest.skip("nobody saves its schedules")
    calm = stranger.calm()
    stranger.train("ended", steps=33)
    resumed = stranger.train("ended")
    assert min(resumed.losses) == 31
    assert resumed.losses == {step: calm.losses[step] for step in range(31, 61)}


@pytest.mark.parametrize("stranger", [loops.compiled, loops.updated, loops.self_distilled], indirect=True)
def test_a_scaled_rate_outlives_a_rollback_and_a_restart_once(stranger: Stranger) -> None:
    """From the first step on, once, whether the checkpoint was written before or after the change."""
    half = stranger.sent("job.scale_lr", factor=0.5)
    calm, back = stranger.calm(), stranger.train("back", {22: half, 35: stranger.sent("job.rollback", step=20)})
    assert [reply.status for reply in stranger.sent.replies()] == ["applied", "applied"]
    assert ratios(back, calm, range(21, 61)) == [0.5]
    stranger.train("ended", {22: half}, steps=33)
    resumed = stranger.train("ended")
    assert min(resumed.rates) == 31
    assert ratios(resumed, calm, range(31, 61)) == [0.5]


@pytest.mark.parametrize("stranger", [loops.detector], indirect=True)
def test_a_warmup_in_the_loop_does_not_rule_out_later_commands(stranger: Stranger) -> None:
    half = stranger.sent("job.scale_lr", factor=0.5)
    calm, scaled = stranger.calm(), stranger.train("scaled", {12: half, 40: half})
    assert [reply.status for reply in stranger.sent.replies()] == ["failed", "applied"]
    assert ratios(scaled, calm, range(41, 61)) == [0.5]


@pytest.mark.parametrize("stranger", [loops.compiled], indirect=True)
def test_a_compiled_update_is_not_compiled_again_for_its_hooks(stranger: Stranger) -> None:
    """Their numbers change at each step."""
    frames = torch._dynamo.utils.counters["frames"]
    compiled = []
    for steps in (5, 40):
        before = frames["total"]
        stranger.train(f"of-{steps}", steps=steps)
        compiled.append(frames["total"] - before)
    assert compiled[0] == compiled[1]
