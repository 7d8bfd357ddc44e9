"""A loop that sets its learning rate by itself: a scaled rate is used by the updates, or the answer says that it is
not; and no undo multiplies a rate that was not scaled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import trainmedic
import trainmedic.torch
from tests.support.command_sender import Commander, Sent
from trainmedic.torch import rate_commands
from trainmedic.torch.answer_timer import AnswerTimer
from trainmedic.torch.steps import Step
from trainmedic.torch.verification import EPOCHS_ENDED, TOO_SLOW

Rate = Callable[["Own", Step], None]


def computed(step: int) -> float:
    return 0.1 * 0.99**step


def by_gradient(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class SelfRated(torch.optim.SGD):
    """As Adafactor's ``relative_step``: the rate falls with the number of updates, whatever ``lr`` is."""

    def __init__(self, parameters: Any, lr: float | None = None) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0].update(lr=lr, relative_step=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            parameter.sub_(0.1 * parameter.grad / state["step"] ** 0.5)


class Own:
    """A loop that calls `set_rate` before each update and `after` each of them. ``used`` are the rates by update."""

    def __init__(self, commander: Commander, medic: trainmedic.Medic, directory: Path, **more: Any) -> None:
        torch.set_num_threads(1)
        self.commander, self.medic = commander, medic
        self.model = nn.Linear(3, 1)
        self.optimizer = more.pop("optimizer", by_gradient)(self.model.parameters())
        self.used: dict[int, float] = {}
        self.sent = Sent(commander, medic)
        make = more.pop("scheduler", None)
        self.scheduler: Any = make(self.optimizer) if make is not None else None
        self.run = trainmedic.torch.attach(
            medic,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=[torch.ones(2, 3)] * 10,
            checkpoints=directory,
            checkpoint_every=10,
            **more,
        )

    def set(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def train(
        self, steps: int, set_rate: Rate, at: dict[int, Callable[[], Any]], after: Callable[[], Any] = int
    ) -> None:
        waiting = dict(at)
        for batch in self.run.batches(steps=steps):
            with self.run.step() as step:
                set_rate(self, step)
                loss = self.model(batch).square().mean()
                loss.backward()
                self.used[step.number] = self.optimizer.param_groups[0]["lr"]
                self.optimizer.step()
                self.optimizer.zero_grad()
                step.report(loss=loss)
                waiting.pop(step.number, int)()
            after()


@pytest.fixture
def own(commander: Commander, medic: trainmedic.Medic, tmp_path: Path) -> Iterator[Callable[..., Own]]:
    made: list[Own] = []

    def make(**more: Any) -> Own:
        made.append(Own(commander, medic, tmp_path, **more))
        return made[-1]

    yield make
    for each in made:
        each.run.close()


def deaf(own: Own, step: Step) -> None:
    own.set(computed(step.number))


def by_step(own: Own, step: Step) -> None:
    own.set(step.learning_rate(computed(step.number)))


def by_run(own: Own, step: Step) -> None:
    own.set(own.run.learning_rate(computed(step.number)))


def by_scale(own: Own, step: Step) -> None:
    own.set(own.run.lr_scale * computed(step.number))


def never(own: Own, step: Step) -> None:
    """The rate stays what it is."""


def test_a_rate_that_the_loop_overwrites_is_never_applied(own: Callable[..., Own]) -> None:
    """nanoGPT, llm.c and modded-nanogpt do so. The next such command is answered at once and changes nothing."""
    loop = own()
    loop.train(20, deaf, {5: loop.sent("job.scale_lr", factor=0.5), 12: loop.sent("job.scale_lr", factor=0.5)})
    first, second = loop.sent.replies()
    assert (first.status, second.status) == ("failed", "unsupported")
    assert "the loop set the learning rate to" in first.output["reason"]
    assert "run.learning_rate(value)" in first.output["reason"]
    assert loop.used == {step: computed(step) for step in range(1, 21)}
    assert loop.run.training.rate.scale == 1.0


def test_the_rate_of_an_optimizer_that_the_loop_does_not_step_is_never_applied(own: Callable[..., Own]) -> None:
    """Some scripts recreate the optimizer after `attach`."""
    loop = own()
    given, loop.optimizer = loop.optimizer, torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.train(30, never, {5: loop.sent("job.scale_lr", factor=0.5)})
    reply = loop.sent.reply()
    assert reply.status == "failed"
    assert "another optimizer" in reply.output["reason"]
    assert (loop.run.training.rate.scale, given.param_groups[0]["lr"], set(loop.used.values())) == (1.0, 0.1, {0.1})


def test_an_optimizer_that_the_loop_replaces_later_is_not_scaled(own: Callable[..., Own]) -> None:
    """As where Adam is followed by SGD. The change before it was applied, and its undo finds a rate to restore."""
    loop = own()
    given = loop.optimizer

    def replace() -> None:
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)

    half = loop.sent("job.scale_lr", factor=0.5)
    undo = loop.sent.undo(0, "job.scale_lr", factor=2.0)
    loop.train(60, never, {5: half, 10: replace, 20: half, 30: undo})
    replies = loop.sent.replies()
    assert [reply.status for reply in replies] == ["applied", "failed", "applied"]
    assert replies[0].output["verified"]["learning_rate"]["updates"] == 2
    assert "another optimizer" in replies[1].output["reason"]
    assert (loop.run.training.rate.scale, given.param_groups[0]["lr"]) == (1.0, 0.1)


def test_an_optimizer_of_other_parameters_does_not_confirm_a_rate(own: Callable[..., Own]) -> None:
    # As of a discriminator, in a loop that updates the scaled one's parameters by a method of its own.
    loop = own()
    loop.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    loop.train(30, never, {5: loop.sent("job.scale_lr", factor=0.5)})
    reply = loop.sent.reply()
    assert reply.status == "applied"
    assert "no update of the optimizer was observed" in reply.output["verified"]["learning_rate"]["why"]
    assert loop.run.training.rate.scale == 0.5


def test_a_late_answer_defers_the_rate_of_an_unused_optimizer_to_the_second_boundary(
    own: Callable[..., Own], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A rank that is late for itself must not change a rate that the others keep.
    monkeypatch.setattr(rate_commands, "_LONGEST", -1.0)
    loop = own()
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    scales: dict[int, float] = {}
    at = {5: loop.sent("job.scale_lr", factor=0.5)}

    def note() -> None:
        scales[len(scales) + 1] = loop.run.training.rate.scale

    loop.train(10, never, at, after=note)
    assert loop.sent.reply().status == "applied"
    assert [scales[step] for step in (5, 6, 7)] == [0.5, 0.5, 1.0]
    assert "was answered applied, but the loop steps another optimizer" in caplog.text


@pytest.mark.parametrize("set_rate", [by_step, by_run, by_scale])
def test_a_loop_that_asks_for_the_factor_uses_it(own: Callable[..., Own], set_rate: Rate) -> None:
    """The factor holds from the next update until the undo, to the bit."""
    loop = own()
    loop.train(
        20,
        set_rate,
        {5: loop.sent("job.scale_lr", factor=0.5), 12: loop.sent.undo(0, "job.scale_lr", factor=2.0)},
    )
    first, second = loop.sent.replies()
    assert (first.status, second.status) == ("applied", "applied")
    assert first.output["verified"]["learning_rate"] == {"updates": 2, "used": 0.5 * computed(7)}
    assert loop.used == {step: (0.5 if 5 < step <= 12 else 1.0) * computed(step) for step in range(1, 21)}


def test_a_scheduler_unknown_to_attach_is_detected(own: Callable[..., Own]) -> None:
    """It moves the rate only after the first update."""
    loop = own()
    scheduler = lr_scheduler.LambdaLR(loop.optimizer, lambda step: 0.99**step)
    loop.train(20, never, {5: loop.sent("job.scale_lr", factor=0.5)}, after=scheduler.step)
    (reply,) = loop.sent.replies()
    assert reply.status == "failed"
    assert loop.used[20] == pytest.approx(0.1 * 0.99**19)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 40),
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.99),
    ],
)
def test_after_a_failure_nothing_stays_scaled(own: Callable[..., Own], make: Callable[..., Any]) -> None:
    """These schedulers compute each rate from the previous one, so the factor would stay in it permanently."""
    loop, undisturbed = own(), own()
    scheduler, other = make(loop.optimizer), make(undisturbed.optimizer)
    loop.train(20, never, {5: loop.sent("job.scale_lr", factor=0.5)}, after=scheduler.step)
    undisturbed.train(20, never, {}, after=other.step)
    assert loop.sent.replies()[0].status == "failed"
    assert [loop.used[step] for step in (5, 20)] == pytest.approx([undisturbed.used[step] for step in (5, 20)])


def test_a_group_that_the_loop_does_not_set_gets_its_rate_back(own: Callable[..., Own]) -> None:
    loop = own()
    weight, bias = loop.model.parameters()
    loop.optimizer.param_groups[0]["params"] = [weight]
    loop.optimizer.add_param_group({"params": [bias], "lr": 0.7})

    def first_group(loop: Own, step: Step) -> None:
        loop.optimizer.param_groups[0]["lr"] = computed(step.number)

    loop.train(20, first_group, {5: loop.sent("job.scale_lr", factor=0.3)})
    assert loop.sent.replies()[0].status == "failed"
    assert loop.used == {step: computed(step) for step in range(1, 21)}
    assert loop.optimizer.param_groups[1]["lr"] == 0.7


def test_a_scheduler_known_to_attach_is_followed(own: Callable[..., Own]) -> None:
    """It changes the rate by a large factor at that moment."""
    loop = own(scheduler=lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.1))
    loop.train(20, never, {5: loop.sent("job.scale_lr", factor=2.0)}, after=loop.scheduler.step)
    (reply,) = loop.sent.replies()
    assert reply.status == "applied"
    assert loop.used[8] == pytest.approx(0.02)


def test_a_hanging_step_keeps_its_rates_until_its_boundary(
    own: Callable[..., Own], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop sets one group, and derives the next rate of the other from its present one."""
    loop = own()
    weight, bias = loop.model.parameters()
    loop.optimizer.param_groups[0]["params"] = [weight]
    loop.optimizer.add_param_group({"params": [bias], "lr": 0.7})
    derived = loop.optimizer.param_groups[1]
    rates: dict[int, float] = {}
    timers: list[tuple[AnswerTimer, Callable[[], None]]] = []
    start = AnswerTimer.start

    def start_late(timer: AnswerTimer, seconds: float, act: Callable[[], None]) -> None:
        timers.append((timer, act))

    monkeypatch.setattr(AnswerTimer, "start", start_late)
    monkeypatch.setattr(rate_commands, "_LONGEST", 600.0)

    def first_group(loop: Own, step: Step) -> None:
        loop.optimizer.param_groups[0]["lr"] = computed(step.number)
        rates[step.number] = derived["lr"]

    def hang() -> None:
        present = derived["lr"]
        ((timer, act),) = timers
        start(timer, 0.0, act)
        assert loop.commander.final(loop.sent.ids[0]).status == "failed"
        assert loop.run.training.changes.scale("learning_rate") == 1.0  # a restart would not scale again
        derived["lr"] = present * 1.0

    loop.train(12, first_group, {5: loop.sent("job.scale_lr", factor=0.5, seconds=600), 6: hang})
    (reply,) = loop.sent.replies()
    assert "returns at the next step boundary" in reply.output["reason"]
    assert (reply.output["after"], reply.output["scale"]) == (computed(6), 0.5)
    assert rates == {step: 0.35 if step == 6 else 0.7 for step in range(1, 13)}
    assert loop.run.training.rate.scale == 1.0


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_step_that_fails_after_its_rate_was_overwritten_leaves_nothing_scaled(
    own: Callable[..., Own], is_answered: bool
) -> None:
    """The loop catches the error. The answer came before it, or comes with it."""
    loop = own()
    weight, bias = loop.model.parameters()
    loop.optimizer.param_groups[0]["params"] = [weight]
    loop.optimizer.add_param_group({"params": [bias], "lr": 0.7})

    def fail() -> None:
        if is_answered:
            assert loop.commander.final(loop.sent.ids[0]).status == "failed"
        raise FloatingPointError

    def first_group(loop: Own, step: Step) -> None:
        loop.optimizer.param_groups[0]["lr"] = computed(step.number)

    acts = {5: loop.sent("job.scale_lr", factor=0.5, seconds=6.5 if is_answered else 60), 6: fail}
    with pytest.raises(FloatingPointError):
        loop.train(12, first_group, acts)
    assert loop.optimizer.param_groups[1]["lr"] == 0.7
    loop.train(12, first_group, {})
    (reply,) = loop.sent.replies()
    assert reply.status == "failed"
    assert (loop.optimizer.param_groups[1]["lr"], loop.run.training.rate.scale) == (0.7, 1.0)
    assert loop.used[12] == computed(12)


@pytest.mark.parametrize("is_between", [False, True])
def test_a_scheduler_between_two_steps_is_reported(
    own: Callable[..., Own], caplog: pytest.LogCaptureFixture, is_between: bool
) -> None:
    """Checkpoints are written at a step's end, and lack what follows. A rollback within the loop is no such step."""
    loop = own(scheduler=lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.99))
    within: dict[int, Callable[[], Any]] = {} if is_between else dict.fromkeys(range(1, 31), loop.scheduler.step)
    loop.train(30, never, within, after=loop.scheduler.step if is_between else int)
    assert caplog.text.count("a scheduler steps between two steps") == is_between


def test_the_undo_leaves_a_rate_that_was_set_meanwhile(own: Callable[..., Own]) -> None:
    """The loop starts to set the rate only after the answer; the rate is not doubled."""
    loop = own()

    def late(own: Own, step: Step) -> None:
        if step.number == 10:
            own.set(0.03)

    orders = {3: loop.sent("job.scale_lr", factor=0.5), 14: loop.sent.undo(0, "job.scale_lr", factor=2.0)}
    loop.train(20, late, orders)
    first, second = loop.sent.replies()
    assert (first.status, second.status) == ("applied", "applied")
    assert loop.used[4] == 0.05
    assert set(list(loop.used.values())[9:]) == {0.03}
    assert "not changed" in second.output["left_alone"]


def by_epoch(own: Own, step: Step) -> None:
    """The first group alone, every 15 steps."""
    if step.number % 15 == 1:
        own.optimizer.param_groups[0]["lr"] = computed(step.number)


def test_a_factor_that_the_next_epoch_overwrites_is_no_longer_claimed(
    own: Callable[..., Own], caplog: pytest.LogCaptureFixture
) -> None:
    """A group that the loop does not set is restored at once, and so is a checkpoint from before."""
    loop = own()
    weight, bias = loop.model.parameters()
    loop.optimizer.param_groups[0]["params"] = [weight]
    loop.optimizer.add_param_group({"params": [bias], "lr": 0.7})
    others: dict[int, float] = {}

    def note(loop: Own, step: Step) -> None:
        by_epoch(loop, step)
        others[step.number] = loop.optimizer.param_groups[1]["lr"]

    again = loop.sent("job.scale_lr", factor=0.5)
    undo = loop.sent.undo(0, "job.scale_lr", factor=2.0)
    loop.train(15, note, {3: loop.sent("job.scale_lr", factor=0.5)})
    assert (loop.used[15], others[15], loop.run.training.rate.scale) == (0.5 * computed(1), 0.35, 0.5)
    loop.train(30, note, {17: again, 19: undo, 22: loop.sent("job.rollback", step=10)})
    first, second, third, back = loop.sent.replies()
    assert (first.status, second.status, third.status) == ("applied", "unsupported", "applied")
    assert "step.learning_rate(value)" in second.output["reason"]
    assert third.output["nothing_to_undo"]
    assert back.output["learning_rate"] == computed(1)
    assert [loop.used[step] for step in (12, 16, 30)] == [computed(1), computed(16), computed(16)]
    assert (others[12], others[16], others[17], loop.run.training.rate.scale) == (0.7, 0.7, 0.7, 1.0)
    assert caplog.text.count("the factor 0.5 is no longer active: the loop set the learning rate to") == 1


def test_a_rate_that_may_still_have_the_factor_is_reported(
    commander: Commander, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop may compute its next rate from the present one. The rate is kept, and one record reports it."""
    medic = commander.connect(log_dir=tmp_path / "logs")
    loop = Own(commander, medic, tmp_path / "saved")

    def decays(loop: Own, step: Step) -> None:
        if step.number % 10 == 0:
            loop.set(0.8 * loop.optimizer.param_groups[0]["lr"])

    loop.train(30, decays, {3: loop.sent("job.scale_lr", factor=0.5), 25: loop.sent("job.scale_lr", factor=0.5)})
    loop.run.close()
    medic.close()
    first, second = loop.sent.replies()
    assert (first.status, second.status) == ("applied", "unsupported")
    assert loop.used[30] == pytest.approx(0.05 * 0.8**3)
    told = "it is not known whether the factor 0.5 is still active: the loop set the learning rate to 0.04 instead of"
    assert caplog.text.count(told) == 1
    records = [
        json.loads(line) for file in (tmp_path / "logs").rglob("*.jsonl") for line in file.read_text().splitlines()
    ]
    (detected,) = [record for record in records if record.get("event") == "detected"]
    assert told in detected["message"]
    assert (detected["detector"], detected["step"]) == ("learning_rate", 10)


def test_a_constant_rate_is_seen_in_use(own: Callable[..., Own]) -> None:
    loop = own()
    loop.train(10, never, {3: loop.sent("job.scale_lr", factor=0.5)})
    (reply,) = loop.sent.replies()
    assert reply.status == "applied"
    assert reply.output["verified"]["learning_rate"] == {"updates": 2, "used": 0.05}
    assert (reply.output["before"], reply.output["after"]) == (0.1, 0.05)


@pytest.mark.parametrize(
    "make",
    [
        SelfRated,
        partial(SelfRated, lr=0.1),
        pytest.param(
            lambda parameters: torch.optim.Adafactor(parameters, lr=0.9),
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="since PyTorch 2.5"),
        ),
    ],
)
def test_a_rate_that_the_optimizer_computes_itself_is_not_scaled(own: Callable[..., Own], make: Any) -> None:
    """A rollback still works."""
    loop = own(optimizer=make)
    loop.train(20, never, {5: loop.sent("job.scale_lr", factor=0.5), 15: loop.sent("job.rollback", step=10)})
    scaled, back = loop.sent.replies()
    assert scaled.status == "unsupported"
    assert back.status == "applied"
    assert len(set(loop.used.values())) == 1


def test_a_rate_below_the_limit_of_the_optimizer_is_scaled(own: Callable[..., Own]) -> None:
    pytest.importorskip("torch.optim._adafactor")
    loop = own(optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.01))
    loop.train(10, never, {3: loop.sent("job.scale_lr", factor=0.5)})
    assert loop.sent.reply().status == "applied"


def test_without_an_update_the_answer_claims_none(own: Callable[..., Own]) -> None:
    """The loop ends first or is paused."""
    loop = own()
    loop.train(5, never, {5: loop.sent("job.scale_lr", factor=0.5)})
    (reply,) = loop.sent.replies()
    assert reply.output["verified"]["learning_rate"] == {"updates": 0, "why": "the loop ended"}


@pytest.mark.parametrize("set_rate", [deaf, by_step])
def test_the_end_of_an_epoch_is_not_the_end_of_the_loop(own: Callable[..., Own], set_rate: Rate) -> None:
    """A loop may call `batches` for each epoch; the command comes at the end of one."""
    loop = own()
    for epoch in range(3):
        act = loop.sent("job.scale_lr", factor=0.5) if epoch == 0 else int
        for batch in loop.run.batches(epochs=epoch + 1):
            with loop.run.step() as step:
                set_rate(loop, step)
                loop.model(batch).square().mean().backward()
                loop.used[step.number] = loop.optimizer.param_groups[0]["lr"]
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                if step.number == 10:
                    act()
    (reply,) = loop.sent.replies()
    scale = 0.5 if set_rate is by_step else 1.0
    assert reply.status == ("applied" if set_rate is by_step else "failed"), reply.output
    assert loop.used == {step: (scale if step > 10 else 1.0) * computed(step) for step in range(1, 31)}


def test_a_loop_that_ends_with_its_epochs_answers_when_the_run_closes(own: Callable[..., Own]) -> None:
    loop = own()
    for batch in loop.run.batches(epochs=1):
        with loop.run.step() as step:
            loop.model(batch).square().mean().backward()
            loop.optimizer.step()
            if step.number == 10:
                loop.sent("job.scale_lr", factor=0.5)()
    loop.run.close()
    (reply,) = loop.sent.replies()
    assert reply.output["verified"]["learning_rate"] == {"updates": 0, "why": "the run was closed"}


@pytest.mark.parametrize(("action", "value"), [("job.scale_lr", "learning_rate"), ("job.rollback", "losses")])
def test_an_answer_after_the_last_epoch_does_not_blame_slow_batches(
    own: Callable[..., Own], action: str, value: str
) -> None:
    """A loop that then continues does not keep the reason, either."""
    loop = own()
    params = {"factor": 0.5} if action == "job.scale_lr" else {"step": 8}
    for batch in loop.run.batches(epochs=1):
        with loop.run.step() as step:
            loss = loop.model(batch).square().mean()
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            step.report(loss=loss)
            if step.number == 9 + (action == "job.scale_lr") and not loop.sent.ids:
                # The answer is due 1.5 s later.
                loop.sent(action, **params, seconds=6.5)()  # type: ignore[arg-type]
        if step.number == 8:
            loop.run.checkpoint()
    reply = loop.sent.replies()[0]
    assert reply.output["verified"][value]["why"] == EPOCHS_ENDED, reply
    next(loop.run.batches(epochs=2))
    assert loop.run._rates.late_because == TOO_SLOW


@pytest.mark.parametrize("every", [2, 4])
def test_rollback_is_exact_with_undeclared_gradient_accumulation(
    own: Callable[..., Own], tmp_path: Path, every: int
) -> None:
    """Between two updates it neither saves nor rolls back, because gradients would be missing. The loop's
    own counter does not go back."""
    loop = own()
    losses: list[tuple[int, float]] = []
    sent = ""
    torch.manual_seed(1)
    for number, batch in enumerate(loop.run.batches(steps=60)):
        with loop.run.step() as step:
            loss = (loop.model(batch * (1 + step.number % 7)) - 1).square().mean() / every
            loss.backward()
            if (number + 1) % every == 0:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            step.report(loss=loss)
            losses.append((step.number, loss.item()))
            if step.number == 33 and not sent:
                sent = loop.commander.send_and_wait(loop.medic, "job.rollback", step=25)
    reply = loop.commander.final(sent)
    assert reply.status == "applied"
    assert reply.output["step"] % every == 0
    assert reply.output["left_step"] % every == 0
    before: dict[int, float] = {}
    assert all(before.setdefault(number, loss) == loss for number, loss in losses)
    assert reply.output["verified"]["losses"]["agreed"] == reply.output["verified"]["losses"]["compared"] > 5


def test_a_loop_that_starts_no_step_is_reported(own: Callable[..., Own], caplog: pytest.LogCaptureFixture) -> None:
    loop = own()
    for _ in loop.run.batches(epochs=20):
        pass
    assert caplog.text.count("drawn 50 batches and begun no step") == 1


def test_a_loop_that_only_evaluates_is_reported(own: Callable[..., Own], caplog: pytest.LogCaptureFixture) -> None:
    loop = own()
    for batch in loop.run.batches(steps=250):
        with loop.run.step() as step, torch.no_grad():
            step.report(loss=loop.model(batch).sum())
    assert caplog.text.count("100 steps ended without a step of the optimizer") == 1


def test_two_optimizers_at_one_boundary_are_one_update(
    commander: Commander, medic: trainmedic.Medic, tmp_path: Path
) -> None:
    """A GAN has two. A scheduler unknown to `attach` changes their rates only after the next boundary."""
    models = {name: nn.Linear(3, 1) for name in ("made", "judging")}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    schedulers = [lr_scheduler.LambdaLR(each, lambda step: 0.99**step) for each in optimizers.values()]
    run = trainmedic.torch.attach(medic, model=models, optimizer=optimizers, loader=[torch.ones(4, 3)])
    sent = ""
    for batch in run.batches(steps=12):
        with run.step() as step:
            for name, optimizer in optimizers.items():
                optimizer.zero_grad()
                models[name](batch).square().mean().backward()
                optimizer.step()
            if step.number == 5:
                sent = commander.send_and_wait(medic, "job.scale_lr", factor=0.5)
        for scheduler in schedulers if step.number % 2 == 0 else ():
            scheduler.step()
    run.close()
    reply = commander.final(sent)
    assert reply.status == "failed", reply.output
    assert run.lr_scale == 1.0


@pytest.mark.parametrize("heeds", [True, False])
def test_multiples_of_the_returned_rate_are_followed_through_a_jump(own: Callable[..., Own], heeds: bool) -> None:
    """Rates by layer are an example; the loop's rate falls to a tenth right after the command."""
    loop = own()
    weight, bias = loop.model.parameters()
    loop.optimizer.param_groups[0]["params"] = [weight]
    loop.optimizer.add_param_group({"params": [bias]})

    def by_layer(loop: Own, step: Step) -> None:
        value = 0.1 if step.number <= 5 else 0.01
        scaled = step.learning_rate(value)
        first, second = loop.optimizer.param_groups
        first["lr"], second["lr"] = scaled, 0.65 * (scaled if heeds else value)

    loop.train(10, by_layer, {5: loop.sent("job.scale_lr", factor=2.0)})
    assert loop.sent.reply().status == ("applied" if heeds else "failed")
    assert loop.used[10] == (0.02 if heeds else 0.01)


class RateLess(torch.optim.SGD):
    """An optimizer that drops the rates of its groups, and finds its own."""

    drops = False

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = None if self.drops else group["lr"]


def test_unreadable_rates_do_not_end_the_loop(own: Callable[..., Own]) -> None:
    loop = own()
    optimizer = loop.optimizer
    optimizer.__class__ = type("RateLess", (RateLess,), {"step": RateLess.step})
    torch.optim.Optimizer._patch_step_function(optimizer)

    def drop() -> None:
        optimizer.drops = True  # type: ignore[attr-defined]

    loop.train(10, never, {5: loop.sent("job.scale_lr", factor=0.5), 6: drop})
    (reply,) = loop.sent.replies()
    verified = reply.output["verified"]["learning_rate"]
    assert (reply.status, verified["updates"]) == ("applied", 1)
    assert "cannot be observed: TypeError" in verified["why"]
    assert len(loop.used) == 10


def test_a_group_added_while_a_change_is_observed_does_no_harm(own: Callable[..., Own]) -> None:
    loop = own(scheduler=lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=100))
    added = nn.Parameter(torch.ones(2))
    orders = {
        3: loop.sent("job.scale_lr", factor=0.5),
        4: lambda: loop.optimizer.add_param_group({"params": [added], "lr": 0.3}),
        9: loop.sent.undo(0, "job.scale_lr", factor=2.0),
    }
    loop.train(12, never, orders, after=loop.scheduler.step)
    assert [reply.status for reply in loop.sent.replies()] == ["applied", "applied"]
    assert [group["lr"] for group in loop.optimizer.param_groups] == [0.1, 0.3]


@pytest.mark.parametrize("sets", [False, True])
def test_two_changes_at_one_boundary_are_observed_together(
    commander: Commander, medic: trainmedic.Medic, tmp_path: Path, sets: bool
) -> None:
    """Both are in the rate that is used, or neither is applied and the loop's own rate stays unchanged."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = trainmedic.torch.attach(medic, model=model, optimizer=optimizer, loader=[torch.ones(4, 3)])
    sent: list[str] = []
    used: list[float] = []
    for batch in run.batches(steps=12):
        with run.step() as step:
            if sets:
                optimizer.param_groups[0]["lr"] = 0.1
            loss = model(batch).square().mean()
            loss.backward()
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            step.report(loss=loss)
            if step.number == 5:
                sent = [commander.send_and_wait(medic, "job.scale_lr", factor=factor) for factor in (0.5, 0.25)]
    replies = [commander.final(each) for each in sent]
    run.close()
    if sets:
        assert [reply.status for reply in replies] == ["failed", "failed"]
        assert used[-1] == 0.1
        assert run.lr_scale == 1.0
        return
    assert [reply.status for reply in replies] == ["applied", "applied"]
    assert [reply.output["scale"] for reply in replies] == [0.5, 0.125]
    for reply in replies:
        rate = reply.output["verified"]["learning_rate"]
        assert (rate["updates"], rate["used"]) == (2, pytest.approx(0.0125))
        assert "several changes" in rate["why"]
    assert used[-1] == pytest.approx(0.0125)
