"""``trainmedic playbook``, as a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import PYTHON_PATH, inherited

GOOD = """
playbook: slow-down
on: {alert: GradientExplosion, matchers: ['severity="critical"']}
target: job
steps:
  - id: halve
    action: job.scale_lr
    with: {factor: 0.5}
"""
TESTS = """
tests:
  - name: it halves
    alerts:
      - alert: {labels: {alertname: GradientExplosion, severity: critical, job_name: llm-1}}
    expect:
      runs: [{status: STATUS}]
"""


def playbook(directory: Path, *arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``trainmedic playbook`` in `directory`."""
    return subprocess.run(
        [sys.executable, "-m", "trainmedic_server", "playbook", *arguments],
        cwd=directory,
        env={**inherited(), "PYTHONPATH": PYTHON_PATH, **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A working directory whose ``playbooks`` holds one good playbook."""
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "playbooks" / "slow-down.yaml").write_text(GOOD)
    return tmp_path


def test_valid_playbooks_pass_the_check(directory: Path) -> None:
    """Nothing else is printed."""
    done = playbook(directory, "check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 playbook, no mistake.\n", "")


def test_an_error_is_reported_with_its_position_and_ends_with_1(directory: Path) -> None:
    """The report has file, line and column, and the nearest right name."""
    (directory / "wrong.yaml").write_text(GOOD.replace("scale_lr", "scale_rl"))
    done = playbook(directory, "check", "wrong.yaml")
    assert done.returncode == 1
    assert done.stdout.startswith("wrong.yaml:7:13: ")
    assert "job.scale_lr" in done.stdout


def test_the_variable_lists_the_playbook_paths(directory: Path, tmp_path: Path) -> None:
    """Colons separate several paths, as for the server."""
    done = playbook(directory, "check", TRAINMEDIC_PLAYBOOKS=f"playbooks:{tmp_path / 'none'}")
    assert done.returncode == 1
    assert "none" in done.stdout


def test_the_schema_is_a_json_schema(directory: Path) -> None:
    """Editors use it for completion and validation."""
    schema = json.loads(playbook(directory, "schema").stdout)
    assert "$schema" in schema
    assert "steps" in json.dumps(schema)


def test_a_path_without_playbooks_ends_with_2(directory: Path) -> None:
    """CI with a wrong path must not pass."""
    (directory / "empty").mkdir()
    done = playbook(directory, "check", "playbooks", "empty")
    assert (done.returncode, done.stderr) == (2, "Error: No playbook found in empty.\n")


def test_two_playbooks_for_one_alert_cause_a_warning(directory: Path) -> None:
    """It is printed, but is not an error."""
    (directory / "playbooks" / "other.yaml").write_text(GOOD.replace("slow-down", "other"))
    done = playbook(directory, "check")
    assert done.returncode == 0
    assert "'other' (playbooks/other.yaml:2) and 'slow-down' both act on the alert GradientExplosion" in done.stdout


def test_an_alert_is_explained(directory: Path) -> None:
    """The output has target, decision and parameters; the alert comes from standard input."""
    labels = {"alertname": "GradientExplosion", "severity": "critical", "job_name": "llm-1"}
    done = playbook(directory, "explain", "-", stdin=json.dumps({"labels": labels}))
    assert done.returncode == 0, done.stderr
    assert "slow-down: reacts" in done.stdout
    assert "job:llm-1" in done.stdout
    assert '{"factor": 0.5}' in done.stdout


def test_an_alert_without_a_reaction_is_explained_too(directory: Path) -> None:
    """The output names the matcher that did not hold, and is available as JSON."""
    labels = {"alertname": "GradientExplosion", "severity": "warning", "job_name": "llm-1"}
    (directory / "alert.json").write_text(json.dumps({"labels": labels}))
    done = playbook(directory, "explain", "alert.json", "--output", "json")
    answer = json.loads(done.stdout)
    [alert] = answer["items"]
    [explanation] = alert["playbooks"]
    assert (explanation["matched"], answer["server"], alert["acting"]) == (False, None, [])
    assert explanation["why"] == "'severity' is 'warning' and must be 'critical'"


def test_an_alert_named_by_no_playbook_gets_the_nearest_name(directory: Path) -> None:
    """An old one can be judged as of its time, in the form of Alertmanager's API and amtool."""
    labels = {"alertname": "GradientExplosions", "job_name": "llm-1"}
    done = playbook(directory, "explain", "-", stdin=json.dumps({"labels": labels}))
    assert "no playbook reacts to 'GradientExplosions'; did you mean 'GradientExplosion'?" in done.stdout
    alert = {
        "labels": {**labels, "alertname": "GradientExplosion", "severity": "critical"},
        "startsAt": "2026-01-01T00:00:00Z",
        "endsAt": "2199-01-01T00:00:00Z",
        "status": {"state": "active"},
    }
    assert "decision: stale" in playbook(directory, "explain", "-", stdin=json.dumps([alert])).stdout
    then = playbook(directory, "explain", "-", "--at", "2026-01-01T00:01:00Z", stdin=json.dumps([alert]))
    assert "decision: started" in then.stdout


def test_an_alert_is_converted_to_a_test(directory: Path) -> None:
    """The test passes."""
    labels = {"alertname": "GradientExplosion", "severity": "critical", "job_name": "llm-1"}
    written = playbook(directory, "explain", "-", "--test", stdin=json.dumps({"labels": labels}))
    (directory / "playbooks" / "slow-down_test.yaml").write_text(written.stdout)
    done = playbook(directory, "test", "--verbose")
    assert done.returncode == 0, written.stdout + done.stdout + done.stderr
    assert "ok   GradientExplosion: slow-down" in done.stdout


@pytest.mark.parametrize("text", ["{", "[]", '{"labels": 1}', ""])
def test_a_file_without_an_alert_ends_with_2(directory: Path, text: str) -> None:
    """The message says that the file is wrong."""
    done = playbook(directory, "explain", "-", stdin=text)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")


def test_passing_tests_end_with_0(directory: Path) -> None:
    """The output is one line per file and the total."""
    (directory / "playbooks" / "slow-down_test.yaml").write_text(TESTS.replace("STATUS", "succeeded"))
    done = playbook(directory, "test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok   playbooks/slow-down_test.yaml (1 tests)\n1 tests, 0 failed")
    assert "ok   it halves" in playbook(directory, "test", "--verbose").stdout


def test_a_failing_test_ends_with_1_and_a_reason(directory: Path) -> None:
    """The reason includes the position in the test file."""
    (directory / "playbooks" / "slow-down_test.yaml").write_text(TESTS.replace("STATUS", "failed"))
    done = playbook(directory, "test")
    assert done.returncode == 1
    assert "slow-down_test.yaml:7:" in done.stdout
    assert "succeeded" in done.stdout


def test_no_tests_at_all_end_with_2(directory: Path) -> None:
    """A path without tests is probably wrong."""
    done = playbook(directory, "test")
    assert done.returncode == 2
    assert "No test files found in playbooks" in done.stderr


def test_a_missing_path_is_not_a_passed_test(directory: Path) -> None:
    """This holds even next to a directory whose tests would pass."""
    (directory / "playbooks" / "slow-down_test.yaml").write_text(TESTS.replace("STATUS", "succeeded"))
    done = playbook(directory, "test", "playbooks", "plybooks")
    assert (done.returncode, done.stdout) == (2, "")
    assert "plybooks: there is no such file or directory" in done.stderr
