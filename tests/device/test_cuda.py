"""The plain PyTorch integration on a real CUDA device: gradient scaler, random numbers, cached memory.

Not part of any tier: it needs a GPU, and is run by hand (``python -m pytest tests/device``) where there is one.
The card's settings are left alone; nothing here even reads more than PyTorch's own counters. No Redis is
needed: commands are put where the reader would put them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

import trainmedic  # noqa: E402
import trainmedic.torch  # noqa: E402
from trainmedic.torch.meters.stopwatches import CudaStopwatch  # noqa: E402
from trainmedic.wire import envelope  # noqa: E402

STEPS = 40
Order = Callable[..., trainmedic.JobCommand]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """So that what is compared to the bit can be equal."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def medic() -> Iterator[trainmedic.Medic]:
    """Nobody listens at that address; training goes on without."""
    with trainmedic.connect(job="cuda", redis_url="redis://127.0.0.1:1/0", rank=0, world_size=1) as connected:
        yield connected


@pytest.fixture
def order(medic: trainmedic.Medic) -> Order:
    def put(action: str, **params: Any) -> trainmedic.JobCommand:
        now = datetime.now(UTC)
        target = {"kind": "job", "job": medic.job}
        later = now + timedelta(minutes=5)
        sent = envelope.Command(envelope.new_id(), action, target, params, "r", "p", "Test", now, later)
        assert medic._queue is not None
        medic._queue.enter(sent, b"0-0")
        return next(one for one in medic.unanswered() if one.id == sent.id)

    return put


class Training:
    """Half precision under a gradient scaler, dropout and noise on the device, an average of the weights."""

    def __init__(self, medic: trainmedic.Medic, directory: Path) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.scaler = torch.amp.GradScaler(init_scale=2.0**24, growth_interval=7)  # overflows at first, then grows
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        data = torch.utils.data.TensorDataset(torch.randn(200, 32))
        self.run = trainmedic.torch.attach(
            medic,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            ema=self.ema,
            loader=torch.utils.data.DataLoader(data, 8, shuffle=True, pin_memory=True),
            checkpoints=directory,
            checkpoint_every=10,
            keep=None,
        )
        self.losses: dict[int, tuple[float, float]] = {}

    def train(self, at: Mapping[int, Callable[[], Any]]) -> None:
        waiting = dict(at)
        for (batch,) in self.run.batches(steps=STEPS):
            with self.run.step() as step:
                rows = batch.cuda(non_blocking=True) + 0.1 * torch.randn(8, 32, device="cuda")
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = self.model(rows).square().mean() * 100
                step.backward(loss)
                norm = step.update(max_norm=1.0)
                step.report(loss=loss, grad_norm=norm)
                self.losses[step.number] = (loss.item(), self.scaler.get_scale())
                waiting.pop(step.number, lambda: None)()
        self.run.close()

    def state(self) -> list[Any]:
        return [one.clone() for part in (self.model, self.ema) for one in part.state_dict().values()]


def test_a_rollback_is_exact_on_the_device(medic: trainmedic.Medic, order: Order, tmp_path: Path) -> None:
    """Losses, weights, the scaler's scale and the device's random numbers are as without the rollback."""
    calm = Training(medic, tmp_path / "calm")
    calm.train({})
    shaken = Training(medic, tmp_path / "shaken")
    commands: list[trainmedic.JobCommand] = []
    shaken.train({n: lambda: commands.append(order("job.rollback", steps_back=4)) for n in (6, 15, 26, 38)})
    assert [command.status for command in commands] == ["applied"] * 4
    assert shaken.losses == calm.losses
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(shaken.state(), calm.state(), strict=True))
    assert len({scale for _, scale in calm.losses.values()}) > 1, "the scale moved, else this shows little"


def test_a_nan_is_gone_after_the_rollback(medic: trainmedic.Medic, order: Order, tmp_path: Path) -> None:
    """Weights, moments and the scaler are those from before it."""
    training = Training(medic, tmp_path)
    commands: list[trainmedic.JobCommand] = []

    def spoil() -> None:
        with torch.no_grad():
            training.model[0].weight.fill_(float("nan"))
        commands.append(order("job.rollback"))

    training.train({25: spoil})
    assert [command.status for command in commands] == ["applied"]
    assert all(torch.isfinite(one).all() for one in training.state())


def test_cached_memory_returns_to_the_driver(medic: trainmedic.Medic, order: Order, tmp_path: Path) -> None:
    """The allocator releases memory that is no longer used: a gigabyte here."""
    training = Training(medic, tmp_path)
    before: list[int] = []

    def press() -> None:
        held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        del held
        before.append(torch.cuda.memory_reserved())
        order("job.empty_cache")

    training.train({5: press})
    assert before[0] - torch.cuda.memory_reserved() >= 1 << 30
    assert medic.stats()


def test_a_scaled_rate_holds_for_fused_optimizers(medic: trainmedic.Medic, order: Order, tmp_path: Path) -> None:
    """Also if the rate is a tensor on the device."""
    training = Training(medic, tmp_path)
    for group in training.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device="cuda")
    commands: list[trainmedic.JobCommand] = []
    training.train({5: lambda: commands.append(order("job.scale_lr", factor=0.5))})
    assert [command.status for command in commands] == ["applied"]
    assert training.run.lr_scale == 0.5
    assert training.run.training.rate.value < 5e-3


def test_a_span_in_the_devices_queue_is_measured_without_blocking() -> None:
    """It is known only after the device has passed it."""
    stopwatch = CudaStopwatch()
    torch.cuda.synchronize()
    stopwatch.start()
    torch.cuda._sleep(200_000_000)  # cycles, which are about a tenth of a second
    stopwatch.stop()
    stopwatch.step_ends(is_known=True)
    assert stopwatch.seconds_per_step() is None
    torch.cuda.synchronize()
    seconds = stopwatch.seconds_per_step()
    assert seconds is not None
    assert 0.01 < seconds < 10.0
