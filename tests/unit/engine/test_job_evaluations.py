"""From evaluations in presences to events: each value once, not more than one event a minute, and the last one too."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.support.clocks import START
from trainmedic.wire import evaluations as wire
from trainmedic.wire.evaluations import EvaluatedMetric
from trainmedic_server.engine.job_evaluations import JobEvaluations
from trainmedic_server.ports.outside import Presence


def job(accuracy: float | None, step: int, name: str = "llm-1", doubt: str | None = None) -> Presence:
    metric = EvaluatedMetric("accuracy", accuracy, step, START + timedelta(seconds=step))
    return Presence(name, START, {wire.FIELD: wire.as_plain([metric])}, doubt)


class Server:
    """It looks at the jobs, and what it records is durable at once."""

    def __init__(self) -> None:
        self.evaluations = JobEvaluations()

    def look(self, seconds: float, *jobs: Presence) -> list[Any]:
        events = self.evaluations.due(jobs, START + timedelta(seconds=seconds))
        self.evaluations.note_recorded(events, jobs)
        return [(event.data["job"], metric["value"]) for event in events for metric in event.data["metrics"]]


def test_a_value_is_recorded_once() -> None:
    """As long as the presence shows it; the next one after a minute, and of several only the newest."""
    server = Server()
    assert server.look(0, job(0.5, 1)) == [("llm-1", 0.5)]
    assert server.look(5, job(0.5, 1)) == []
    assert server.look(10, job(0.6, 2)) == []
    assert server.look(20, job(0.7, 3)) == []
    assert server.look(61, job(0.7, 3)) == [("llm-1", 0.7)]


def test_the_last_value_of_a_job_that_ends_is_recorded_at_once() -> None:
    """It would not be shown again. What is no number is recorded as such."""
    server = Server()
    server.look(0, job(0.5, 1))
    assert server.look(5, job(None, 2)) == []
    assert server.look(10) == [("llm-1", "NaN")]
    assert server.look(15) == []


def test_what_is_not_durable_yet_is_due_again() -> None:
    """A store that is away costs no value."""
    evaluations = JobEvaluations()
    assert len(evaluations.due([job(0.5, 1)], START)) == 1
    assert len(evaluations.due([job(0.5, 1)], START + timedelta(seconds=5))) == 1


def test_a_presence_that_is_not_believed_is_not_recorded() -> None:
    """Nor one without evaluations, of an older SDK."""
    server = Server()
    assert server.look(0, job(0.9, 1, doubt="it is not signed"), Presence("llm-2", START, {"step": 3})) == []
