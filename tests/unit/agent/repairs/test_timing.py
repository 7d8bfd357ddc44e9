"""Programs that are killed with the agent that runs them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.repairs import accepted, program
from trainmedic_agent.errors import CommandFailed, CommandInterrupted
from trainmedic_agent.repairs import programs, timing
from trainmedic_agent.repairs.timing import RepairTime


def test_a_program_killed_by_the_agents_stop_leaves_the_command_open(tmp_path: Path) -> None:
    """If the agent restarts its own unit, systemd kills both, and the queues learn of it later."""
    answer = programs.run([str(program(tmp_path / "p", "kill -TERM $$"))], 60)
    assert answer.code == -15
    began = time.monotonic()
    command = replace(accepted("node.restart_unit"), is_stopping=lambda: time.monotonic() > began + 0.6)
    with pytest.raises(CommandInterrupted):
        RepairTime(command).check_killed(answer)


def test_a_program_killed_by_another_process_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent continues."""
    monkeypatch.setattr(timing, "_STOP_SECONDS", 0.1)
    with pytest.raises(CommandFailed, match="signal 9 ended it; it may have had an effect") as failed:
        RepairTime(accepted("node.restart_unit")).check_killed(programs.ProgramAnswer(-9, "", ""))
    assert failed.value.output["may_be_done"] is True


def test_nothing_is_started_without_time() -> None:
    """It would be killed at once, with an unknown effect."""
    left = RepairTime(accepted("node.restart_unit", seconds=60)).to_act()
    assert 0 < left < 60
    with pytest.raises(CommandFailed, match="no time is left for it, so it was not begun"):
        RepairTime(accepted("node.restart_unit", seconds=0)).to_act()


def test_programs_get_no_secrets_and_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's settings stay with the agent."""
    monkeypatch.setenv("TRAINMEDIC_SIGNING_KEY", "s3cret")
    assert "s3cret" not in programs.run(["env"], 60).output
    slow = [str(program(tmp_path / "p", "exec sleep 60"))]
    with pytest.raises(CommandFailed, match="did not end in 0 s; it may still take effect") as failed:
        programs.run(slow, 0.2)
    assert failed.value.output["may_be_done"] is True
    with pytest.raises(CommandFailed, match=r"did not end in 0 s$") as failed:
        programs.run(slow, 0.2, acts=False)
    assert failed.value.output["may_be_done"] is False
