"""The metrics of evaluations in a presence: what is written can be read, and what cannot be read is left out."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from trainmedic.wire import evaluations
from trainmedic.wire.evaluations import EvaluatedMetric

AT = datetime(2026, 5, 4, 12, 30, tzinfo=UTC)


def test_what_is_written_is_read() -> None:
    """Through JSON, with a name as people give it, without a step, and a value that is no number."""
    metrics = (EvaluatedMetric("mmlu/acc@5", 0.62, 1200, AT), EvaluatedMetric("bleu", None, None, AT))
    assert evaluations.read(json.loads(json.dumps(evaluations.as_plain(metrics), allow_nan=False))) == metrics


@pytest.mark.parametrize(
    "members",
    [
        {"metric": "a b"},
        {"metric": "x" * 101},
        {"metric": 7},
        {"value": "much"},
        {"value": True},
        {"value": None},
        {"at": "yesterday"},
        {"value": 10**400},
    ],
)
def test_what_is_malformed_is_left_out(members: dict[str, Any]) -> None:
    """The others stay."""
    good = {"metric": "accuracy", "value": 0.5, "at": "2026-05-04T12:30:00Z"}
    assert [metric.name for metric in evaluations.read([{**good, "metric": "bad", **members}, good])] == ["accuracy"]


def test_there_are_only_so_many() -> None:
    """Of whoever writes more, the first; and nothing of what is no list."""
    many = [{"metric": f"m{number}", "value": 1, "at": "2026-05-04T12:30:00Z"} for number in range(100)]
    assert len(evaluations.read(many)) == evaluations.MOST
    assert evaluations.read({"metric": "accuracy"}) == evaluations.read(None) == ()
