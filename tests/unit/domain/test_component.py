"""The component of everything that Trainmedic ships and raises, by which messages find their team."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.diagnosis.verdict import Confidence
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_server.domain.component import Component, component_of
from trainmedic_server.engine import verdict_alert

ROOT = Path(__file__).parents[3]
VERDICT: dict[str, Any] = {"cause": "gpu", "confidence": "high", "node": "gpu-07", "fingerprint": "cuda/lost"}


def shipped_rules() -> list[dict[str, Any]]:
    files = sorted((ROOT / "monitoring" / "rules").glob("*.yaml"))
    groups = [group for file in files for group in yaml.load(file.read_bytes(), yaml.CSafeLoader)["groups"]]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def shipped_log_rules() -> list[dict[str, Any]]:
    files = [
        file
        for file in sorted((ROOT / "logs/trainmedic_logs/logrules").glob("*.yaml"))
        if not file.stem.endswith(("_test", "_fixture"))
    ]
    documents = [
        document for file in files for document in yaml.load_all(file.read_bytes(), yaml.CSafeLoader) if document
    ]
    return [document for document in documents if document.get("alert")]


def shipped_playbooks() -> dict[str, dict[str, Any]]:
    files = sorted((ROOT / "playbooks").glob("*.yaml"))
    documents = [document for file in files for document in yaml.load_all(file.read_bytes(), yaml.CSafeLoader)]
    return {document["playbook"]: document for document in documents if document and "playbook" in document}


@pytest.mark.parametrize("rule", shipped_rules(), ids=lambda rule: rule["alert"])
def test_every_shipped_alert_says_its_component(rule: dict[str, Any]) -> None:
    """In its label, so that the server and the Alertmanager route it alike."""
    labels = {"alertname": rule["alert"], **rule["labels"]}
    assert component_of(labels) == rule["labels"]["component"]


@pytest.mark.parametrize("rule", shipped_log_rules(), ids=lambda rule: rule["log_rule"])
def test_every_shipped_log_rule_says_its_component(rule: dict[str, Any]) -> None:
    """One of those that routes know; a rule that says none is about the training."""
    said = rule["alert"].get("component", "training")
    assert component_of({"alertname": rule["alert"]["name"], "component": said, "source": "log"}) == Component(said)


OF_PLAYBOOKS = {
    Component.GPU: {
        "gpu-broken", "gpu-memory-usage-high", "gpu-temperature-high", "gpu-thermal-throttling", "gpu-utilization-low",
    },
    Component.NODE: {"disk-space-low", "disk-space-not-cleaned", "hardware-logged", "memory-usage-high", "node-down"},
}  # fmt: skip


@pytest.mark.parametrize(("name", "playbook"), shipped_playbooks().items())
def test_every_shipped_playbook_has_a_component_where_a_person_starts_it(name: str, playbook: dict[str, Any]) -> None:
    """Then no alert says one. Those that are not listed above are about trainings."""
    expected = next((each for each, names in OF_PLAYBOOKS.items() if name in names), Component.TRAINING)
    written = playbook["target"]
    target = Target(TargetKind(written if isinstance(written, str) else min(written)), node="n", gpu="g", job="j")
    assert component_of({"alertname": "StartedByHand"}, name, target) == expected


CAUSES = {
    CauseClass.GPU: Component.GPU,
    CauseClass.GPU_MEMORY: Component.TRAINING,
    CauseClass.HOST_MEMORY: Component.TRAINING,
    CauseClass.NETWORK: Component.NETWORK,
    CauseClass.STORAGE: Component.STORAGE,
    CauseClass.DATA: Component.TRAINING,
    CauseClass.CODE: Component.TRAINING,
    CauseClass.NUMERICS: Component.TRAINING,
    CauseClass.NODE: Component.NODE,
    CauseClass.PREEMPTION: Component.TRAINING,
    CauseClass.HANG: Component.TRAINING,
    CauseClass.UNKNOWN: Component.TRAINING,
}


@pytest.mark.parametrize("cause", CauseClass)
@pytest.mark.parametrize("confidence", Confidence)
def test_a_verdict_goes_to_who_can_repair_its_cause(cause: CauseClass, confidence: Confidence) -> None:
    """Unless it is a mere hint, which sends nobody but the job's own people looking."""
    labels = verdict_alert.labels_of("llm-7", {**VERDICT, "cause": cause, "confidence": confidence})
    expected = Component.TRAINING if confidence is Confidence.LOW else CAUSES[cause]
    assert component_of(labels) == expected


def test_a_suspect_node_is_about_the_node() -> None:
    assert component_of(verdict_alert.labels_of_suspect("gpu-07")) is Component.NODE


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"alertname": "Anything", "component": "Network"}, Component.NETWORK),
        ({"alertname": "DCGMXidErrors", "component": "dc-north"}, Component.GPU),
        ({"alertname": "NVLinkErrors"}, Component.GPU),
        ({"alertname": "KubeNodeNotReady"}, Component.NODE),
        ({"alertname": "HostDiskFillsUp"}, Component.NODE),
        ({"alertname": "nccl_slow"}, Component.NETWORK),
        ({"alertname": "NfsServerAway"}, Component.STORAGE),
        ({"alertname": "Odd", "job_name": "llm-7", "node": "gpu-07"}, Component.TRAINING),
        ({"alertname": "Odd", "node": "gpu-07"}, Component.NODE),
        ({"alertname": "Odd"}, Component.TRAINMEDIC),
        ({}, Component.TRAINMEDIC),
        ({"alertname": "Odd", "cause": "gpu", "confidence": "high", "job_name": "llm-7"}, Component.TRAINING),
    ],
)
def test_an_alert_of_other_rules_has_the_nearest_component(labels: dict[str, str], expected: Component) -> None:
    """By its label, its name, or what it names; a label ``cause`` counts in a verdict alone."""
    assert component_of(labels) is expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (TargetKind.GPU, Component.GPU),
        (TargetKind.NODE, Component.NODE),
        (TargetKind.JOB, Component.TRAINING),
        (TargetKind.CLUSTER, Component.NODE),
    ],
)
def test_a_name_that_says_nothing_leaves_it_to_the_target(kind: TargetKind, expected: Component) -> None:
    assert component_of({"alertname": "Odd"}, "acme-one", Target(kind, node="n", gpu="g", job="j")) is expected
