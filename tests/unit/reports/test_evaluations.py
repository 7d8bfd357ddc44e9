"""What evaluations have shown, from the events that a server records of them."""

from __future__ import annotations

from datetime import datetime, timedelta

from tests.support.clocks import START
from trainmedic.wire import evaluations as wire
from trainmedic.wire.evaluations import EvaluatedMetric
from trainmedic_server.domain.run import Event
from trainmedic_server.reports.evaluations import evaluation_records


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def event(minutes: float, *metrics: EvaluatedMetric) -> Event:
    return Event("job_evaluated", at(minutes), data={"job": "llm-1", "metrics": wire.as_plain(metrics)})


def test_each_metric_has_its_newest_value_and_its_range() -> None:
    """One that was told twice, as after a restart of the server, counts once."""
    first, second = EvaluatedMetric("accuracy", 0.5, 100, at(1)), EvaluatedMetric("accuracy", 0.75, 200, at(5))
    other = EvaluatedMetric("bleu", 31.0, None, at(2))
    bleu, accuracy = sorted(
        evaluation_records([event(1, first), event(2, other), event(5, second), event(9, second, first)]),
        key=lambda record: -(record.value or 0),
    )
    assert (accuracy.value, accuracy.step, accuracy.at) == (0.75, 200, at(5))
    assert (accuracy.reports, accuracy.lowest, accuracy.highest) == (2, 0.5, 0.75)
    assert (bleu.metric, bleu.step, bleu.problem) == ("bleu", None, None)


def test_a_value_that_is_no_number_is_named_and_not_made_up() -> None:
    """It is the newest all the same; the range is that of the finite ones."""
    before, after = EvaluatedMetric("accuracy", 0.5, 100, at(1)), EvaluatedMetric("accuracy", None, 200, at(5))
    (record,) = evaluation_records([event(1, before), event(5, after)])
    assert (record.value, record.problem, record.step) == (None, "not a finite number", 200)
    assert (record.lowest, record.highest) == (0.5, 0.5)


def test_what_an_event_holds_that_cannot_be_read_is_left_out() -> None:
    """Of whatever release or hand it is."""
    assert evaluation_records([Event("job_evaluated", START, data={"job": "llm-1", "metrics": "all fine"})]) == ()
