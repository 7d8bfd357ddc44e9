"""The options of `trainmedic.distributed.share`."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import trainmedic
import trainmedic.distributed


@pytest.mark.parametrize(
    "options",
    [
        {"every": 0},
        {"every": 2.5},
        {"every": True},
        {"patience": "10"},
        {"patience": float("inf")},
        {"call_patience": float("nan")},
        {"call_patience": -1},
    ],
)
def test_an_option_that_cannot_be_is_refused_at_once(options: dict[str, Any]) -> None:
    """Later the error would end the agreement of the ranks, or the training."""
    (name,) = options
    with (
        trainmedic.connect(job="llm-1", rank=0, world_size=1) as medic,
        pytest.raises(trainmedic.ConfigurationError, match=f"^share: {name} is "),
    ):
        trainmedic.distributed.share(medic, store=HashStore(), **options)
