"""What a rank says of its waiting for others, and where it says nothing. Over a process group of one rank."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainmedic.torch.meters.step_meter import StepMeter, tokens_in
from trainmedic.torch.meters.stopwatches import CudaStopwatch
from trainmedic.torch.meters.wait_meter import WaitMeter
from trainmedic.torch.model_hook import ModelHook

RANKS = 2  # as the meter is told


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Branching(nn.Module):
    """Of its two first layers, one is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.uses_first = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last((self.first if self.uses_first else self.second)(inputs))  # type: ignore[no-any-return]


def step(model: nn.Module, meter: WaitMeter) -> float | None:
    model(torch.randn(3, 4)).sum().backward()
    meter.step_ends()
    return meter.seconds_per_step()


def test_the_end_of_the_backward_pass_is_waited_for_from_the_second_step_on() -> None:
    """In the first one it is learned which gradient comes last. A hook that delays the sum stands for a slow rank."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))

    def slow_sum(state, bucket):  # type: ignore[no-untyped-def] # PyTorch checks its annotations, as no text
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        gradients = bucket.buffer()

        def wait() -> None:
            time.sleep(0.05)
            done.set_result(gradients)

        threads.append(threading.Thread(daemon=True, target=wait))
        threads[-1].start()
        return done

    threads: list[threading.Thread] = []
    model.register_comm_hook(None, slow_sum)
    meter = WaitMeter([model], RANKS)
    assert step(model, meter) is None
    waited = [step(model, meter) for _ in range(3)]
    assert all(seconds is not None and seconds > 0.04 for seconds in waited)
    assert meter.seconds_per_step() is None


def test_several_steps_between_two_questions_give_their_mean() -> None:
    """As where reports come less often than steps."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    meter = WaitMeter([model], RANKS)
    for _ in range(5):
        model(torch.randn(3, 4)).sum().backward()
        meter.step_ends()
    waited = meter.seconds_per_step()
    assert waited is not None
    assert 0.0 < waited < 1.0


def test_nobody_is_waited_for_alone() -> None:
    """A job of one rank, wrapped or not."""
    assert WaitMeter([nn.Linear(4, 1)], 1).seconds_per_step() == 0.0


def test_nothing_is_said_of_what_waits_unseen() -> None:
    """A model whose gradients somebody else sums, and one beside a wrapped one."""
    plain, wrapped = nn.Linear(4, 1), DistributedDataParallel(nn.Linear(4, 1))
    meter, both = WaitMeter([plain], RANKS), WaitMeter([plain, wrapped], RANKS)
    for _ in range(4):
        assert step(plain, meter) is None
        assert step(wrapped, both) is None


def test_a_model_that_is_not_trained_does_not_count() -> None:
    """Such as the reference in a preference training."""
    reference, model = nn.Linear(4, 1).requires_grad_(False), DistributedDataParallel(nn.Linear(4, 1))
    meter = WaitMeter([reference, model, "no module"], RANKS)
    assert [step(model, meter) is None for _ in range(3)] == [True, False, False]


def test_the_wrapper_of_a_model_is_found_when_it_trains() -> None:
    """The Trainer of Hugging Face tells its callbacks of the model within. An evaluation before tells nothing."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = DistributedDataParallel(inner)
    meter = WaitMeter([inner], RANKS)
    inner.eval()(torch.randn(3, 4))
    inner.train()
    assert [step(model, meter) is None for _ in range(3)] == [True, False, False]
    assert len(inner._forward_pre_hooks) == 1  # that for the buffers


def test_a_step_in_which_the_last_gradient_does_not_come_is_not_known() -> None:
    """Else all of it would count as the rank's own time. After some such steps the meter learns anew."""
    model = DistributedDataParallel(Branching(), find_unused_parameters=True)
    meter = WaitMeter([model], RANKS)
    assert [step(model, meter) is None for _ in range(2)] == [True, False]
    model.module.uses_first = False
    assert [step(model, meter) is None for _ in range(13)] == [True] * 11 + [False] * 2


def test_an_evaluation_is_nobodys_waiting() -> None:
    """Its buffers are rank 0's too."""
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
    meter = WaitMeter([model], RANKS)
    step(model, meter)
    model.eval()
    for _ in range(3):
        with torch.no_grad():
            model(torch.randn(3, 4))
        meter.step_ends()
        assert meter.seconds_per_step() is None
    model.train()
    assert step(model, meter) is not None


def test_gradients_are_those_of_a_training_without_a_meter() -> None:
    """And after closing it no hook is left."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    inputs = torch.randn(5, 4)
    model(inputs).sum().backward()
    plain = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    meter = WaitMeter([model], RANKS)
    for _ in range(3):
        model.zero_grad()
        model(inputs).sum().backward()
        meter.step_ends()
        assert all(
            torch.equal(mine, each.grad)
            for mine, each in zip(plain, model.parameters(), strict=True)  # type: ignore[arg-type]
        )
    meter.close()
    assert not model._forward_pre_hooks
    assert not model.module._forward_pre_hooks
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())  # type: ignore[attr-defined]


class Event:
    """Stands for a CUDA event, which can neither be copied nor pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'Event' object")


class OnCuda(CudaStopwatch):
    def _record_event(self) -> Any:
        return Event()


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_model_is_copied_and_pickled_without_its_meter(is_wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the best one, or an average. What the copy is used for is measured nowhere."""
    monkeypatch.setattr("trainmedic.torch.meters.wait_meter.stopwatch_for", lambda device: OnCuda())
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = DistributedDataParallel(inner)
    meter = WaitMeter([model if is_wrapped else inner], RANKS)
    for _ in range(3 if is_wrapped else 0):
        model(torch.randn(3, 4)).sum().backward()
        meter.step_ends()
    assert inner._forward_pre_hooks
    average = torch.optim.swa_utils.AveragedModel(inner)
    for copied in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner)), average.module):
        assert isinstance(copied, nn.Module)
        copied.train()(torch.randn(3, 4)).sum().backward()
        hooks = [each for module in copied.modules() for each in module._forward_pre_hooks.values()]
        assert not any(isinstance(each, ModelHook) for each in hooks)
        assert b"trainmedic" not in pickle.dumps(copied)
    assert any(isinstance(each, ModelHook) for each in inner._forward_pre_hooks.values())


# --- tokens -----------------------------------------------------------------------------------------------


class Broken(Mapping[str, Any]):
    def __getitem__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


IDS = torch.ones(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": IDS}, 10),
        ({"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])}, 8),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 5, 5)}, 0),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 5, device="meta")}, 0),
        ({"input_ids": [1, 2, 3]}, 0),
        ({"pixels": torch.ones(2, 3)}, 0),
        ((IDS, IDS), 0),
    ],
)
def test_tokens_are_counted_where_it_is_certain_how_many_they_are(batch: Any, tokens: int) -> None:
    """Without padding; a mask on a device is not waited for."""
    assert tokens_in(batch) == tokens


def test_a_batch_whose_tokens_cannot_be_counted_costs_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    parts = StepMeter([], 1)
    for batch in ({"input_ids": IDS}, Broken(), Broken(), {"input_ids": IDS}):
        parts.add_batch(batch, 0.5)
    assert parts.take(1)["tokens"] is None
    assert caplog.text.count("cannot count the tokens") == 1


def test_parts_are_those_since_the_last_report() -> None:
    """Tokens are those of all ranks. A loop that draws its data unseen says nothing of it."""
    parts = StepMeter([], 1)
    assert parts.take(1) == {"data_seconds": None, "wait_seconds": 0.0, "tokens": None}
    parts = StepMeter([nn.Linear(4, 1)], RANKS)
    parts.add_batch({"input_ids": IDS}, 0.25)
    parts.add_batch({"input_ids": IDS}, 0.5)
    assert parts.take(2) == {"data_seconds": 0.75, "wait_seconds": None, "tokens": 40}
    assert parts.take(1) == {"data_seconds": 0.0, "wait_seconds": None, "tokens": None}
