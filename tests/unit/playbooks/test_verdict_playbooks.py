"""The shipped playbooks on verdicts: each class of cause is told, and at most one of them changes anything."""

from __future__ import annotations

from itertools import product

import pytest

from tests.unit.playbooks.test_shipped_playbooks import FILES
from trainmedic_core.fingerprint import fingerprint
from trainmedic_logs.diagnosis.verdict import Confidence
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.engine import verdict_alert
from trainmedic_server.simulation.virtual_time import BEGINNING

BOOKS = [
    book
    for path in FILES
    if path.stem.startswith("training-failed")
    for book in loader.load_file(path, registry.specs_only()).playbooks
]
CHANGED_BY = {
    CauseClass.GPU: "training-failed-node",
    CauseClass.NODE: "training-failed-node",
    CauseClass.NETWORK: "training-failed-node",
    CauseClass.STORAGE: "training-failed-node",
    CauseClass.GPU_MEMORY: "training-failed-memory",
    CauseClass.HOST_MEMORY: "training-failed-memory",
    CauseClass.CODE: "training-failed-program",
    CauseClass.NUMERICS: "training-failed-program",
}


@pytest.mark.parametrize(("cause", "confidence", "node"), list(product(CauseClass, Confidence, ["node-2", None])))
def test_one_tells_and_at_most_one_changes(cause: CauseClass, confidence: Confidence, node: str | None) -> None:
    """Whatever a verdict says."""
    labels = verdict_alert.labels_of("llm-1", {"cause": cause, "confidence": confidence, "node": node})
    alert = Alert(fingerprint(labels), AlertStatus.FIRING, labels, {}, BEGINNING, None)
    reacting = {book.definition.name for book in BOOKS if book.match(alert).matched}
    assert "training-failed" in reacting
    changing = reacting - {"training-failed"}
    assert changing <= {CHANGED_BY.get(cause)}
    assert not changing or confidence is not Confidence.LOW
    if cause in CHANGED_BY and confidence is Confidence.HIGH and node:
        assert changing


def test_those_that_change_something_observe_until_somebody_lets_them_act() -> None:
    """And the one that tells only tells."""
    for book in BOOKS:
        if book.definition.name == "training-failed":
            assert {step.action for step in book.definition.steps if hasattr(step, "action")} == {"notify"}
        else:
            assert book.definition.mode is Mode.OBSERVE
