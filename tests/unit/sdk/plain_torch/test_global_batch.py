"""What makes one optimizer step after the number of ranks has changed."""

from __future__ import annotations

import pytest

from trainmedic.torch.global_batch import GlobalBatch, GlobalBatchLost, accumulation_to_continue_with


def batch(micro_batch: int | None, accumulation: int, ranks: int, given: int | None = None) -> GlobalBatch:
    return GlobalBatch(micro_batch, accumulation, ranks, accumulation if given is None else given)


@pytest.mark.parametrize(
    ("then", "now", "accumulation"),
    [
        (batch(4, 1, 4), batch(4, 1, 2), 2),  # one node fewer
        (batch(4, 2, 2, given=1), batch(4, 1, 4), 1),  # and one more again
        (batch(4, 2, 2, given=1), batch(4, 1, 2), 2),  # a restart meanwhile
        (batch(4, 2, 2, given=1), batch(8, 1, 2), 1),  # a larger micro-batch meanwhile
        (batch(4, 1, 2), batch(8, 1, 2), 1),  # the script has another batch; the ranks were always these
        (batch(4, 2, 2), batch(4, 3, 2), 3),  # the script asks for something else
        (batch(4, 6, 4), batch(4, 6, 3), 8),
        (batch(4, 1, 4), batch(8, 1, 2), 1),  # the script has a larger micro-batch now
        (batch(None, 2, 4), batch(None, 2, 2), 4),
        (batch(None, 2, 4), batch(3, 2, 2), 4),  # its size is not known of both
        (batch(4, 8, 1), batch(4, 1, 8), 1),  # the script divides by the ranks itself
    ],
)
def test_as_many_samples_as_before_make_a_step(then: GlobalBatch, now: GlobalBatch, accumulation: int) -> None:
    """Whether ranks were lost, came back, or neither."""
    assert accumulation_to_continue_with(then, now, True) == accumulation
    assert GlobalBatch.from_plain(then.plain()) == then


@pytest.mark.parametrize(
    ("then", "now", "reason"),
    [
        (batch(4, 1, 4), batch(4, 1, 3), "a global batch of 16 samples is not a multiple of 12"),
        (batch(4, 1, 1), batch(4, 1, 2), "a global batch of 4 samples is not a multiple of 8"),
        (batch(4, 2, 2, given=1), batch(3, 1, 2), "of micro-batches of 4, and they are of 3 now: a global batch of 16"),
        (batch(None, 1, 4), batch(None, 1, 3), "a global batch of 4 batches is not a multiple of 3"),
    ],
)
def test_where_no_accumulation_keeps_it_the_reason_is_told(then: GlobalBatch, now: GlobalBatch, reason: str) -> None:
    """And what can be done."""
    with pytest.raises(GlobalBatchLost, match=reason):
        accumulation_to_continue_with(then, now, True)


def test_a_loop_that_does_not_accumulate_cannot_keep_it() -> None:
    """Unless it has done so itself."""
    with pytest.raises(GlobalBatchLost, match="does not declare gradient accumulation"):
        accumulation_to_continue_with(batch(4, 1, 4), batch(4, 1, 2), False)
    assert accumulation_to_continue_with(batch(4, 1, 4), batch(8, 1, 2), False) == 1


@pytest.mark.parametrize("kept", [None, 5, {}, {"accumulation": "2", "ranks": 1, "given": 1}, {"accumulation": 0}])
def test_a_checkpoint_that_says_nothing_of_it_is_taken(kept: object) -> None:
    """One of an earlier release, or one that was written over by hand."""
    assert GlobalBatch.from_plain(kept) is None
