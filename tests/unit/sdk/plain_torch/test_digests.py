"""Digests of tensors: what they show, and those of earlier releases."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from trainmedic.torch.checkpoints import digests
from trainmedic.torch.checkpoints.digests import all_finite, are_finite, compare, digests_of, earlier_digests_of
from trainmedic.torch.checkpoints.replicated_contents import with_digests_of_restored

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .*:UserWarning")  # of PyTorch, about its beta state and checks

# Of the tensors of `stored`, as the release before the mark computed them.
EARLIER = {"w": "float32:00670e6eb6227f20", "b": "float32:00000000ff800006"}


def stored() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(200_000, dtype=torch.int32).view(torch.float32), "b": torch.tensor([1.0, 2.0])}


def test_a_digest_is_the_sum_of_the_words_by_position() -> None:
    (digest,) = digests_of({"w": stored()["w"]}).values()
    assert int(digest.removeprefix("float32/2:"), 16) == sum(i * (2 * i + 1) for i in range(200_000)) + 200_000


def test_an_exchange_of_any_two_parts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier digests did not show that of the first two."""
    monkeypatch.setattr(digests, "_CHUNK", 4)
    torch.manual_seed(1)
    chunks = list(torch.randn(20).split(4))
    before = {"w": torch.cat(chunks)}
    for one, other in itertools.combinations(range(5), 2):
        order = [*range(5)]
        order[one], order[other] = other, one
        now = {"w": torch.cat([chunks[number] for number in order])}
        assert compare(digests_of(before), digests_of(now)).different == ("w",)
        is_seen_by_earlier = earlier_digests_of(before) != earlier_digests_of(now)
        assert is_seen_by_earlier == ((one, other) != (0, 1))


def test_a_copy_in_host_memory_has_the_digest_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are larger on a device. Rollbacks to the memory of a GPU's training failed."""
    on_host = digests_of(stored())
    monkeypatch.setattr(digests, "_CHUNK", digests._CHUNK_ON_DEVICE)
    assert digests_of(stored()) == on_host
    assert earlier_digests_of(stored())["w"] != EARLIER["w"]


def test_an_earlier_release_checkpoint_is_compared_as_it_was_written() -> None:
    present = digests_of(stored(), like=EARLIER)
    assert compare(EARLIER, present) == (2, ())
    changed = stored()
    changed["w"][-1] += 1
    assert compare(EARLIER, digests_of(changed, like=EARLIER)).different == ("w",)
    new = digests_of(stored())
    assert compare({**EARLIER, "b": new["b"]}, digests_of(stored(), like={**EARLIER, "b": new["b"]})) == (2, ())


def test_an_earlier_release_does_not_take_the_digests_for_different() -> None:
    """It compares those of equal types alone, as now."""
    assert compare(digests_of(stored()), EARLIER) == (0, ())


def test_ranks_of_two_releases_are_not_called_different() -> None:
    first = {"digests": digests_of(stored())}
    mine: dict[str, Any] = {"run": {"digests": EARLIER}, "own": None}
    assert with_digests_of_restored("step-1", mine, first)["digests"] == EARLIER


SPARSE = [
    lambda values: torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), values, (5,)),
    lambda values: torch.sparse_csr_tensor(torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]), values, (2, 2)),
    lambda values: torch.nested.nested_tensor([values[:2], values[2:]], layout=torch.jagged),
    lambda values: torch.nn.Parameter(values.to_mkldnn(), requires_grad=False),
]


@pytest.mark.parametrize("make", SPARSE)
def test_values_of_a_sparse_parameter_are_checked_but_not_compared(make: Any) -> None:
    assert all_finite([make(torch.tensor([1.0, 2.0, 3.0]))])
    assert not all_finite([make(torch.tensor([1.0, 2.0, float("nan")]))])
    assert digests_of({"w": make(torch.ones(3))}) == {}


def test_a_model_with_sparse_complex_parameters_has_a_health() -> None:
    model = nn.Module()
    index, shape = torch.tensor([[0, 1]]), (3,)
    model.weight = nn.Parameter(torch.sparse_coo_tensor(index, torch.tensor([1 + 1j, 2.0]), shape))
    assert are_finite({"model": model}, {})
    model.weight = nn.Parameter(torch.sparse_coo_tensor(index, torch.tensor([complex(0, float("inf")), 2.0]), shape))
    assert not are_finite({"model": model}, {})
