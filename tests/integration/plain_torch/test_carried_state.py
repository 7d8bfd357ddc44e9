"""State that a loop carries from step to step goes back with a rollback, or the answer is not ``applied``."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainmedic
import trainmedic.torch
from tests.support.command_sender import Commander
from trainmedic.errors import ConfigurationError
from trainmedic.torch import carried_values
from trainmedic.torch.carried_state import CarriedState
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire.envelope import Reply

BATCH = torch.linspace(-1, 1, 12).reshape(4, 3)

Loss = Callable[[nn.Module, torch.Tensor], Any]


class Looped:
    """A training whose loss depends on carried state. ``losses`` are those of each step, as they came."""

    def __init__(self, commander: Commander, medic: trainmedic.Medic, directory: Path, model: nn.Module, **more: Any):
        torch.set_num_threads(1)
        torch.manual_seed(3)
        self.commander, self.medic, self.model = commander, medic, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = more.pop("loader", [BATCH + number / 50 for number in range(60)])
        self.run = trainmedic.torch.attach(
            medic,
            model=model,
            optimizer=self.optimizer,
            loader=loader,
            checkpoints=directory,
            checkpoint_every=10,
            keep=None,
            **more,
        )
        self.losses: list[tuple[int, float]] = []

    def train(self, loss_of: Loss, steps: int = 40, at: int = 18, to: int = 10, **params: Any) -> Reply:
        """Train so many steps; at one of them a rollback to another is ordered. Return the answer to it."""
        sent = ""
        for batch in self.run.batches(steps=steps):
            with self.run.step() as step:
                loss = loss_of(self.model, batch)
                step.backward(loss)
                step.update()
                step.report(loss=loss)
                self.losses.append((step.number, loss.item()))
                if step.number == at and not sent:
                    sent = self.commander.send_and_wait(self.medic, "job.rollback", step=to, **params)
        return self.commander.final(sent)

    def repeats(self) -> bool:
        """Whether each loss that came again was as before, to the bit."""
        before: dict[int, float] = {}
        return all(before.setdefault(step, loss) == loss for step, loss in self.losses)


@pytest.fixture
def looped(commander: Commander, medic: trainmedic.Medic, tmp_path: Path) -> Iterator[Callable[..., Looped]]:
    made: list[Looped] = []

    def make(model: nn.Module, **more: Any) -> Looped:
        made.append(Looped(commander, medic, tmp_path, model, **more))
        return made[-1]

    yield make
    for each in made:
        each.run.close()


def carried_of(reply: Reply) -> Mapping[str, Any]:
    found: Mapping[str, Any] = reply.output["verified"].get("carried", {})
    return found


class Recurrent(nn.Module):
    """It keeps the hidden state of its LSTM as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 1)
        self.hidden: Any = None

    def forward(self, batch: torch.Tensor) -> Any:
        out, (h, c) = self.lstm(batch[None], self.hidden)
        self.hidden = (h.detach(), c.detach())
        return self.head(out)


class Stateful(nn.Module):
    """It keeps a hidden state and defaults under names that an optimizer uses for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 5), nn.Linear(5, 1)
        self.state = torch.zeros(4, 5)
        self.defaults = {"gain": torch.ones(1)}

    def forward(self, batch: torch.Tensor) -> Any:
        self.state = self.cell(batch, self.state).detach() * self.defaults["gain"]
        self.defaults["gain"] = self.defaults["gain"] * 1.01
        return self.head(self.cell(batch, self.state))


class Caching(nn.Module):
    """It keeps keys in a list, and a running average in a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.cache: list[torch.Tensor] = []
        self.register_buffer("average", torch.zeros(3), persistent=False)

    def forward(self, batch: torch.Tensor) -> Any:
        keys = self.line(batch)
        average: Any = self.average
        average.mul_(0.9).add_(0.1 * keys.detach().mean(0))
        past = torch.stack(self.cache[-4:]).mean(0) if self.cache else torch.zeros_like(keys)
        self.cache.append(keys.detach())
        del self.cache[:-4]
        return keys + past + self.average


class Averaging(nn.Module):
    """It begins an average as something that is no tensor."""

    def __init__(self, start: Any) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.average = start

    def forward(self, batch: torch.Tensor) -> Any:
        keys = self.line(batch)
        mean = keys.detach().mean()
        if isinstance(self.average, list):
            self.average[0] = mean if self.average[0] is None else 0.9 * self.average[0] + 0.1 * mean
            return keys + self.average[0]
        if isinstance(self.average, tuple):
            self.average = (self.average[0] + 1, 0.9 * self.average[1] + 0.1 * mean)
            return keys + self.average[1]
        self.average = mean if self.average is None else 0.9 * self.average + 0.1 * mean
        return keys + self.average


def squared(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


@pytest.mark.parametrize(("model", "count"), [(Recurrent, 1), (Caching, 2), (Stateful, 2)])
def test_state_in_modules_is_found_and_restored(
    looped: Callable[..., Looped], model: Callable[[], nn.Module], count: int
) -> None:
    """This is a hidden state, a cache, and a buffer that no state_dict holds."""
    training = looped(model())
    reply = training.train(squared)
    assert (reply.status, carried_of(reply)) == ("applied", {"compared": count, "agreed": count})
    assert training.repeats()
    assert reply.output["verified"]["losses"]["compared"] == 8


def averaging(start: Any) -> Callable[[], nn.Module]:
    return lambda: Averaging(copy.copy(start))


AT_START = [Recurrent, *map(averaging, [None, 0.0, 0, [None, None], [0.0], (0, 0.0)])]


@pytest.mark.parametrize("model", AT_START)
def test_state_from_before_the_first_step_is_restored(
    looped: Callable[..., Looped], model: Callable[[], nn.Module]
) -> None:
    """The checkpoint of step 0 has no hidden state, and the loop needs its initial one."""
    training = looped(model())
    assert training.train(squared, steps=30, at=8, to=0).status == "applied"
    assert training.repeats()


def named_tensor() -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    value = torch.zeros(3)
    return value, lambda found: value.mul_(0.9).add_(found)


def named_buffer() -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    replay: deque[torch.Tensor] = deque(maxlen=5)

    def mix(found: torch.Tensor) -> Any:
        replay.append(found)
        return torch.stack(list(replay)).mean(0)

    return replay, mix


def named_dict() -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    held: dict[str, Any] = {"average": torch.zeros(3), "count": 0, "past": [torch.zeros(3)]}

    def mix(found: torch.Tensor) -> Any:
        held["count"] += 1
        held["average"] = held["average"] + (found - held["average"]) / held["count"]
        held["past"] = [*held["past"][-2:], found]
        return held["average"] + sum(held["past"])

    return held, mix


def named_functions() -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    hidden = [torch.zeros(3)]

    def put(value: torch.Tensor) -> None:
        hidden[0] = value

    def mix(found: torch.Tensor) -> Any:
        hidden[0] = 0.5 * hidden[0] + found
        return hidden[0]

    return (lambda: hidden[0], put), mix


def named_object() -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    class Average:
        def __init__(self) -> None:
            self.value, self.rate = torch.zeros(3), 0.9

    average = Average()

    def mix(found: torch.Tensor) -> Any:
        average.value = average.rate * average.value + found
        return average.value

    return average, mix


def named_loader() -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """As llm.c's: its place among tokens that are read from a file, counted by NumPy."""

    class Tokens:
        def __init__(self) -> None:
            self.tokens = numpy.frombuffer(numpy.arange(500, dtype=numpy.uint16).tobytes(), dtype=numpy.uint16)
            self.place = numpy.int32(0)

    loader = Tokens()

    def mix(found: torch.Tensor) -> Any:
        loader.place = loader.place + numpy.int32(3)
        assert loader.place.dtype == numpy.int32
        return torch.from_numpy(loader.tokens[loader.place : loader.place + 3].astype(numpy.float32)) / 100

    return loader, mix


def named_generator() -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    numbers = numpy.random.default_rng(5)
    return numbers, lambda found: torch.from_numpy(numbers.normal(size=3)).float()


NAMED = [named_tensor, named_buffer, named_dict, named_functions, named_object, named_loader, named_generator]


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("is_named", [True, False])
def test_state_that_the_loop_names_is_restored(
    looped: Callable[..., Looped], kind: Callable[[], Any], is_named: bool
) -> None:
    """Unnamed state is invisible: then the first loss shows the difference, and the answer is failed."""
    value, mix = kind()
    training = looped(nn.Linear(3, 3), also={"own": value} if is_named else None)

    def loss_of(model: nn.Module, batch: torch.Tensor) -> Any:
        out = model(batch)
        return (out + mix(out.detach().mean(0)).detach()).square().mean()

    reply = training.train(loss_of)
    assert training.repeats() is is_named
    if is_named:
        assert (reply.status, carried_of(reply)) == ("applied", {"compared": 1, "agreed": 1})
    else:
        assert reply.status == "failed"
        assert "the loss of step 11 is" in reply.output["reason"]
        assert "attach(also=...)" in reply.output["reason"]


class Noisy(Dataset[torch.Tensor]):
    """Its augmentation draws from generators of its own."""

    def __init__(self) -> None:
        self.mine = torch.Generator().manual_seed(1)
        self.transform = {"flip": random.Random(2), "crop": numpy.random.RandomState(3)}

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randn(3, generator=self.mine)
        shift = self.transform["flip"].random() + self.transform["crop"].rand()  # type: ignore[attr-defined]
        return noise + shift + index


def test_generators_of_the_data_set_are_restored(looped: Callable[..., Looped]) -> None:
    """These are torch's, Python's and NumPy's, wherever the data set holds them."""
    training = looped(nn.Linear(3, 3), loader=DataLoader(Noisy(), 4, shuffle=True))
    reply = training.train(squared)
    assert (reply.status, carried_of(reply)) == ("applied", {"compared": 3, "agreed": 3})
    assert training.repeats()


def test_the_hidden_state_survives_a_restart(looped: Callable[..., Looped]) -> None:
    """A new process continues with the hidden state of the checkpoint."""
    torch.manual_seed(5)
    first = looped(Recurrent())
    first.train(squared, steps=24)
    before = dict(first.losses)
    first.run.close()
    second = looped(Recurrent())
    assert second.run.resume() == 20
    for batch in second.run.batches(steps=24):
        with second.run.step() as step:
            loss = squared(second.model, batch)
            step.backward(loss)
            step.update()
            assert loss.item() == before[step.number]


def test_a_rate_in_a_tensor_stays_the_loops_own(looped: Callable[..., Looped]) -> None:
    """The loop updates a tensor that the optimizer must still use after a rollback."""
    training = looped(nn.Linear(3, 3))
    rate = torch.tensor(0.01)
    training.optimizer.param_groups[0]["lr"] = rate

    def loss_of(model: nn.Module, batch: torch.Tensor) -> Any:
        rate.fill_(0.01 / (1 + training.run.global_step))
        return squared(model, batch)

    assert training.train(loss_of).status == "applied"
    assert training.optimizer.param_groups[0]["lr"] is rate
    assert training.repeats()


def test_a_value_that_is_not_restored_is_reported(looped: Callable[..., Looped]) -> None:
    """A setter that stores nothing is not a rollback, whatever the losses say."""
    counted = [0]

    def count() -> int:
        counted[0] += 1
        return counted[0]

    reply = looped(nn.Linear(3, 3), also={"count": (count, lambda value: None)}).train(squared)
    assert reply.status == "failed"
    assert "carried state differs from what was saved: also.count" in reply.output["reason"]


@pytest.mark.parametrize("value", [3.0, "text", [object()], torch.zeros(2, device="meta")])
def test_state_that_cannot_be_carried_is_rejected(looped: Callable[..., Looped], value: Any) -> None:
    with pytest.raises(ConfigurationError, match="also: own"):
        looped(nn.Linear(3, 3), also={"own": value})


@pytest.mark.parametrize("skip", [0, 3])
def test_a_nan_loss_is_never_applied(looped: Callable[..., Looped], skip: int) -> None:
    """The carried state stays damaged: every loss is NaN after the rollback, also after a skip."""
    hidden = [torch.zeros(3)]
    training = looped(nn.Linear(3, 3))

    def loss_of(model: nn.Module, batch: torch.Tensor) -> Any:
        if training.run.global_step == 17:
            hidden[0] = torch.full((3,), float("nan"))
        return (model(batch) + hidden[0]).square().mean()

    reply = training.train(loss_of, steps=22, skip_batches=skip)
    assert reply.status == "failed"
    assert "is not a finite number, 1 step(s) after the checkpoint" in reply.output["reason"]


def test_views_of_freed_memory_are_ignored() -> None:
    """FSDP leaves such views in module attributes; reading one would crash the process."""
    weights = torch.randn(8)
    view = weights[2:6]
    weights.untyped_storage().resize_(0)
    module = torch.nn.Linear(2, 2)
    module.weights = view
    assert carried_values.is_freed(view)
    assert not carried_values.is_freed(torch.randn(3, 4).t()[1:])
    assert not carried_values.is_freed(torch.empty(0))
    with pytest.raises(TypeError):
        carried_values.take(view)
    carried = CarriedState(StateParts(model=module))
    carried.record_start()
    assert carried.take() == {}


class Counting(nn.Module):
    """It keeps numbers as plain attributes: a counter, a running mean, the last means in a list, and a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.calls = 0
        self.mean = 0.0
        self.last = [0.0, 0.0]
        self.width = 3
        self.name = "counting"

    def forward(self, batch: torch.Tensor) -> Any:
        out = self.line(batch)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * out.mean().item()
        self.last[self.calls % 2] = self.mean
        return out * (1 + self.mean + sum(self.last)) + 0.01 * (self.calls % 7)


def test_numbers_in_a_modules_attributes_are_restored(looped: Callable[..., Looped]) -> None:
    """They are found and compared, and every loss is as before."""
    training = looped(Counting())
    reply = training.train(squared)
    assert reply.status == "applied", reply.output
    assert training.repeats()
    assert carried_of(reply) == {"compared": 3, "agreed": 3}


def test_numbers_have_their_initial_values_after_a_rollback_to_the_start(looped: Callable[..., Looped]) -> None:
    """The checkpoint of step 0 holds none of them, because none had changed."""
    training = looped(Counting())
    reply = training.train(squared, steps=30, at=25, to=0)
    assert reply.status == "applied", reply.output
    assert training.repeats()


class Labelled:
    """An optimizer of the shape of modded-nanogpt's ``NorMuonAndAdam``: no groups, and states by parameter."""

    def __init__(self, parameters: list[nn.Parameter], rate: float) -> None:
        self.rates = dict.fromkeys(parameters, rate)
        self.param_states = {each: {"momentum": torch.zeros_like(each), "step": 0} for each in parameters}

    def state_dict(self) -> dict[str, Any]:
        return {"param_states": {id(each): state for each, state in self.param_states.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("it would find no parameter by its id in another process")

    @torch.no_grad()
    def step(self) -> None:
        for each, state in self.param_states.items():
            assert each.grad is not None
            state["momentum"].mul_(0.9).add_(each.grad)
            state["step"] += 1
            each.sub_(self.rates[each] * state["momentum"] / state["step"] ** 0.5)
            each.grad = None


class Held:
    """What `attach` is given in its place."""

    def __init__(self, optimizer: Labelled, rate: float) -> None:
        self.param_groups = [{"params": list(optimizer.param_states), "lr": rate}]

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.param_groups[0]["lr"] = state["lr"]


def test_an_optimizer_without_groups_is_rejected_with_instructions(
    commander: Commander, medic: trainmedic.Medic, tmp_path: Path
) -> None:
    """A loop that follows them has an exact rollback."""
    torch.manual_seed(3)
    model = nn.Linear(3, 3)
    optimizer = Labelled(list(model.parameters()), 0.1)
    options: dict[str, Any] = {"model": model, "loader": [BATCH + number / 50 for number in range(60)]}
    with pytest.raises(ConfigurationError, match=r"no param_groups.*its state \(param_states\) in also.*moments") as no:
        trainmedic.torch.attach(medic, optimizer=optimizer, **options)
    assert "list(optimizer.param_states.values())" in str(no.value)
    also = {"moments": list(optimizer.param_states.values())}
    held = Held(optimizer, 0.1)
    run = trainmedic.torch.attach(
        medic, optimizer=held, also=also, checkpoints=tmp_path, checkpoint_every=10, **options
    )
    losses: dict[int, float] = {}
    sent = ""
    with run:
        for batch in run.batches(steps=40):
            with run.step() as step:
                loss = squared(model, batch)
                loss.backward()
                optimizer.rates = dict.fromkeys(optimizer.rates, run.learning_rate(0.1))
                optimizer.step()
                step.report(loss=loss)
                assert losses.setdefault(step.number, loss.item()) == loss.item()
                if step.number == 18 and not sent:
                    sent = commander.send_and_wait(medic, "job.rollback", step=10)
        reply = commander.final(sent)
    assert reply.status == "applied", reply.output
    assert reply.output["verified"]["losses"]["agreed"] >= 8
    assert carried_of(reply)["agreed"] == carried_of(reply)["compared"] > 0


@pytest.mark.parametrize("has_differed", [True, False])
def test_losses_of_weights_that_changed_by_themselves_prove_nothing(
    looped: Callable[..., Looped], has_differed: bool
) -> None:
    """A bit changed in the first step after the checkpoint. Without the rank comparison it could be lost state."""
    training = looped(nn.Linear(3, 3))

    def loss_of(model: nn.Module, batch: torch.Tensor) -> Any:
        if len(training.losses) == 10:
            with torch.no_grad():
                next(model.parameters())[0, 0] += 0.01
            if has_differed:
                training.run.training.rank_comparison.trouble_at = 11
        return squared(model, batch)

    reply = training.train(loss_of)
    assert reply.status == ("applied" if has_differed else "failed")
    losses = (reply.output or {})["verified"]["losses"]
    assert losses["compared"] > losses["agreed"] == 0
    if has_differed:
        assert "losses differ from step 11 on" in losses["why"]
