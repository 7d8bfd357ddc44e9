"""The shipped Prometheus rules and configurations, judged by Prometheus's and Alertmanager's own programs."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import programs
from trainmedic_core import yaml_text
from trainmedic_logs.diagnosis.verdict import Confidence
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_server.domain.alert import SHIPPED_RULE, SHIPPED_RULE_LABEL
from trainmedic_server.domain.component import Component, component_of
from trainmedic_server.engine import verdict_alert

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
    "TrainingRollbackNotHeld": "critical",
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
    "LogReadingCut": "warning",
    "LogWordingChanged": "warning",
    "LogReaderAway": "warning",
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
    "SlurmNodeDown": "critical",
    "SlurmNodesNotResponding": "warning",
    "SlurmPartitionShort": "warning",
    "SlurmControllerDown": "critical",
    "NodePartDegraded": "warning",
    "NodePartFailed": "critical",
}

ON_CALL = programs.ROOT / "docs" / "on-call.md"
RUNBOOK = "https://trainmedic.example/docs/on-call.md"
"""The base of the shipped rules' links; the chart's value `monitoring.prometheusRule.runbookBaseUrl` replaces it."""

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
    paths = (programs.ROOT / "logs/trainmedic_logs/logrules").glob("*.yaml")
    return [document for path in paths for document in load_all(path) if "log_rule" in document]


def test_every_rule_behaves_as_its_promtool_tests_say() -> None:
    """Each alert fires when it should, neither below its threshold nor too early, and resolves."""
    output_of("promtool", "test", "rules", *RULE_TESTS)


def test_prometheus_accepts_the_configuration_and_its_rules() -> None:
    """promtool finds no errors in the rules and the configuration that loads them."""
    output_of("promtool", "check", "rules", *RULES)
    assert f"{len(RULES)} rule files found" in output_of("promtool", "check", "config", MONITORING / "prometheus.yml")


def test_the_alerts_and_severities_are_those_promised() -> None:
    """The names and severities that playbooks match on are stable."""
    assert {name: rule["labels"]["severity"] for name, rule in shipped_alerts().items()} == ALERTS


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    """promtool's cases cover all alerts in both directions, annotations included."""
    cases = [case for path in RULE_TESTS for test in load(path)["tests"] for case in test.get("alert_rule_test", [])]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(ALERTS)
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == set(ALERTS)


def test_every_alert_has_a_component_and_is_repaired_or_for_people() -> None:
    """The component is for routing; ``needs: people`` is set exactly if no shipped playbook takes the alert."""
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


def test_every_rule_has_the_label_that_harmful_playbooks_require() -> None:
    """A rule's condition on its own alert does not depend on it, so that an upgrade of the rules ends no alert."""
    for name, rule in shipped_alerts().items():
        assert rule["labels"][SHIPPED_RULE_LABEL] == SHIPPED_RULE, name
    for path in RULES:
        for ignored in re.findall(r"ignoring \(alertname,[^)]*\)", path.read_text()):
            assert SHIPPED_RULE_LABEL in ignored, path


def test_no_repaired_alert_ends_because_one_scrape_failed() -> None:
    """Its end tells a playbook that all is well: it outlives its series, or is based on counts over a time."""
    over_time = re.compile(r"_over_time\(|increase\(|\bup\b")
    for name, rule in shipped_alerts().items():
        if rule["labels"].get("needs") != "people" and not over_time.search(rule["expr"]):
            assert "keep_firing_for" in rule, name


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_alert_has_an_explanation() -> None:
    """It has a summary, a description, and an absolute link to a section of the on-call page."""
    there = anchors(ON_CALL)
    for name, rule in shipped_alerts().items():
        annotations = rule["annotations"]
        assert annotations["summary"], name
        assert annotations["description"], name
        assert annotations["runbook_url"] == f"{RUNBOOK}#{name.lower()}"
        assert name.lower() in there
    assert {name.lower() for name in OF_VERDICTS | {"NodeSuspect"}} <= there


def test_the_on_call_page_names_every_alert_of_a_log_rule() -> None:
    """Each of them is in its table."""
    page = ON_CALL.read_text()
    names = {rule["alert"]["name"] for rule in shipped_log_rules() if "alert" in rule}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_one_command_changes_the_links_of_all_rules(tmp_path: Path) -> None:
    """The documented command runs on a copy of the rules: each link has the new base and its anchor."""
    page = (programs.ROOT / "docs/how-to/use-your-own-alerts.md").read_text()
    (command,) = re.findall(r"^\s*(sed -i .*runbook.*|sed -i .*on-call.*)$", page, re.MULTILINE)
    shutil.copytree(MONITORING, tmp_path / "monitoring")
    subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, check=True)
    changed = [load(path) for path in sorted((tmp_path / "monitoring" / "rules").glob("*.yaml"))]
    rules = [rule for document in changed for group in document["groups"] for rule in group["rules"] if "alert" in rule]
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules}
    assert links == {name: f"https://git.example.org/trainmedic/docs/on-call.md#{name.lower()}" for name in ALERTS}


def test_alertmanager_accepts_the_configuration_with_and_without_a_token(alertmanager: Path, tmp_path: Path) -> None:
    """amtool finds no error in the configuration, nor in its commented part once that is active."""
    config = MONITORING / "alertmanager.yml"
    amtool = alertmanager.with_name("amtool")
    output_of(amtool, "check-config", config)
    with_token = tmp_path / "alertmanager.yml"
    with_token.write_text(re.sub(r"^( +)# (http_config|  .+)", r"\1\2", config.read_text(), flags=re.MULTILINE))
    assert load(with_token)["receivers"][0]["webhook_configs"][0]["http_config"]["authorization"]["credentials_file"]
    output_of(amtool, "check-config", with_token)


def all_labels() -> dict[str, dict[str, str]]:
    """The labels of every alert that the shipped rules, the shipped log rules and the server's diagnosis raise."""
    every = {name: {"alertname": name, **rule["labels"]} for name, rule in shipped_alerts().items()}
    for rule in (rule["alert"] for rule in shipped_log_rules() if "alert" in rule):
        severity = rule.get("severity", "warning")
        for grave in (severity,) if severity in ("warning", "critical") else ("warning", "critical"):
            said = {"alertname": rule["name"], "severity": grave, "component": rule.get("component", "training")}
            every[f"{rule['name']} {grave}"] = {**said, "source": "log", **rule.get("labels", {})}
    for cause, confidence in itertools.product(CauseClass, Confidence):
        said = {"cause": cause, "confidence": confidence, "node": "", "fingerprint": ""}
        every[f"TrainingFailed {cause} {confidence}"] = verdict_alert.labels_of("llm-7", said)
    return every | {"NodeSuspect": verdict_alert.labels_of_suspect("gpu-07")}


def routed(amtool: Path, config: Path, labels: dict[str, str]) -> list[str]:
    argv = (
        amtool,
        "config",
        "routes",
        "test",
        f"--config.file={config}",
        *(f"{k}={v}" for k, v in labels.items() if v),
    )
    return output_of(*argv).strip().split(",")


ROUTED_BY = ("component", "severity", "needs", "source", "cause", "confidence")


def receivers_of_all(amtool: Path, config: Path) -> dict[str, list[str]]:
    """Where each alert goes; those that are alike to every route are asked for once."""
    asked: dict[tuple[str, ...], list[str]] = {}
    receivers = {}
    for name, labels in all_labels().items():
        alike = tuple(labels.get(each, "") for each in ROUTED_BY)
        if alike not in asked:
            asked[alike] = routed(amtool, config, dict(zip(ROUTED_BY, alike, strict=True)))
        receivers[name] = asked[alike]
    return receivers


def documented_receivers() -> dict[str, str]:
    """The team of each component, as the documentation's table has it."""
    page = (programs.ROOT / "docs/how-to/use-your-own-alerts.md").read_text().partition("## Who gets which alert")[2]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `([\w-]+)` \|", page.partition("\n## ")[0], re.MULTILINE)
    return {each.strip("`"): receiver for components, receiver in rows for each in components.split(", ")}


def test_every_alert_is_routed_as_documented(alertmanager: Path) -> None:
    """All go to Trainmedic; those without a repair go to the team of their component, as in the server's routes,
    and what is critical of it to on call."""
    team_of = documented_receivers()
    assert team_of.keys() == set(Component)
    receivers = receivers_of_all(alertmanager.with_name("amtool"), MONITORING / "alertmanager.yml")
    for name, labels in all_labels().items():
        on_call = ["on-call"] if labels["severity"] == "critical" else []
        people = [*on_call, team_of[component_of(labels)]] if labels.get("needs") == "people" else []
        assert receivers[name] == ["trainmedic", *people], name


def test_teams_get_every_alert_if_the_matcher_is_removed(alertmanager: Path, tmp_path: Path) -> None:
    """The file describes this; a verdict goes to the team of its cause there, too."""
    config = tmp_path / "alertmanager.yml"
    config.write_text((MONITORING / "alertmanager.yml").read_text().replace("- matchers: [needs = people]\n     ", "-"))
    team_of = documented_receivers()
    receivers = receivers_of_all(alertmanager.with_name("amtool"), config)
    for name, labels in all_labels().items():
        on_call = ["on-call"] if labels["severity"] == "critical" else []
        assert receivers[name] == ["trainmedic", *on_call, team_of[component_of(labels)]], name


def test_alerts_and_resolutions_reach_trainmedic_at_once() -> None:
    """They arrive within seconds."""
    loaded = load(MONITORING / "alertmanager.yml")
    assert loaded["route"]["routes"][0] == {"receiver": "trainmedic", "continue": True}
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


def test_an_alert_silences_the_alerts_that_it_explains(alertmanager_url: str) -> None:
    """NodeDown silences its node's other alerts, a hot GPU its idleness, a job's cause its effects; no more."""
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

    silenced = programs.eventually(settled, 60, "the alerts and their inhibitions")
    by_a_node_or_gpu = [
        {"alertname": "DiskSpaceLow", "node": "node-1"},
        {"alertname": "GPUUtilizationLow", "node": "node-3", "gpu_id": "0"},
        {"alertname": "GPUUtilizationLow", "node": "node-4", "UUID": "GPU-a", "gpu": "0"},
    ]
    assert {frozenset(labels.items()) for labels in silenced} == {
        frozenset(labels.items()) for labels in explained + by_a_node_or_gpu
    }
