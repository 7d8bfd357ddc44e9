"""The shipped playbooks that can do harm react to no alert that proves too little, whatever it is called."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from pathlib import Path

import hypothesis
import pytest
import yaml
from hypothesis import strategies

from tests.unit.playbooks.test_shipped_playbooks import FILES
from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.domain.alert import SHIPPED_RULE, SHIPPED_RULE_LABEL, Alert, AlertStatus
from trainmedic_server.domain.playbook import ActionStep
from trainmedic_server.domain.proof import XID_LABELS

HARMFUL = {
    "k8s.cordon", "k8s.drain", "k8s.delete_pod", "k8s.restart", "k8s.scale", "k8s.taint", "launcher.exclude_node",
    "job.stop",
}  # fmt: skip
"""What takes work from a node or ends it."""
STOPS_IN_A_STEP = "training-memory-leak"
"""It saves the state of any job, and asks for the label where it stops one."""
ANSWER = "# If another rule has this name: "


@functools.cache
def book(path: Path) -> YamlPlaybook:
    (loaded,) = loader.load_file(path, registry.specs_only()).playbooks
    return loaded


def does_harm(path: Path) -> bool:
    steps = [step for step in book(path).definition.steps if isinstance(step, ActionStep)]
    return any(step.action in HARMFUL for step in steps)


def alert(labels: dict[str, str]) -> Alert:
    return Alert("f", AlertStatus.FIRING, labels, {}, datetime(2026, 3, 5, tzinfo=UTC))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_playbook_says_what_a_strangers_rule_of_its_name_would_do(path: Path) -> None:
    """In the same words, before its first key."""
    head = path.read_text(encoding="utf-8").split("\nplaybook: ")[0]
    assert head.count(ANSWER) == 1


@pytest.mark.parametrize("path", [path for path in FILES if does_harm(path)], ids=lambda path: path.stem)
def test_what_takes_work_from_a_node_or_ends_it_asks_for_proof(path: Path) -> None:
    """In ``on``; or in the step where the rest of the playbook does no harm."""
    if path.stem != STOPS_IN_A_STEP:
        assert "shipped_rule" in book(path).definition.on.proofs
        return
    harmful = [step for step in book(path).definition.steps if getattr(step, "action", "") in HARMFUL]
    assert all(SHIPPED_RULE_LABEL in (step.when or "") for step in harmful)


TEXTS = strategies.sampled_from(["", "0", "1", "31", "critical", "page", "node-1", "GPU-5f3a", "default", "true"])
LABELS = ("severity", "node", "instance", "gpu", "UUID", "job", "namespace", "cause", "confidence", "component")
NAMES = strategies.sampled_from([*LABELS, *sorted(XID_LABELS)])


@pytest.mark.parametrize(
    "path", [path for path in FILES if does_harm(path) and path.stem != STOPS_IN_A_STEP], ids=lambda path: path.stem
)
@hypothesis.given(labels=strategies.dictionaries(NAMES, TEXTS, max_size=9))
@hypothesis.settings(max_examples=60)
def test_no_labels_of_a_stranger_start_it(path: Path, labels: dict[str, str]) -> None:
    """Neither with the names of its own alerts, nor with codes of programs."""
    loaded = book(path)
    for name in loaded.definition.on.alertnames:
        assert not loaded.match(alert({**labels, "alertname": name})).matched


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_label_alone_is_what_was_missing(path: Path) -> None:
    """Of the alerts in the playbook's own tests: where only the proof is missing, the reason says that."""
    written = yaml.safe_load(path.with_name(f"{path.stem}_test.yaml").read_text(encoding="utf-8"))
    loaded = book(path)
    for test in written["tests"]:
        for entry in test.get("alerts", ()):
            labels = entry["alert"]["labels"]
            match = loaded.match(alert(labels))
            proven = loaded.match(alert({**labels, SHIPPED_RULE_LABEL: SHIPPED_RULE}))
            assert match.unproven == (proven.matched and not match.matched)
