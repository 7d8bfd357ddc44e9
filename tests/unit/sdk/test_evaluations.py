"""Which of an evaluation's metrics are its loss and its perplexity."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainmedic.trainer.evaluations import loss_and_perplexity, other_metrics


@pytest.mark.parametrize(
    ("metrics", "is_of_tokens", "both"),
    [
        ({}, True, (None, None)),
        ({"eval_loss": 1.5, "eval_runtime": 3.0, "epoch": 1.0}, False, (1.5, None)),
        ({"eval_loss": 1.5}, True, (1.5, math.exp(1.5))),
        ({"eval_loss": 1000.0}, True, (1000.0, math.inf)),
        ({"eval_loss": 1.5, "eval_perplexity": 4.0}, True, (1.5, 4.0)),
        ({"eval_wiki_loss": 2.0, "eval_books_and_more_loss": 3.0}, False, (2.0, None)),
        ({"val/loss_epoch": 0.5, "valid-ppl": 9.0}, False, (0.5, 9.0)),
        ({"train_loss": 1.0, "interval_loss": 2.0, "val_loss_weight": 3.0, "loss": 4.0}, False, (None, None)),
    ],
)
def test_loss_and_perplexity_have_usual_names(
    metrics: dict[str, Any], is_of_tokens: bool, both: tuple[Any, Any]
) -> None:
    """The perplexity follows from the loss of tokens alone."""
    assert loss_and_perplexity(metrics, is_of_tokens) == both


def test_other_evaluation_values_are_reported_by_name() -> None:
    """The prefix is removed; durations, non-numbers and the training's own values are left out."""
    metrics = {
        "eval_loss": 1.5,
        "eval_accuracy": 0.8,
        "val/f1": 0.7,
        "eval_runtime": 3.0,
        "eval_samples_per_second": 9.0,
    }
    metrics |= {"eval_step": 4, "epoch": 1.0, "train_accuracy": 0.9, "eval_kind": "short"}  # type: ignore[dict-item]
    assert other_metrics(metrics) == {"accuracy": 0.8, "f1": 0.7}
