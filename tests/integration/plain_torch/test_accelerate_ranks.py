"""Two ranks of a loop with Hugging Face Accelerate go back together, whatever deals out their batches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.plain_torch import accelerate_ranks as program
from tests.support.rank_processes import RankProcesses
from trainmedic.torch.sources.batch_sources import REPLAYED

RANKS = 2
CHOSEN = ("dealt", "split", "streamed")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By the way in which the loader was prepared, what each rank has written. No server is needed for it."""
    job = RankProcesses(tmp_path_factory.mktemp("ranks"), "redis://127.0.0.1:1/0")
    torchrun = job.torchrun(RANKS, program.__file__, *CHOSEN)
    try:
        assert torchrun.wait(300) == 0, job.log()
    finally:
        job.end()
    return {
        way: [json.loads((job.directory / f"{way}-{rank}.json").read_text()) for rank in range(RANKS)] for way in CHOSEN
    }


@pytest.mark.parametrize("way", CHOSEN)
def test_ranks_repeat_the_same_batches_and_the_same_training(way: str, outcomes: Any) -> None:
    """Each rank repeats its own part, bit for bit, without extra epochs."""
    for outcome in outcomes[way]:
        calm, repeated = outcome["calm"], outcome["repeated"]
        assert repeated["data"].startswith(REPLAYED)
        after = repeated["seen"][repeated["seen_before"] :]
        assert after == calm["seen"][-len(after) :]
        for name in ("state", "rate", "epoch"):
            assert repeated[name] == calm[name], name


@pytest.mark.parametrize("way", CHOSEN)
def test_ranks_skip_the_same_batches(way: str, outcomes: Any) -> None:
    """Each skips three, starting at the checkpoint."""
    for outcome in outcomes[way]:
        calm, skipped = outcome["calm"], outcome["skipped"]
        batches = 2 if way == "dealt" else 1  # make a step
        place = program.BACK_TO * batches + 3 - (1 if way == "dealt" else 0)  # of seven batches the last makes a step
        expected = calm["seen"][place:]
        after = skipped["seen"][skipped["seen_before"] :]
        assert len(expected) > 5
        assert after[: len(expected)] == expected


@pytest.mark.parametrize("way", ["dealt", "streamed"])
def test_ranks_do_not_train_on_the_same_samples(way: str, outcomes: Any) -> None:
    """Though their seeds differ, they share one order: in an epoch each sample comes once, plus a few to fill up."""
    epoch = -(-program.SAMPLES // (program.BATCH * RANKS))
    seen = [outcome["calm"]["seen"][:epoch] for outcome in outcomes[way]]
    samples = [sample for batches in seen for batch in batches for sample in batch]
    assert set(samples) == set(range(program.SAMPLES))
    assert len(samples) <= program.SAMPLES + program.BATCH


def test_the_samples_per_batch_are_known_unless_batches_are_streamed(outcomes: Any) -> None:
    """The throughput can then be reported; each rank has its part of a split batch."""
    assert [outcomes[way][0]["calm"]["samples"] for way in CHOSEN] == [4, 2, None]
