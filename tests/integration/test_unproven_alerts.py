"""An alert that proves too little for a playbook that can do harm: no run begins, and people see what to do."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support.command_line import CommandLine
from tests.support.programs import ROOT, start_server
from trainmedic_core.fingerprint import fingerprint

OURS = {"runbook_url": "docs/how-to/monitoring.md#gpumissing"}


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A server in mode enforce with the shipped playbooks."""
    directory = tmp_path_factory.mktemp("server")
    program, url = start_server(directory, "--mode", "enforce", playbooks=ROOT / "playbooks")
    with program:
        yield CommandLine(url)


def post(url: str, labels: dict[str, str], annotations: dict[str, str]) -> list[dict[str, Any]]:
    """Deliver one alert; the decisions in the answer."""
    alert = {
        "status": "firing",
        "labels": labels,
        "annotations": annotations,
        "startsAt": datetime.now(UTC).isoformat(),
        "fingerprint": fingerprint(labels),
    }
    payload = {"version": "4", "status": "firing", "receiver": "r", "groupKey": "g", "alerts": [alert]}
    request = urllib.request.Request(
        f"{url}/webhook", json.dumps(payload).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        runs: list[dict[str, Any]] = json.load(reply)["runs"]
        return runs


def test_rejections_are_in_the_status_and_in_why(command_line: CommandLine) -> None:
    """They are listed per alertname and playbook, with count and advice; a foreign rule and one of an earlier
    release are told apart."""
    before = command_line.run("status")
    assert "NO PROOF" not in before.out
    url = command_line.url
    for gpu in ("2", "3"):
        assert post(url, {"alertname": "GPUXidError", "node": "gpu-71", "gpu": gpu, "err_code": "13"}, {}) == []
    assert post(url, {"alertname": "GPUMissing", "node": "gpu-71", "severity": "critical"}, OURS) == []
    shown = [line for line in command_line.run("status").out.splitlines() if line.startswith("NO PROOF")]
    missing, xid = shown
    assert "gpu-broken refused 1 of GPUMissing within a day" in missing
    assert "its rule is of an earlier release of Trainmedic: deploy the rules of this release" in missing
    assert "gpu-broken refused 2 of GPUXidError within a day" in xid
    assert 'err_code="13" is an error of the program' in xid
    told = json.loads(command_line.run("status", "--output", "json").out)["unproven"]
    assert [(each["playbook"], each["alert"], each["alerts"]) for each in told] == [
        ("gpu-broken", "GPUMissing", 1),
        ("gpu-broken", "GPUXidError", 2),
    ]
    why = command_line.run("why", "--alert", "GPUXidError").out
    assert 'it does not carry trainmedic_rule="1"' in why


def test_a_label_reserved_for_own_alerts_is_not_accepted_from_outside(command_line: CommandLine) -> None:
    """It is renamed on arrival, so the playbook for a kernel message does not react."""
    labels = {"alertname": "GPUXidLogged", "node": "gpu-72", "severity": "critical", "source": "log", "xid": "79"}
    assert post(command_line.url, labels, {}) == []


def test_an_alert_with_enough_proof_starts_a_run(command_line: CommandLine) -> None:
    """The proof is the label of the shipped rules, or its code."""
    proven = {"alertname": "GPUMissing", "node": "gpu-73", "trainmedic_rule": "1"}
    by_code = {"alertname": "GPUXidError", "node": "gpu-74", "UUID": "GPU-90ab", "err_code": "95"}
    assert [run["playbook"] for labels in (proven, by_code) for run in post(command_line.url, labels, {})] == [
        "gpu-broken",
        "gpu-broken",
    ]
