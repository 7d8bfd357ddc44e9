"""The proof of a rollback is itself proven: whatever part of it is broken on purpose, an answer becomes untrue.

Each scenario is a small training in which something does or does not go back, and `hold` compares its answer with what
the loop has seen. With the proof as it is every scenario holds. With one part of it broken, the scenario that needs
that part must fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainmedic
import trainmedic.torch
from tests.integration.plain_torch.test_carried_state import BATCH, Looped, Loss, Recurrent, squared
from tests.support.command_sender import Commander
from trainmedic.job.loss_log import LossComparison, LossLog
from trainmedic.recovery import batch_log
from trainmedic.torch import carried_state, carried_values, loss_course, randomness, rate_commands, verification
from trainmedic.torch.checkpoints import digests, loading
from trainmedic.torch.learning_rate import LearningRate
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire.envelope import APPLIED, FAILED, Reply

STEPS, AT, BACK = 45, 38, 10


class Untrue(AssertionError):
    """An answer says what did not happen."""


def hold(training: Looped, reply: Reply) -> None:
    """Compare an answer to a rollback with the losses that the loop has seen. Raises Untrue."""
    first: dict[int, float] = {}
    again: dict[int, float] = {}
    for step, loss in training.losses:
        (again if step in first and BACK < step <= BACK + 20 else first)[step] = loss
    compared = {step: loss for step, loss in again.items() if math.isfinite(loss)}
    agreed = [step for step, loss in compared.items() if loss == first[step]]
    holds = len(agreed) == len(again)
    if (reply.status == APPLIED) is not holds or reply.status not in (APPLIED, FAILED):
        raise Untrue(f"{reply.status}, and {len(agreed)} of {len(again)} losses were as before: {reply.output}")
    verified = reply.output["verified"]
    if holds and (verified["losses"]["compared"], verified["losses"]["agreed"]) != (len(again), len(agreed)):
        raise Untrue(f"{len(again)} losses came again, and the answer says {verified['losses']}")
    if holds and (verified["batches"]["compared"], verified["batches"]["agreed"]) != (16, 16):
        raise Untrue(f"16 batches came again, and the answer says {verified['batches']}")
    if not 0 < verified["parameters"]["compared"] == verified["parameters"]["agreed"]:
        raise Untrue(f"the answer says of the parameters: {verified['parameters']}")


class Scene:
    """What a scenario is made with."""

    def __init__(self, commander: Commander, medic: trainmedic.Medic, directory: Path) -> None:
        self.make: Callable[..., Looped] = lambda model, **more: Looped(commander, medic, directory, model, **more)


def train(scene: Scene, model: nn.Module, loss_of: Loss = squared, **more: Any) -> None:
    training = scene.make(model, **more)
    try:
        reply = training.train(loss_of, steps=STEPS, at=AT)
        hold(training, reply)
    finally:
        training.run.close()


def calm(scene: Scene) -> None:
    """All goes back, with dropout."""
    train(scene, nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3)))


def recurrent(scene: Scene) -> None:
    """All goes back, with a hidden state."""
    train(scene, Recurrent())


def unnamed(scene: Scene) -> None:
    """The loop carries a value that nobody can see."""
    hidden = [torch.zeros(3)]

    def loss_of(model: nn.Module, batch: torch.Tensor) -> Any:
        out: torch.Tensor = model(batch)
        hidden[0] = 0.5 * hidden[0] + out.detach().mean(0)
        return (out + hidden[0]).square().mean()

    train(scene, nn.Linear(3, 3), loss_of)


def not_finite(scene: Scene) -> None:
    """Such a value is spoiled in the course, and stays so."""
    hidden = [torch.zeros(3)]

    def loss_of(model: nn.Module, batch: torch.Tensor) -> Any:
        if scene_step(model) == AT:
            hidden[0] = torch.full((3,), math.nan)
        return (model(batch) + hidden[0]).square().mean()

    counted = {"calls": 0}

    def scene_step(model: nn.Module) -> int:
        counted["calls"] += 1
        return counted["calls"]

    train(scene, nn.Linear(3, 3), loss_of)


def spoiled_late(scene: Scene) -> None:
    """The weights change without a word, six steps after the rollback."""
    counted = {"calls": 0}

    def loss_of(model: nn.Module, batch: torch.Tensor) -> Any:
        counted["calls"] += 1
        if counted["calls"] == AT + 6:
            with torch.no_grad():
                model.weight.add_(0.5)  # type: ignore[operator]
        return squared(model, batch)

    train(scene, nn.Linear(3, 3), loss_of)


class Liar:
    """It says that it keeps its place, and gives other batches."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Any:
        while True:
            self.drawn += 1
            yield BATCH + self.drawn / 50

    def state_dict(self) -> dict[str, int]:
        return {"place": 3}

    def load_state_dict(self, state: Any) -> None:
        pass


def other_batches(scene: Scene) -> None:
    train(scene, nn.Linear(3, 3), loader=Liar())


def forgetful(scene: Scene) -> None:
    """The user's setter keeps nothing, though no loss shows it."""
    counted = [0]

    def count() -> int:
        counted[0] += 1
        return counted[0]

    training = scene.make(nn.Linear(3, 3), also={"count": (count, lambda value: None)})
    try:
        reply = training.train(squared, steps=STEPS, at=AT)
        if reply.status != FAILED:
            raise Untrue(f"{reply.status}, and the value is another: {reply.output}")
    finally:
        training.run.close()


def own_rate(scene: Scene) -> None:
    """The loop sets its rate at each step, and knows nothing of a factor."""
    training = scene.make(nn.Linear(3, 3))
    sent, used = "", []
    try:
        for batch in training.run.batches(steps=12):
            with training.run.step() as step:
                training.optimizer.param_groups[0]["lr"] = 0.01
                loss = squared(training.model, batch)
                loss.backward()
                used.append(training.optimizer.param_groups[0]["lr"])
                training.optimizer.step()
                training.optimizer.zero_grad()
                step.report(loss=loss)
                if step.number == 5:
                    sent = training.commander.send_and_wait(training.medic, "job.scale_lr", factor=0.5)
        reply = training.commander.final(sent)
        if (reply.status == APPLIED) is not (used[-1] == 0.005):
            raise Untrue(f"{reply.status}, and the rate in use is {used[-1]}")
    finally:
        training.run.close()


Scenario = Callable[[Scene], None]
SCENARIOS: tuple[Scenario, ...] = (
    *(calm, recurrent, unnamed, not_finite, spoiled_late, other_batches, forgetful, own_rate),
)


@pytest.fixture
def scene(commander: Commander, medic: trainmedic.Medic, tmp_path: Path) -> Scene:
    return Scene(commander, medic, tmp_path)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_the_proof_covers_every_answer(scene: Scene, scenario: Scenario) -> None:
    scenario(scene)


def _no_parameters(patch: pytest.MonkeyPatch) -> None:
    """The model is not loaded, every digest counts as the same, and no loss is compared."""
    _wrong_load(patch)
    patch.setattr(LossComparison, "problem", property(lambda self: ""))


def _wrong_load(patch: pytest.MonkeyPatch) -> None:
    restore = StateParts.restore

    def only_optimizer(self: StateParts, states: Any) -> None:
        restore(self, {**states, "model": self.by_name["model"].state_dict()})

    patch.setattr(StateParts, "restore", only_optimizer)
    patch.setattr(loading, "compare_with", lambda kept, parts: digests.DigestComparison(len(kept), ()))


def _no_moments(patch: pytest.MonkeyPatch) -> None:
    """The optimizer is not loaded, and every digest counts as the same: the second loss shows it."""
    restore = StateParts.restore

    def only_model(self: StateParts, states: Any) -> None:
        restore(self, {**states, "optimizer": self.by_name["optimizer"].state_dict()})

    patch.setattr(StateParts, "restore", only_model)
    patch.setattr(loading, "compare_with", lambda kept, parts: digests.DigestComparison(len(kept), ()))
    patch.setattr(LossComparison, "_steps_that_must_agree", lambda self: frozenset(sorted(self._expected)[:1]))


def _only_first_loss(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LossComparison, "_steps_that_must_agree", lambda self: frozenset(sorted(self._expected)[:1]))


def _wide_tolerance(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loss_course, "tolerance_of", lambda parts: 1.0)


def _nothing_expected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loss_course, "_why_not_comparable", lambda *given: "nothing is compared")


def _losses_forgotten(patch: pytest.MonkeyPatch) -> None:
    note = LossLog.note
    patch.setattr(LossLog, "note", lambda self, step, loss: None if step % 2 else note(self, step, loss))


def _nan_is_fine(patch: pytest.MonkeyPatch) -> None:
    add = LossComparison.add
    patch.setattr(
        LossComparison, "add", lambda self, step, loss: add(self, step, loss) if math.isfinite(loss) else None
    )


def _losses_not_judged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LossComparison, "problem", property(lambda self: ""))


def _answered_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verification, "_LONGEST", 0.0)
    patch.setattr(verification, "_LONGEST_FOR_LOSSES", 0.0)


def _boundary_tells_nothing(patch: pytest.MonkeyPatch) -> None:
    """Losses are never handed on."""
    patch.setattr(LossLog, "note", lambda self, step, loss: None)


def _batches_not_judged(patch: pytest.MonkeyPatch) -> None:
    """Nor are losses, which would show it."""
    patch.setattr(batch_log.BatchComparison, "_agrees", lambda self, number, left_out: True)
    patch.setattr(LossComparison, "problem", property(lambda self: ""))


def _batches_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch_log, "MOST_COMPARED", 5)


def _random_numbers_kept(patch: pytest.MonkeyPatch) -> None:
    """They do not go back, and no loss is compared."""
    patch.setattr(randomness, "restore", lambda state: None)
    patch.setattr(LossComparison, "problem", property(lambda self: ""))


def _carried_kept(patch: pytest.MonkeyPatch) -> None:
    """Carried state does not go back, and no loss is compared."""
    patch.setattr(carried_state.CarriedState, "put_back", lambda self, held: {})
    patch.setattr(LossComparison, "problem", property(lambda self: ""))


def _carried_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(carried_values, "is_same", lambda one, other: True)


def _rate_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LearningRate, "overwritten", lambda self: None)


def _rate_answered_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rate_commands.RateCommands, "_check_overwritten", lambda self, pending: None)


BREAKS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], Scenario], ...] = (
    (_no_parameters, calm),
    (_no_moments, calm),
    (_only_first_loss, spoiled_late),
    (_wide_tolerance, unnamed),
    (_nothing_expected, unnamed),
    (_losses_forgotten, calm),
    (_nan_is_fine, not_finite),
    (_losses_not_judged, unnamed),
    (_answered_at_once, spoiled_late),
    (_boundary_tells_nothing, spoiled_late),
    (_batches_not_judged, other_batches),
    (_batches_forgotten, calm),
    (_random_numbers_kept, calm),
    (_carried_kept, recurrent),
    (_carried_not_compared, forgetful),
    (_rate_not_seen, own_rate),
    (_rate_answered_at_once, own_rate),
)


def test_losses_alone_show_a_wrong_load(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are a proof in addition to the digests: without those the answer is still true."""
    with monkeypatch.context() as patch:
        _wrong_load(patch)
        calm(scene)


@pytest.mark.parametrize(("broken", "scenario"), BREAKS, ids=[each.__name__.strip("_") for each, _ in BREAKS])
def test_a_broken_proof_is_caught(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None], scenario: Scenario
) -> None:
    with monkeypatch.context() as patch:
        broken(patch)
        try:
            scenario(scene)
        except AssertionError:
            return
        except KeyError:  # an answer without what it was to say
            return
    pytest.fail(f"{scenario.__name__} holds though {broken.__name__} was broken")
