"""Whatever people train with is saved and brought back whole, used already or not."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import lr_scheduler, swa_utils

from trainmedic.errors import ConfigurationError
from trainmedic.torch.state_parts import StateParts
from trainmedic.torch.steps import update_average
from trainmedic.torch.tensor_names import named_as


class WrappedScaler:
    """In the manner of timm's: a gradient scaler inside of another object."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scaler, name)


def scaler_of_default_device() -> Any:
    """Without CUDA it switches itself off, with a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.amp.GradScaler()


SCALERS: dict[str, Callable[[], Any]] = {
    "switched off": lambda: torch.amp.GradScaler(enabled=False),
    "switched off, on the CPU": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "of the default device": scaler_of_default_device,
    "on the CPU": lambda: torch.amp.GradScaler("cpu", init_scale=64.0),
    "of older scripts": lambda: torch.cuda.amp.GradScaler(enabled=False),
    "of sharded training, switched off": lambda: ShardedGradScaler(enabled=False),
    "of sharded training": lambda: ShardedGradScaler("cpu", init_scale=64.0),
    "in a wrapper": lambda: WrappedScaler(torch.amp.GradScaler("cpu", init_scale=64.0)),
    "in a wrapper, switched off": lambda: WrappedScaler(torch.amp.GradScaler("cpu", enabled=False)),
}


class Scene:
    """A model with optimizer and scaler, whose steps can be left in the middle."""

    def __init__(self, scaler: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = scaler
        self.parts = StateParts(model=self.model, optimizer=self.optimizer, scaler=scaler)

    def half_step(self) -> None:
        self.scaler.scale(self.model(torch.ones(2, 3)).sum()).backward()
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self.half_step()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def kept(parts: StateParts) -> Any:
    """What comes back from a file."""
    file = io.BytesIO()
    torch.save(parts.capture(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Of this process alone: the scaler of sharded training reduces over one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:`torch.cuda.amp.GradScaler:FutureWarning")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("kind", SCALERS)
def test_a_step_that_was_left_half_done_is_forgotten(kind: str, steps_before: int) -> None:
    """Whether the scaler is switched on or off, used before or not: the next step unscales anew."""
    scene = Scene(SCALERS[kind]())
    for _ in range(steps_before):
        scene.step()
    states = kept(scene.parts)
    before = [scene.scaler.get_scale(), scene.scaler.state_dict()]
    scene.parts.restore(states)
    scene.parts.discard_gradients()
    scene.half_step()
    assert not scene.parts.mismatch(states)
    scene.parts.restore(states)
    scene.parts.discard_gradients()
    assert [scene.scaler.get_scale(), scene.scaler.state_dict()] == before
    assert scene.model.weight.grad is None
    scene.step()


def test_the_scale_and_its_growth_come_back() -> None:
    """They decide which steps are left out, so a run is repeated to the bit only with them."""
    scene = Scene(torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3))
    scene.step()
    states = kept(scene.parts)
    for _ in range(4):
        scene.step()
    assert scene.scaler.get_scale() == 128.0
    scene.parts.restore(states)
    scene.parts.discard_gradients()
    assert (scene.scaler.get_scale(), scene.scaler.state_dict()["_growth_tracker"]) == (64.0, 1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_scaler_may_be_switched_on_or_off_between_two_starts(wrapped: bool) -> None:
    """A script goes over to another precision; that is no checkpoint that was loaded by half."""
    on, off = (torch.amp.GradScaler("cpu", init_scale=64.0, enabled=enabled) for enabled in (True, False))
    scene, other = (Scene(WrappedScaler(scaler) if wrapped else scaler) for scaler in (on, off))
    scene.step()
    with_scaler, without = kept(scene.parts), kept(other.parts)
    other.parts.restore(with_scaler)
    other.step()
    scene.parts.restore(without)
    assert scene.scaler.get_scale() == 64.0
    scene.step()


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(batch))  # type: ignore[no-any-return]


def compiled_within() -> nn.Module:
    model = WithBuffers()
    model.body = torch.compile(model.body, backend="eager")  # type: ignore[assignment]
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "plain": WithBuffers,
    "compiled": lambda: torch.compile(WithBuffers(), backend="eager"),
    "compiled in place": lambda: _compiled_in_place(WithBuffers()),
    "compiled within": compiled_within,
    "compiled twice": lambda: torch.compile(compiled_within(), backend="eager"),
}


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("now", MODELS)
@pytest.mark.parametrize("then", MODELS)
def test_a_checkpoint_serves_a_model_that_is_compiled_and_one_that_is_not(then: str, now: str) -> None:
    """A script is started with ``--compile`` today and without tomorrow; each tensor finds its place."""
    written, read = (StateParts(model=MODELS[kind]()) for kind in (then, now))
    states = kept(written)
    assert read.mismatch(states) == ""
    read.restore(states)
    tensors = [list(parts.by_name["model"].state_dict().values()) for parts in (written, read)]
    assert all(torch.equal(one, other) for one, other in zip(*tensors, strict=True))


def test_the_versions_of_the_modules_are_renamed_along() -> None:
    """By them a module knows how to read a state of an older PyTorch."""
    plain, compiled = WithBuffers(), compiled_within()
    versions = named_as(compiled.state_dict(), plain.state_dict())._metadata  # type: ignore[attr-defined]
    assert versions["body._orig_mod.1"] == {"version": 2}
    assert named_as(plain.state_dict(), compiled.state_dict())._metadata["body.1"] == {"version": 2}  # type: ignore[attr-defined]


@pytest.mark.parametrize("now", ["plain", "compiled"])
@pytest.mark.parametrize("then", ["plain", "compiled", "compiled within"])
def test_buffers_of_a_rank_come_back_compiled_or_not(then: str, now: str) -> None:
    """Ranks keep their own buffers beside what they share."""
    written, read = (StateParts(model=MODELS[kind]()) for kind in (then, now))
    for buffer in written.by_name["model"].buffers():
        buffer.fill_(7)
    read.restore_buffers(written.buffers())
    assert all((buffer == 7).all() for buffer in read.by_name["model"].buffers())


def test_another_model_is_told_whatever_is_compiled() -> None:
    """With the name and not only the number of names."""
    parts = StateParts(model=torch.compile(nn.Linear(3, 1), backend="eager"))
    assert "another shape" in parts.mismatch(StateParts(model=nn.Linear(4, 1)).capture())
    assert "names differ" in parts.mismatch(StateParts(model=WithBuffers()).capture())


class Doubling:
    """A schedule in an object: its attributes are part of the state, unlike a function's."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, step: int) -> float:
        self.asked += 1
        return 0.5**step


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR with functions": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step)]),
    "LambdaLR with objects": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [Doubling()]),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
        milestones=[3],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("steps_before", [0, 1, 5])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_come_back_used_or_not(kind: str, steps_before: int) -> None:
    """And so do optimizers that have no state yet: of the rates that follow none is another."""
    scene = Scene(torch.amp.GradScaler(enabled=False))
    optimizer = torch.optim.AdamW(scene.model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[kind](optimizer)
    parts = StateParts(model=scene.model, optimizer=optimizer, scheduler=scheduler)
    takes_loss = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)

    def rates(steps: int) -> list[tuple[float, float]]:
        found = []
        for _ in range(steps):
            scene.model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([1.0] if takes_loss else []))
            found.append((optimizer.param_groups[0]["lr"], scene.model.weight.sum().item()))
        return found

    rates(steps_before)
    states = kept(parts)
    first = rates(8)
    assert parts.mismatch(states) == ""
    parts.restore(states)
    assert len(optimizer.state) == (2 if steps_before else 0)
    assert rates(8) == first


class UpdatedByModel:
    """As timm has it."""

    def __init__(self) -> None:
        self.followed: list[Any] = []

    def update(self, model: nn.Module, step: int | None = None) -> None:
        self.followed = list(model.parameters())


class UpdatedByParameters(UpdatedByModel):
    """As torch_ema has it."""

    def update(self, parameters: Any = None) -> None:  # type: ignore[override]
        self.followed = list(parameters)


class SteppedByParameters:
    """As diffusers has it."""

    def __init__(self) -> None:
        self.followed: list[Any] = []

    def step(self, parameters: Any) -> None:
        self.followed = list(parameters)


class UpdatedByItself(UpdatedByModel):
    """As ema_pytorch has it: the model was given before."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def update(self) -> None:  # type: ignore[override]
        self.followed = list(self.model.parameters())


def test_averages_are_updated_as_their_libraries_have_it() -> None:
    """With the model, its parameters, or nothing."""
    model = nn.Linear(3, 1)
    for ema in (UpdatedByModel(), UpdatedByParameters(), SteppedByParameters(), UpdatedByItself(model)):
        update_average(ema, model)
        assert [id(one) for one in ema.followed] == [id(one) for one in model.parameters()], type(ema)
    average = swa_utils.AveragedModel(nn.Linear(3, 1))
    update_average(average, model)
    assert torch.equal(average.module.weight, model.weight)
    with pytest.raises(ConfigurationError, match="cannot update a Linear"):
        update_average(nn.Linear(1, 1), model)


class Scaled(nn.Module):
    """It keeps the largest values that it has seen, some of them as part of the graph of the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: dict[str, Any] = {"scale": torch.ones(()), "history": [torch.zeros(3)], "updates": 0}

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = self.weight * batch
        history = [*self.seen["history"], found.abs()]
        self.seen = {"scale": found.abs().max(), "history": history, "updates": self.seen["updates"] + 1}
        return found / self.seen["scale"]

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


def test_what_a_module_keeps_beside_tensors_may_be_part_of_a_graph() -> None:
    """It is written as a file, and comes back to another module of the kind without the graph."""
    module, other = Scaled(), Scaled()
    module(torch.arange(3.0)).sum().backward()
    file = io.BytesIO()
    torch.save(StateParts(model=module).extra_states(), file)
    file.seek(0)
    StateParts(model=other).restore_extra_states(torch.load(file, weights_only=True))
    assert other.seen["updates"] == 1
    assert (other.seen["scale"].item(), other.seen["scale"].requires_grad) == (2.0, False)
    assert torch.equal(other.seen["history"][1], torch.arange(3.0))


def test_two_objects_of_one_name_are_refused() -> None:
    # Else the checkpoints would lack one of them.
    with pytest.raises(ConfigurationError, match=r"model\.0: two objects have this name"):
        StateParts(model=[nn.Linear(2, 2)], **{"model.0": nn.Linear(2, 2)})
