"""The tests beside a playbook, run by the server in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_server import errors
from trainmedic_server.adapters import playbook_test_process
from trainmedic_server.adapters.playbook_test_process import PlaybookTestProcess

PLAYBOOK = """
playbook: quiet
on: {alert: Noise}
target: node
steps: [{id: tell, action: notify, with: {title: t, message: m}}]
"""
TESTS = """
tests:
  - name: somebody is told
    alerts: [{alert: {labels: {alertname: Noise, node: node-1}}}]
    expect: [{runs: [{playbook: quiet, status: succeeded}]}]
  - name: nobody is told
    alerts: [{alert: {labels: {alertname: Noise, node: node-1}}}]
    expect: [{runs: [{playbook: quiet, status: failed}]}]
"""


def written(directory: Path) -> str:
    (directory / "quiet.yaml").write_text(PLAYBOOK)
    (directory / "quiet_test.yaml").write_text(TESTS)
    return str(directory / "quiet.yaml")


async def test_each_test_is_reported_with_the_position_of_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has none of the server's settings, so a wrong one does not matter there."""
    monkeypatch.setenv("TRAINMEDIC_PLAYBOOKS", "/nowhere")
    outcome = await PlaybookTestProcess().run_tests_of(written(tmp_path))
    good, bad = outcome.tests
    assert (outcome.passed, outcome.problems, outcome.unfinished) == (False, (), "")
    assert (good.name, good.failures, good.line) == ("somebody is told", (), 3)
    (failure,) = bad.failures
    assert (failure.file, failure.line) == (str(tmp_path / "quiet_test.yaml"), 8)
    assert "expected failed, got succeeded" in failure.message


async def test_an_error_in_a_file_is_reported_instead_of_results(tmp_path: Path) -> None:
    """The report includes its position."""
    source = written(tmp_path)
    (tmp_path / "quiet.yaml").write_text(PLAYBOOK.replace("notify", "notifi"))
    outcome = await PlaybookTestProcess().run_tests_of(source)
    assert (outcome.passed, outcome.tests) == (False, ())
    assert [problem.line for problem in outcome.problems] == [5]


async def test_tests_that_take_too_long_are_ended(tmp_path: Path) -> None:
    """The process is gone, and the answer reports it."""
    outcome = await PlaybookTestProcess(seconds=0.05).run_tests_of(written(tmp_path))
    assert (outcome.passed, outcome.tests) == (False, ())
    assert "over 0.05 s" in outcome.unfinished


async def test_time_without_a_cpu_core_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the low-priority process may wait longer than its tests take."""
    monkeypatch.setattr(playbook_test_process, "_seconds_without_core", lambda pid: 600.0)
    # Its limit of processor time, 1 s here, may be too low on a busy machine.
    monkeypatch.setattr(playbook_test_process, "_limit_resources", lambda pid, seconds: None)
    outcome = await PlaybookTestProcess(seconds=0.05).run_tests_of(written(tmp_path))
    assert (len(outcome.tests), outcome.unfinished) == (2, "")


async def test_a_playbook_without_tests_is_reported_as_such(tmp_path: Path) -> None:
    """The report names the missing file."""
    (tmp_path / "quiet.yaml").write_text(PLAYBOOK)
    with pytest.raises(errors.NotFound, match=r"quiet_test\.yaml"):
        await PlaybookTestProcess().run_tests_of(str(tmp_path / "quiet.yaml"))


@pytest.mark.parametrize("printed", [b"", b"{}", b"[]", b"null", b'{"files": []}', b'{"files": null}'])
def test_other_output_is_not_a_result(printed: bytes) -> None:
    """It is reported as such, never as passed."""
    outcome = playbook_test_process._outcome("quiet_test.yaml", printed)
    assert outcome.unfinished.startswith("The tests ended without an outcome")
    assert not outcome.passed
