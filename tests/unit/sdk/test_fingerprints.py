"""Fingerprints tell batches apart, and know one again."""

from __future__ import annotations

import dataclasses
import math
import random
import subprocess
import sys
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainmedic.recovery import fingerprints
from trainmedic.recovery.fingerprints import Unread, read

Pair = namedtuple("Pair", "inputs labels")


@dataclasses.dataclass
class Example:
    tokens: torch.Tensor
    text: str


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Opaque:
    """An image, say: its size is known, and its content out of sight."""

    def __init__(self, name: str) -> None:
        self.size = 3
        self._read = lambda: name


def fingerprint(batch: Any) -> int | None:
    return read(fingerprints.fingerprint(batch))


def drawn(seed: int) -> torch.Tensor:
    return torch.randint(0, 50_000, (16, 256), generator=torch.Generator().manual_seed(seed))


KINDS: dict[str, Callable[[int], Any]] = {
    "tensor": drawn,
    "huge": lambda seed: drawn(seed).repeat(200, 4),
    "one number": lambda seed: torch.tensor(seed),
    "bfloat16": lambda seed: drawn(seed).to(torch.bfloat16),
    "float8": lambda seed: drawn(seed).float().div(50_000).to(torch.float8_e4m3fn),
    "boolean": lambda seed: drawn(seed) > 25_000,
    "complex": lambda seed: drawn(seed).to(torch.complex64),
    "needs a gradient": lambda seed: drawn(seed).float().requires_grad_(),
    "transposed": lambda seed: drawn(seed).T,
    "every other": lambda seed: drawn(seed)[:, ::2],
    "sparse": lambda seed: (drawn(seed) * (drawn(seed) > 40_000)).to_sparse(),
    "pair": lambda seed: Pair(drawn(seed), torch.zeros(16)),
    "dict": lambda seed: {"input_ids": drawn(seed), "labels": None},
    "encoding": lambda seed: UserDict(input_ids=drawn(seed)),
    "dataclass": lambda seed: Example(drawn(seed), "a"),
    "object with slots": lambda seed: Slotted(drawn(seed)),
    "array": lambda seed: np.random.default_rng(seed).normal(size=(16, 300)),
    "array of Fortran": lambda seed: np.asfortranarray(np.random.default_rng(seed).normal(size=(16, 300))),
    "array of texts": lambda seed: np.array([["".join(["sen", "tence"]), str(seed)]], dtype=object),
    "texts": lambda seed: [f"sentence {seed}", "another"],
    "long text": lambda seed: "".join(random.Random(seed).choices("abcdef", k=100_000)),
    "bytes": lambda seed: bytes([seed] * 10),
    "tokens in lists": lambda seed: {"input_ids": [drawn(seed)[row].tolist() for row in range(4)]},
    "nested": lambda seed: [[{"a": (1, {"b": drawn(seed)})}]],
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_the_same_batch_is_recognized_and_another_is_not(make: Callable[[int], Any]) -> None:
    """A batch may be made of anything."""
    assert isinstance(fingerprint(make(1)), int)
    assert len({fingerprint(make(seed)) for seed in range(30)}) == 30
    assert [fingerprint(make(seed)) for seed in range(5)] == [fingerprint(make(seed)) for seed in range(5)]


@given(st.integers(1, 3000), st.integers(0, 10_000))
def test_a_replaced_sample_changes_the_fingerprint(rows: int, seed: int) -> None:
    """This holds as far as each row counts: of up to 64 rows, all are read."""
    batch = torch.randn(min(rows, 64), 37, generator=torch.Generator().manual_seed(seed))
    other = batch.clone()
    other[seed % len(batch)] = torch.randn(37)
    assert fingerprint(batch) != fingerprint(other)


def test_shape_and_type_change_the_fingerprint() -> None:
    """The same numbers in another form are another batch."""
    numbers = torch.arange(12)
    forms = [numbers, numbers.view(3, 4), numbers.view(4, 3), numbers.int(), numbers.float(), numbers.tolist()]
    assert len({fingerprint(form) for form in forms}) == len(forms)


def test_a_nan_counts_like_any_number() -> None:
    """Its bits are compared, not its value."""
    assert fingerprint(torch.tensor([math.nan, 1.0])) == fingerprint(torch.tensor([math.nan, 1.0]))
    assert fingerprint(torch.tensor([math.nan, 1.0])) != fingerprint(torch.tensor([math.nan, 2.0]))


@pytest.mark.parametrize(
    "batch",
    [
        None,
        object(),
        [None, None],
        (number for number in range(3)),
        torch.empty(4, 4, device="meta"),
        Opaque("cat.jpg"),
        [Opaque("cat.jpg"), Opaque("dog.jpg")],
    ],
    ids=["nothing", "object", "nothings", "generator", "meta", "opaque", "opaque ones"],
)
def test_an_unreadable_batch_has_no_fingerprint(batch: Any) -> None:
    """Two of them would otherwise look alike whatever they hold."""
    assert fingerprint(batch) is None


def test_fingerprinting_takes_nothing_from_a_generator() -> None:
    """Only the loop may use it up."""
    batch = {"stream": (number for number in range(3)), "labels": torch.zeros(3)}
    assert fingerprint(batch) is not None
    assert list(batch["stream"]) == [0, 1, 2]


def test_a_batch_that_raises_when_it_is_read_has_no_fingerprint() -> None:
    """Training continues."""

    class Hostile(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise RuntimeError("not now")

    assert fingerprint(Hostile(a=1)) is None
    endless: list[Any] = []
    endless.append(endless)
    assert fingerprint(endless) is None
    assert fingerprint({"endless": endless, "x": 1}) is not None


def test_data_on_a_device_are_read_later() -> None:
    """They are read as they were when drawn, whatever the step has done since; the device here is a fake."""

    class Remote(torch.Tensor):
        device = torch.device("cuda")  # type: ignore[assignment]

        def numpy(self) -> Any:  # type: ignore[override]
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    batch = drawn(1).as_subclass(Remote)
    unread, other = fingerprints.fingerprint([batch]), fingerprint([drawn(2).as_subclass(Remote)])
    batch.zero_()
    assert isinstance(unread, Unread)
    assert not unread.is_here
    assert read(unread) == fingerprint([drawn(1).as_subclass(Remote)]) != other


@pytest.mark.parametrize("kind", ["tensor", "needs a gradient", "every other", "array", "nested", "bfloat16"])
@pytest.mark.parametrize("size", [slice(None), slice(2)], ids=["large", "small"])
def test_a_batch_is_read_before_it_is_changed(kind: str, size: slice) -> None:
    """The fingerprint holds no view of it, though it is read after the step has changed it."""

    def made() -> tuple[Any, Any]:
        tensor = drawn(1)[size, size] if kind == "nested" else KINDS[kind](1)[size, size]
        return tensor, [[{"a": tensor}]] if kind == "nested" else tensor

    tensor, batch = made()
    unread = fingerprints.fingerprint(batch)
    (tensor.detach() if hasattr(tensor, "detach") else tensor)[:] = 0
    assert read(unread) == fingerprint(made()[1]) != fingerprint(batch)


def test_mutable_bytes_are_copied() -> None:
    """A ``bytearray`` may be used again for the next batch."""
    batch = bytearray(b"abc" * 5000)
    unread = fingerprints.fingerprint(batch)
    batch[:] = bytes(len(batch))
    assert read(unread) == fingerprint(bytearray(b"abc" * 5000)) != fingerprint(batch)


def test_another_process_computes_the_same_fingerprint() -> None:
    """So a checkpoint can keep fingerprints across a restart."""
    program = (
        "import torch; from trainmedic.recovery.fingerprints import fingerprint, read;"
        "print(read(fingerprint({'a': torch.arange(5000), 'b': ['x', 1.5]})))"
    )
    told = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": "sdk"}, capture_output=True, check=True)
    assert int(told.stdout) == fingerprint({"a": torch.arange(5000), "b": ["x", 1.5]})
