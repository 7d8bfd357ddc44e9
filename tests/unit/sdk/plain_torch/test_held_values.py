"""Copies of what a trainer holds are of equal values, independent of it, and read without running code of others."""

from __future__ import annotations

import enum
import functools
import io
import threading
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainmedic.trainer.held_state import HeldState, PutBack, assigned_names
from trainmedic.trainer.held_values import NotPlain, packed, same, unpacked


class Replay:
    def __init__(self) -> None:
        self.rows = deque([torch.ones(2), torch.zeros(2)], maxlen=4)
        self.count = 2


class Colour(enum.IntEnum):
    RED = 1


class Holder:
    pass


def plain_values() -> list[Any]:
    return [
        *(None, True, 3, 2.5, 1j, "text", b"bytes", float("nan"), torch.tensor([1.0, float("nan")])),
        *([1, [2]], (1, (2,)), {1, 2}, {"a": {"b": [torch.ones(2)]}}, deque([1, 2], 5)),
        *(OrderedDict(a=1), Counter("aab"), defaultdict(list, a=[1]), np.arange(3.0), np.float64(2), Replay()),
        UserDict(ids=torch.ones(2)),
    ]


@pytest.mark.parametrize("number", range(len(plain_values())))
def test_a_copy_survives_a_file_and_what_happens_to_the_original(number: int) -> None:
    """It is written and read as a checkpoint's files are."""
    value = plain_values()[number]
    form, file = packed(value), io.BytesIO()
    torch.save(form, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert same(read, form)
    again = unpacked(read)
    assert isinstance(again, type(value)) or isinstance(value, np.float64)
    assert same(packed(again), form)


@pytest.mark.parametrize(
    "value",
    [torch.nn.Linear(1, 1), threading.Lock(), open, Colour.RED, [object()], np.array([None]), torch.device("cpu")],
)
def test_parts_of_a_program_are_no_data(value: Any) -> None:
    """They are left as they are."""
    with pytest.raises(NotPlain):
        packed(value)


def test_containers_are_filled_and_keep_their_factory() -> None:
    """Others may hold references to them, and a factory cannot be written to a file."""
    logs: dict[str, Any] = {"rewards": defaultdict(lambda: deque(maxlen=2))}
    logs["rewards"]["a"].append(1)
    form, inner = packed(logs), logs["rewards"]
    logs["rewards"]["b"].append(2)
    assert unpacked(form, logs) is logs
    assert logs["rewards"] is inner
    assert dict(inner) == {"a": deque([1], 2)}
    inner["c"].extend((1, 2, 3))
    assert inner["c"] == deque([2, 3], 2)


def test_a_list_that_contains_itself_is_no_data() -> None:
    """It would never end."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotPlain):
        packed(endless)


def test_settings_and_parts_stay_and_data_goes_back() -> None:
    """What was not there at the start is removed, unless the checkpoint has it."""
    holder: Any = Holder()
    holder.count, holder.is_on, holder.late = 0, False, None
    state = HeldState(holder, excluded=("own",))
    holder.count, holder.batch = 5, [torch.ones(3)]
    record = state.record()
    holder.count, holder.batch, holder.is_on, holder.own = 9, [torch.zeros(3)], True, 1
    holder.late, holder.extra = threading.Lock(), 3
    assert state.put_back(record) == PutBack(("batch", "count"), ("extra",))
    assert (holder.count, holder.is_on, holder.own) == (5, True, 1)
    assert torch.equal(holder.batch[0], torch.ones(3))
    assert holder.late is not None
    assert state.put_back(record, keeps_batches=False) == PutBack((), ("batch",))
    assert (holder.count, hasattr(holder, "batch"), hasattr(holder, "extra")) == (5, False, False)
    assert state.put_back(None) == PutBack((), ("count",))
    assert holder.count == 0


def test_what_a_decorated_method_assigns_is_the_library_s() -> None:
    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*arguments: Any) -> Any:
            return function(*arguments)

        return wrapper

    class Library:
        @decorated
        def __init__(self) -> None:
            self.count = 0

    assert assigned_names(Library, {__name__.partition(".")[0]}) == {"count"}
