"""Comparison of saved digests with the loaded parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trainmedic.torch.checkpoints.state_digests import compare_with
from trainmedic.torch.state_parts import ATTRIBUTES


def test_an_attribute_that_was_not_restored_hides_no_other_whose_name_begins_alike() -> None:
    """A DDP model's hooks are numbered: 1 and 10."""
    parts: Any = SimpleNamespace(
        attributes=SimpleNamespace(not_restored=["model.comm_hook.1"], is_empty=True),
        modules=dict,
        optimizers=dict,
        optimizer_parts=dict,
    )
    names = [f"{ATTRIBUTES}.model.comm_hook.{end}" for end in ("1.error", "1:.inner", "10.error")]
    assert compare_with(dict.fromkeys(names, "float32:0"), parts).different == (names[-1],)
