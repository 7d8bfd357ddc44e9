"""``node.reboot`` with a script for ``shutdown``, and files for the kernel's boot ID and logind's schedule.

The script writes down what it was asked, and sets or removes the schedule; it models neither the delay nor the
refusals of systemd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.repairs import accepted, program
from trainmedic.wire.steady_time import utc_now
from trainmedic_agent.errors import CommandFailed, CommandInterrupted, CommandRejected, CommandUnsupported
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.journal import Journal
from trainmedic_agent.repairs.intents import IntentBook
from trainmedic_agent.repairs.reboot import RebootExecutor

SHUTDOWN = """\
echo "$@" >> {at}/asked; echo "Failed to set wall message" >&2
[ {code} = 0 ] || exit {code}
if [ "$1" = -c ]; then rm -f {at}/scheduled; else
printf 'USEC=%s\\nWARN_WALL=1\\nMODE=reboot\\nWALL_MESSAGE=x\\n' $(($(date +%s%N) / 1000 + 60000000)) > {at}/scheduled
fi
"""


class Machine:
    def __init__(self, directory: Path, journal: Journal) -> None:
        self.directory = directory
        self.boot = "boot-1"
        self.uptime = 86_400.0
        self.ends_with = 0
        self.intents = IntentBook(journal)
        self.schedule = directory / "scheduled"

    def perform(self, command: AcceptedCommand) -> Mapping[str, Any]:
        shutdown = program(self.directory / "shutdown", SHUTDOWN.format(at=self.directory, code=self.ends_with))
        executor = RebootExecutor(self.intents, (str(shutdown),), lambda: self.boot, lambda: self.uptime, self.schedule)
        return executor.perform(command)

    def another_schedules(self) -> None:
        self.schedule.write_text("USEC=1800000000000000\nWARN_WALL=1\nMODE=poweroff\n")

    def asked(self) -> list[str]:
        path = self.directory / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    journal = Journal(tmp_path / "state")
    yield Machine(tmp_path, journal)
    journal.close()


SCHEDULED = "-r +1 Trainmedic repairs this node"


def test_a_reboot_is_applied_only_after_the_restart(machine: Machine) -> None:
    """The stopping agent leaves the command open; the next one compares the boot IDs and asks no second time."""
    with pytest.raises(CommandInterrupted):
        machine.perform(accepted("node.reboot", seconds=120, stopping=True))
    assert machine.asked() == [SCHEDULED]
    machine.boot, machine.uptime = "boot-2", 41.0
    output = machine.perform(accepted("node.reboot", resumed=True))
    assert output == {"boot_id_before": "boot-1", "boot_id": "boot-2", "uptime_seconds": 41}
    assert machine.asked() == [SCHEDULED]


def test_an_agent_restarted_before_the_node_does_not_ask_again_and_claims_nothing(machine: Machine) -> None:
    """A user may have stopped the restart in between."""
    for resumed in (False, True):
        with pytest.raises(CommandInterrupted):
            machine.perform(accepted("node.reboot", seconds=120, resumed=resumed, stopping=True))
    assert machine.asked() == [SCHEDULED]


def test_a_restart_that_does_not_happen_is_cancelled_and_failed(machine: Machine) -> None:
    """Otherwise it could happen after the reply."""
    with pytest.raises(CommandInterrupted):
        machine.perform(accepted("node.reboot", stopping=True, seconds=120))
    with pytest.raises(CommandFailed, match=r"has not come in time; shutdown -c was accepted$") as failed:
        machine.perform(accepted("node.reboot", resumed=True, seconds=1))
    assert failed.value.output["may_be_done"] is False
    assert machine.asked() == [SCHEDULED, "-c"]


def test_a_restart_that_may_have_started_is_not_a_failure(machine: Machine) -> None:
    """It may be cancelled after its time, or not be cancellable."""
    past = "USEC=1700000000000000 MODE=reboot"
    machine.intents.keep("c1", {"boot": "boot-1", "schedule": past}, utc_now())
    for code, told in (0, "accepted after its time"), (1, "could not be cancelled and may still come"):
        machine.ends_with = code
        machine.schedule.write_text(past.replace(" ", "\n"))
        with pytest.raises(CommandFailed, match=told) as failed:
            machine.perform(accepted("node.reboot", resumed=True, seconds=1))
        assert failed.value.output["may_be_done"] is True


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_shutdown_scheduled_by_another_user_stays(machine: Machine, is_replaced: bool) -> None:
    """A user cancelled the agent's, and perhaps scheduled one of their own."""
    with pytest.raises(CommandInterrupted):
        machine.perform(accepted("node.reboot", stopping=True, seconds=120))
    machine.schedule.unlink()
    if is_replaced:
        machine.another_schedules()
    left = "left: USEC=1800000000000000 MODE=poweroff" if is_replaced else "no other is"
    with pytest.raises(CommandFailed, match=f"it is no longer scheduled; {left}") as failed:
        machine.perform(accepted("node.reboot", resumed=True, seconds=1))
    assert failed.value.output["may_be_done"] is False
    assert (machine.asked(), machine.schedule.exists()) == ([SCHEDULED], is_replaced)


def test_a_shutdown_scheduled_by_another_user_is_not_replaced(machine: Machine) -> None:
    machine.another_schedules()
    with pytest.raises(CommandFailed, match=r"already \(USEC=1800000000000000 MODE=poweroff\).*shutdown -c"):
        machine.perform(accepted("node.reboot", seconds=120))
    assert (machine.asked(), machine.intents.find("c1")) == ([], None)


def test_a_shutdown_time_long_past_blocks_no_restart(machine: Machine) -> None:
    machine.schedule.write_text("USEC=1700000000000000\nMODE=poweroff\n")
    with pytest.raises(CommandInterrupted):
        machine.perform(accepted("node.reboot", seconds=120, stopping=True))
    assert machine.asked() == [SCHEDULED]


@pytest.mark.parametrize("content", [None, "MODE=poweroff\n"], ids=["unreadable", "without a time"])
def test_nothing_is_restarted_if_the_scheduled_shutdown_is_unclear(machine: Machine, content: str | None) -> None:
    if content is None:
        machine.schedule.mkdir()
    else:
        machine.schedule.write_text(content)
    with pytest.raises(CommandFailed, match="replace"):
        machine.perform(accepted("node.reboot", seconds=120))
    assert (machine.asked(), machine.intents.find("c1")) == ([], None)


@pytest.mark.parametrize(
    ("seconds", "mode", "is_own"), [(70, "reboot", True), (70, "poweroff", False), (600, "reboot", False)]
)
def test_a_restart_scheduled_by_an_earlier_process_is_cancelled(
    machine: Machine, seconds: int, mode: str, is_own: bool
) -> None:
    """It was killed, or of an earlier version, and kept no schedule. The time shows which is its own."""
    now = utc_now()
    machine.intents.keep("c1", {"boot": "boot-1"}, now)
    machine.schedule.write_text(f"USEC={int(now.timestamp() + seconds)}000000\nMODE={mode}\n")
    with pytest.raises(CommandFailed, match="shutdown -c was accepted" if is_own else "none was cancelled") as failed:
        machine.perform(accepted("node.reboot", resumed=True, seconds=1))
    assert failed.value.output["may_be_done"] is not is_own
    assert machine.asked() == (["-c"] if is_own else [])


def test_a_restart_that_was_possibly_requested_is_not_requested_again(machine: Machine) -> None:
    """The agent was killed in between, or its disk was full: a user may have stopped the restart."""
    machine.intents.keep("c1", {"boot": "boot-1"}, utc_now())
    with pytest.raises(CommandInterrupted):
        machine.perform(accepted("node.reboot", resumed=True, seconds=120, stopping=True))
    assert machine.asked() == []
    machine.another_schedules()
    with pytest.raises(CommandFailed, match=r"may have asked for the restart.*has not come.*may still") as failed:
        machine.perform(accepted("node.reboot", resumed=True, seconds=1))
    assert failed.value.output["may_be_done"] is True
    assert machine.asked() == [], "another's shutdown stays"
    machine.boot = ""
    with pytest.raises(CommandFailed, match=r"boot ID cannot be read.*it may have been done before"):
        machine.perform(accepted("node.reboot", resumed=True, seconds=1))


def test_a_command_that_would_end_before_the_restart_schedules_none(machine: Machine) -> None:
    with pytest.raises(CommandRejected, match=r"5\d s are left.*60 s after the request; give the step"):
        machine.perform(accepted("node.reboot", seconds=60))
    assert machine.asked() == []


def test_a_refusal_by_the_system_is_quoted(machine: Machine) -> None:
    """The agent may lack the right to restart it, for example."""
    machine.ends_with = 1
    with pytest.raises(CommandFailed, match="refused to restart: Failed to set wall message"):
        machine.perform(accepted("node.reboot", seconds=120))


def test_a_command_from_before_the_boot_restarts_nothing_without_a_record(machine: Machine) -> None:
    """The journal may have been lost with the restart that this command caused."""
    machine.uptime = -5.0
    with pytest.raises(CommandFailed, match=r"after the command was issued.*it is not restarted again") as failed:
        machine.perform(accepted("node.reboot", seconds=120))
    assert failed.value.output["may_be_done"] is True
    assert machine.asked() == []


def test_without_a_boot_id_nothing_is_started(machine: Machine) -> None:
    """The restart could not be verified."""
    machine.boot = ""
    with pytest.raises(CommandUnsupported, match="could not be verified"):
        machine.perform(accepted("node.reboot", seconds=120))
    with pytest.raises(CommandRejected, match="does not know 'force'"):
        machine.perform(accepted("node.reboot", force=True))
    assert machine.asked() == []
