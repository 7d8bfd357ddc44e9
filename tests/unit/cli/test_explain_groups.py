"""``playbook explain`` of a group, with an inventory and a modes file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainmedic_core.cli.exits import InvalidInput
from trainmedic_server.cli.explain import explain

PLAYBOOK = """
playbook: rack
on: {alert: RackHot}
target: {nodes: {rack: "{{ labels.rack }}"}}
rollout: {serial: 2}
steps:
  - {action: k8s.cordon, undo: on_resolve}
"""


def test_members_batches_and_observed_only_members_are_shown(tmp_path: Path) -> None:
    """The inventory names nodes by host lists; the modes file takes one of them out."""
    (tmp_path / "rack.yaml").write_text(PLAYBOOK)
    (tmp_path / "inventory.yaml").write_text('"attributes:n[1-4]": rack=r1\n"attributes:m[01-12]": rack=r2\n')
    (tmp_path / "modes.yaml").write_text("modes: [{nodes: {rack: r1, name: n2}, mode: observe}]\n")
    alert = {"labels": {"alertname": "RackHot", "rack": "r1"}, "status": "firing"}
    (tmp_path / "alert.json").write_text(json.dumps(alert))
    options = ["--playbooks", str(tmp_path / "rack.yaml"), "--inventory", str(tmp_path / "inventory.yaml")]
    done = CliRunner().invoke(
        explain, [str(tmp_path / "alert.json"), *options, "--modes", str(tmp_path / "modes.yaml")]
    )
    assert done.exit_code == 0, done.output
    assert "members: 4: node:n1, node:n2, node:n3, node:n4" in done.output
    assert "rollout: batches of 2, 2" in done.output
    assert "only observed: node:n2" in done.output


@pytest.mark.parametrize("option", ["mode", "modes", "inventory"])
def test_values_that_a_server_decides_cannot_be_given_with_it(tmp_path: Path, option: str) -> None:
    """The answer would be by the server's own."""
    (tmp_path / "alert.json").write_text("[]")
    given = ["--server", "http://127.0.0.1:1", f"--{option}", "observe"]
    done = CliRunner().invoke(explain, [str(tmp_path / "alert.json"), *given])
    assert done.exit_code == 2
    assert f"--server uses its own {option}; omit --{option}" in done.output


@pytest.mark.parametrize(("at", "decision"), [("2026-01-31T10:05:00Z", "started"), (None, "the alert has resolved")])
def test_yesterdays_alert_is_judged_as_of_then(tmp_path: Path, at: str | None, decision: str) -> None:
    """``amtool alert query -o json`` gives each firing alert an end a few minutes ahead."""
    (tmp_path / "rack.yaml").write_text(
        PLAYBOOK.replace('target: {nodes: {rack: "{{ labels.rack }}"}}', "target: node").replace(
            "rollout: {serial: 2}\n", ""
        )
    )
    alert = {"labels": {"alertname": "RackHot", "node": "n1"}, "status": {"state": "active"}}
    alert |= {"startsAt": "2026-01-31T10:00:00Z", "endsAt": "2026-01-31T10:09:00Z"}
    (tmp_path / "alert.json").write_text(json.dumps([alert]))
    options = ["--mode", "enforce", "--playbooks", str(tmp_path / "rack.yaml"), *(("--at", at) if at else ())]
    done = CliRunner().invoke(explain, [str(tmp_path / "alert.json"), *options])
    assert done.exit_code == 0, done.output
    assert decision in done.output


def test_a_time_before_all_dates_is_rejected(tmp_path: Path) -> None:
    """It is reported as an invalid option."""
    (tmp_path / "rack.yaml").write_text(PLAYBOOK)
    (tmp_path / "alert.json").write_text(json.dumps({"labels": {"alertname": "RackHot"}}))
    files = [str(tmp_path / "alert.json"), "--playbooks", str(tmp_path / "rack.yaml")]
    done = CliRunner().invoke(explain, [*files, "--at", "9999y"])
    assert (done.exit_code, "--at: '9999y' must be an RFC 3339 time" in done.output) == (InvalidInput.exit_code, True)
