"""The shipped Prometheus rules and configurations, judged by Prometheus's and Alertmanager's own programs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import programs
from trainmedic_server.catalog import yaml_text
from trainmedic_server.domain.alert import SHIPPED_RULE, SHIPPED_RULE_LABEL

MONITORING = programs.ROOT / "monitoring"
RULES = sorted((MONITORING / "rules").glob("*.yaml"))
RULE_TESTS = sorted((MONITORING / "rules" / "tests").glob("*.yaml"))
ALERTS = {
    "GPUTemperatureHigh": "warning",
    "GPUThermalThrottling": "warning",
    "GPUMemoryUsageHigh": "critical",
    "GPUUtilizationLow": "warning",
    "TrainingLossSpike": "critical",
    "TrainingLossNaN": "critical",
    "TrainingThroughputDrop": "warning",
    "GradientExplosion": "critical",
    "TrainingLearningRateOff": "critical",
    "TrainingDivergence": "critical",
    "TrainingRanksDiffer": "critical",
    "TrainingLossUnstable": "warning",
    "TrainingMemoryThrashing": "critical",
    "TrainingHang": "critical",
    "TrainingMemoryPressure": "critical",
    "TrainingMemoryLeak": "warning",
    "TrainingStraggler": "warning",
    "TrainingUnderused": "warning",
    "TrainingBelowTarget": "warning",
    "TrainingGone": "critical",
    "TrainingCrashing": "warning",
    "DiskSpaceLow": "critical",
    "MemoryUsageHigh": "warning",
    "NodeDown": "critical",
    "GPUXidError": "critical",
    "GPURecoveryNeeded": "critical",
    "GPUErrorUnclear": "warning",
    "GPUMissing": "critical",
    "GPUStuck": "critical",
    "GPURowRemapFailed": "critical",
    "GPUMemoryBroken": "critical",
    "DiskInodesLow": "critical",
    "SharedStorageLow": "critical",
    "UndoOverdue": "warning",
    "MessagesNotBelieved": "warning",
    "DeliveriesRefused": "critical",
    "DeliveriesUnauthorized": "critical",
    "AlertsRejected": "warning",
    "DeliveriesFailing": "critical",
    "PlaybooksBroken": "warning",
    "AlertMapBroken": "warning",
    "LogRulesBroken": "warning",
    "LogFindingsLost": "warning",
    "LogWordingChanged": "warning",
    "LogShippingLosesLines": "warning",
    "LogShippingStuck": "warning",
    "FindingsNotTold": "critical",
    "TrainmedicDown": "critical",
    "TrainmedicStoreAway": "critical",
    "TrainmedicRedisAway": "critical",
    "AgentLost": "warning",
    "RedisNearlyFull": "warning",
    "ApprovalWaiting": "warning",
    "BreakerOpen": "critical",
    "MessagesNotSent": "critical",
    "RetentionFailing": "warning",
}

OF_VERDICTS = {"TrainingFailed", "TrainingSlow"}
"""The alerts of the server's own diagnosis."""


@pytest.fixture(params=["installed", "current"])
def alertmanager(request: pytest.FixtureRequest) -> Path:
    """The binary of an Alertmanager: the installed one, and the one that scripts/fetch-alertmanager got."""
    binary = programs.alertmanagers().get(request.param)
    if binary is None:
        pytest.fail(f"no {request.param} Alertmanager; see scripts/fetch-alertmanager")
    return binary


def output_of(*argv: str | Path) -> str:
    """What a program prints; an assertion that it succeeds."""
    done = subprocess.run([str(part) for part in argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(path: Path) -> Any:
    (document,) = load_all(path)
    return document


def load_all(path: Path) -> list[Any]:
    """The documents of a file, as the server reads it."""
    documents, problems = yaml_text.read(path.read_text(), str(path))
    assert not problems
    return [document.value for document in documents]


def shipped_alerts() -> dict[str, dict[str, Any]]:
    rules = (rule for path in RULES for group in load(path)["groups"] for rule in group["rules"])
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def shipped_log_rules() -> list[dict[str, Any]]:
    paths = (programs.ROOT / "logrules").glob("*.yaml")
    return [document for path in paths for document in load_all(path) if "log_rule" in document]


def test_every_rule_behaves_as_its_promtool_tests_say() -> None:
    """Each alert fires when it should, not below its threshold nor too early, and resolves."""
    output_of("promtool", "test", "rules", *RULE_TESTS)


def test_prometheus_accepts_the_configuration_and_its_rules() -> None:
    """promtool finds no fault with the rules nor with the configuration that loads them."""
    output_of("promtool", "check", "rules", *RULES)
    assert f"{len(RULES)} rule files found" in output_of("promtool", "check", "config", MONITORING / "prometheus.yml")


def test_the_alerts_are_those_promised_with_their_severities() -> None:
    """The names and severities that playbooks match on are stable."""
    assert {name: rule["labels"]["severity"] for name, rule in shipped_alerts().items()} == ALERTS


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    """promtool's cases cover all alerts in both directions, annotations included."""
    cases = [case for path in RULE_TESTS for test in load(path)["tests"] for case in test.get("alert_rule_test", [])]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(ALERTS)
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == set(ALERTS)


def test_every_alert_says_what_it_is_about_and_is_repaired_or_for_people() -> None:
    """A component, by which people route; and ``needs: people`` exactly where no shipped playbook takes the alert."""
    documents = [each for path in (programs.ROOT / "playbooks").glob("*.yaml") for each in load_all(path)]
    triggers = [book["on"]["alert"] for book in documents if "playbook" in book]
    repaired = {name for trigger in triggers for name in ([trigger] if isinstance(trigger, str) else trigger)}
    of_logs = {
        rule["alert"]["name"]: rule["alert"].get("labels", {}) for rule in shipped_log_rules() if "alert" in rule
    }
    assert repaired <= set(ALERTS) | of_logs.keys() | OF_VERDICTS
    for name, labels in of_logs.items():
        assert (labels.get("needs") == "people") == (name not in repaired), name
    for name, rule in shipped_alerts().items():
        assert rule["labels"]["component"] in {"gpu", "training", "node", "storage", "trainmedic"}, name
        assert (rule["labels"].get("needs") == "people") == (name not in repaired), name


def test_every_rule_carries_the_label_that_harmful_playbooks_ask_for() -> None:
    """And what a rule asks of its own alert does not depend on it, so that an upgrade of the rules ends no alert."""
    for name, rule in shipped_alerts().items():
        assert rule["labels"][SHIPPED_RULE_LABEL] == SHIPPED_RULE, name
    for path in RULES:
        for ignored in re.findall(r"ignoring \(alertname,[^)]*\)", path.read_text()):
            assert SHIPPED_RULE_LABEL in ignored, path


def test_no_alert_that_is_repaired_ends_because_one_scrape_failed() -> None:
    """Its end says to a playbook that all is well: it outlives its series, or rests on counts over a time."""
    over_time = re.compile(r"_over_time\(|increase\(|\bup\b")
    for name, rule in shipped_alerts().items():
        if rule["labels"].get("needs") != "people" and not over_time.search(rule["expr"]):
            assert "keep_firing_for" in rule, name


def test_every_alert_explains_itself() -> None:
    """Summary, description and a runbook section that exists."""
    headings = re.findall(r"^#+ (.+)$", (programs.ROOT / "docs/how-to/monitoring.md").read_text(), re.MULTILINE)
    for name, rule in shipped_alerts().items():
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["annotations"]["runbook_url"] == f"docs/how-to/monitoring.md#{name.lower()}"
        assert name in headings


def test_alertmanager_accepts_the_configuration_with_and_without_a_token(alertmanager: Path, tmp_path: Path) -> None:
    """amtool finds no fault with the configuration, nor with its commented part once that is in use."""
    config = MONITORING / "alertmanager.yml"
    amtool = alertmanager.with_name("amtool")
    output_of(amtool, "check-config", config)
    with_token = tmp_path / "alertmanager.yml"
    with_token.write_text(re.sub(r"^( +)# (http_config|  .+)", r"\1\2", config.read_text(), flags=re.MULTILINE))
    assert load(with_token)["receivers"][0]["webhook_configs"][0]["http_config"]["authorization"]["credentials_file"]
    output_of(amtool, "check-config", with_token)


def test_every_alert_is_routed_to_trainmedic_at_once_and_its_end_too(alertmanager: Path) -> None:
    """Each alert reaches the receiver `trainmedic`, within seconds, resolved included; some reach people as well."""
    config = MONITORING / "alertmanager.yml"
    amtool = alertmanager.with_name("amtool")
    for name, rule in shipped_alerts().items():
        labels = [f"{key}={value}" for key, value in {"alertname": name, "node": "node-1", **rule["labels"]}.items()]
        expected = "people,trainmedic" if "needs" in rule["labels"] else "trainmedic"
        assert output_of(amtool, "config", "routes", "test", f"--config.file={config}", *labels).strip() == expected
    loaded = load(config)
    receiver = loaded["receivers"][0]["webhook_configs"][0]
    assert (receiver["url"], receiver["send_resolved"]) == ("http://127.0.0.1:8080/webhook", True)
    assert int(loaded["route"]["group_wait"].rstrip("s")) <= 5
    assert loaded["route"]["group_interval"] == "30s"


@pytest.fixture
def alertmanager_url(alertmanager: Path, tmp_path: Path) -> Iterator[str]:
    """A running Alertmanager with the shipped configuration, whose receiver is not there."""
    program, url = programs.start_alertmanager(alertmanager, MONITORING / "alertmanager.yml", tmp_path)
    with program:
        yield url


def test_what_explains_an_alert_silences_it(alertmanager_url: str) -> None:
    """NodeDown silences its node's other alerts, a hot GPU its own idleness, a job's cause its effects; no more."""
    explained = [
        {"alertname": "TrainingLossSpike", "job_name": "llm-2"},
        {"alertname": "TrainingLossNaN", "job_name": "llm-2"},
        {"alertname": "GradientExplosion", "job_name": "llm-2"},
        {"alertname": "TrainingThroughputDrop", "job_name": "llm-3"},
        {"alertname": "GPUUtilizationLow", "node": "node-6", "gpu_id": "0"},
        {"alertname": "GPUUtilizationLow", "node": "node-5", "uuid": "GPU-c", "gpu_id": "2"},
        {"alertname": "TrainingThroughputDrop", "job_name": "llm-4"},
        {"alertname": "TrainingThroughputDrop", "job_name": "llm-8"},
        {"alertname": "TrainingMemoryPressure", "job_name": "llm-5", "memory": "cuda"},
        {"alertname": "GPUMemoryUsageHigh", "job_name": "llm-6", "gpu": "3"},
    ]
    posted = [
        *explained,
        {"alertname": "TrainingLearningRateOff", "job_name": "llm-2"},
        {"alertname": "TrainingHang", "job_name": "llm-3", "node": "node-6"},
        {"alertname": "TrainingStraggler", "job_name": "llm-4"},
        {"alertname": "TrainingMemoryThrashing", "job_name": "llm-8", "memory": "cuda"},
        {"alertname": "TrainingMemoryLeak", "job_name": "llm-5", "memory": "cuda"},
        {"alertname": "TrainingMemoryPressure", "job_name": "llm-5", "memory": "host"},
        {"alertname": "TrainingMemoryPressure", "job_name": "llm-6", "memory": "cuda"},
        {"alertname": "TrainingMemoryPressure", "job_name": "llm-7", "memory": "host"},
        {"alertname": "GPUMemoryUsageHigh", "job_name": "llm-7", "gpu": "3"},
        {"alertname": "GPUMemoryUsageHigh", "node": "node-7", "gpu": "3"},
        {"alertname": "TrainingThroughputDrop", "job_name": "llm-2"},
        {"alertname": "NodeDown", "node": "node-1"},
        {"alertname": "DiskSpaceLow", "node": "node-1"},
        {"alertname": "DiskSpaceLow", "node": "node-2"},
        {"alertname": "NodeDown", "instance": "nowhere"},
        {"alertname": "TrainingLossSpike", "job_name": "llm-1"},
        {"alertname": "GPUTemperatureHigh", "node": "node-3", "gpu_id": "0"},
        {"alertname": "GPUUtilizationLow", "node": "node-3", "gpu_id": "0"},
        {"alertname": "GPUUtilizationLow", "node": "node-3", "gpu_id": "1"},
        {"alertname": "GPUTemperatureHigh", "node": "node-4", "UUID": "GPU-a", "gpu": "0"},
        {"alertname": "GPUUtilizationLow", "node": "node-4", "UUID": "GPU-a", "gpu": "0"},
        {"alertname": "GPUUtilizationLow", "node": "node-4", "UUID": "GPU-b", "gpu": "1"},
        {"alertname": "GPUThermalThrottling", "node": "node-5", "uuid": "GPU-c", "gpu_id": "2"},
    ]
    ends = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    api = f"{alertmanager_url}/api/v2/alerts"
    httpx.post(api, json=[{"labels": labels, "endsAt": ends} for labels in posted]).raise_for_status()

    def settled() -> list[dict[str, str]]:
        listed = httpx.get(api).json()
        silenced = [alert["labels"] for alert in listed if alert["status"]["inhibitedBy"]]
        return silenced if len(listed) == len(posted) and len(silenced) >= 3 + len(explained) else []

    silenced = programs.eventually(settled, 15, "the alerts and their inhibitions")
    by_a_node_or_gpu = [
        {"alertname": "DiskSpaceLow", "node": "node-1"},
        {"alertname": "GPUUtilizationLow", "node": "node-3", "gpu_id": "0"},
        {"alertname": "GPUUtilizationLow", "node": "node-4", "UUID": "GPU-a", "gpu": "0"},
    ]
    assert {frozenset(labels.items()) for labels in silenced} == {
        frozenset(labels.items()) for labels in explained + by_a_node_or_gpu
    }
