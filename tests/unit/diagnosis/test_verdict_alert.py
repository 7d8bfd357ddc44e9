"""The alert of a verdict is the same in a test of log rules and on a server."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from trainmedic_server.diagnosis import verdict_alert
from trainmedic_server.diagnosis.verdict import Advice, Confidence, Verdict
from trainmedic_server.domain.finding import CauseClass
from trainmedic_server.domain.known_verdict import KnownVerdict
from trainmedic_server.wiring import job_diagnoses

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("node", ["node-2", None])
def test_a_test_tells_what_a_server_tells(node: str | None) -> None:
    """Labels and annotations, but for the verdict's id."""
    made = Verdict(CauseClass.GPU, Confidence.HIGH, "A card is lost", Advice.ISOLATE_NODE, (3,), node, same_before=2)
    labels = verdict_alert.labels_of("llm-1", made)
    known = KnownVerdict("v1", "llm-1", 1, NOW, NOW, "gpu", "high", node, "f", made.plain(), labels)
    told = job_diagnoses.written(known, NOW)
    assert job_diagnoses._labels("llm-1", made.plain()) == labels
    assert {**verdict_alert.annotations_of(made), "verdict": "v1"} == dict(told.annotations)
