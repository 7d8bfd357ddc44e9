"""``node.restart_unit`` with a real systemd."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.programs import eventually
from tests.support.repairs import accepted
from tests.support.unit_manager import UnitManager, unit_manager
from trainmedic_agent.errors import CommandFailed, CommandInterrupted, CommandRejected, CommandUnsupported
from trainmedic_agent.repairs.intents import IntentBook
from trainmedic_agent.repairs.policy import RestartPolicy
from trainmedic_agent.repairs.units import RestartUnitExecutor

UNIT = "trainmedic-test-exporter.service"
POLICY = RestartPolicy(units=("trainmedic-test-*.service",))
RUNS = "ExecStart=sleep 1000"


@pytest.fixture(scope="module")
def manager() -> Iterator[UnitManager]:
    with pytest.MonkeyPatch.context() as monkeypatch, unit_manager(monkeypatch) as running:
        yield running


@pytest.fixture
def units(manager: UnitManager) -> Iterator[UnitManager]:
    yield manager
    manager.clear()


def restart(
    units: UnitManager, intents: IntentBook, unit: str = UNIT, policy: RestartPolicy = POLICY, **more: Any
) -> Mapping[str, Any]:
    executor = RestartUnitExecutor(policy, intents, units.systemctl)
    return executor.perform(accepted("node.restart_unit", unit=unit, **more))


def test_a_running_unit_is_restarted_and_keeps_running(units: UnitManager, intents: IntentBook) -> None:
    """It has a new invocation and process, as systemd reports them."""
    units.add(UNIT, RUNS)
    units.ask("start", UNIT)
    before, pid = units.shown(UNIT, "InvocationID"), units.shown(UNIT, "MainPID")
    output = restart(units, intents)
    assert (output["active_state"], output["invocation_id_before"]) == ("active", before)
    assert output["invocation_id"] == units.shown(UNIT, "InvocationID") != before
    assert str(output["main_pid"]) == units.shown(UNIT, "MainPID") != pid


def test_one_command_does_not_restart_a_unit_twice(units: UnitManager, intents: IntentBook) -> None:
    """The agent stopped after the restart, as it does if the unit is its own."""
    units.add(UNIT, RUNS)
    units.ask("start", UNIT)
    with pytest.raises(CommandInterrupted):
        restart(units, intents, stopping=True)
    after = units.shown(UNIT, "InvocationID")
    assert restart(units, intents, resumed=True)["invocation_id"] == after == units.shown(UNIT, "InvocationID")


def test_a_stopped_or_failed_unit_is_started(units: UnitManager, intents: IntentBook) -> None:
    """This is the usual case of a repair."""
    units.add(UNIT, RUNS)
    assert restart(units, intents)["active_state"] == "active"
    units.ask("kill", "--signal=KILL", UNIT)
    eventually(lambda: units.shown(UNIT, "ActiveState") == "failed", 60, "the unit has failed")
    assert restart(units, intents, command_id="c2")["active_state"] == "active"


def test_a_unit_that_fails_at_its_start_is_not_a_success(units: UnitManager, intents: IntentBook) -> None:
    """Also if systemctl reports the restart as done, because the process exits a moment later."""
    units.add(UNIT, "ExecStart=sh -c 'sleep 0.3; exit 3'")
    with pytest.raises(CommandFailed, match=r"was started again, and is failed \(exit-code\)") as failed:
        restart(units, intents)
    assert failed.value.output["active_state"] == "failed"
    units.add("trainmedic-test-pre.service", "ExecStartPre=false\nExecStart=sleep 1000")
    with pytest.raises(CommandFailed, match="systemctl could not restart"):
        restart(units, intents, "trainmedic-test-pre.service", command_id="c2")
    units.add("trainmedic-test-loop.service", "ExecStart=sh -c 'sleep 0.3; exit 3'\nRestart=always\nRestartSec=0.1")
    with pytest.raises(CommandFailed, match="was started again, and"):
        restart(units, intents, "trainmedic-test-loop.service", command_id="c3", seconds=10)


def test_a_oneshot_unit_is_judged_by_its_result(units: UnitManager, intents: IntentBook) -> None:
    """It is inactive after success."""
    units.add(UNIT, "Type=oneshot\nExecStart=true")
    assert restart(units, intents)["active_state"] == "inactive"
    units.add("trainmedic-test-bad.service", "Type=oneshot\nExecStart=false")
    with pytest.raises(CommandFailed, match="systemctl could not restart"):
        restart(units, intents, "trainmedic-test-bad.service", command_id="c2")


@pytest.mark.parametrize("service", ["Type=oneshot\nExecStart=true", RUNS])
def test_a_unit_with_an_unmet_condition_was_not_started(units: UnitManager, intents: IntentBook, service: str) -> None:
    """systemctl reports success for it."""
    units.add(UNIT, f"{service}\n[Unit]\nConditionPathExists=/nonexistent")
    units.add("trainmedic-test-holder.service", f"{RUNS}\n[Unit]\nWants={UNIT}")
    units.ask("start", "trainmedic-test-holder.service")  # so that systemd does not forget the unit
    with pytest.raises(CommandFailed, match="was not started: a condition of the unit is not met"):
        restart(units, intents)


def test_a_result_that_systemd_has_forgotten_is_reported_as_unseen(units: UnitManager, intents: IntentBook) -> None:
    """A unit that was not started then looks like one that ended successfully."""
    units.add(UNIT, "Type=oneshot\nExecStart=true\n[Unit]\nConditionPathExists=/nonexistent")
    assert "without a start" in restart(units, intents)["note"]


def test_only_units_listed_in_the_policy_are_restarted(units: UnitManager, intents: IntentBook) -> None:
    """They are listed by full name: no pattern, option or other kind of unit reaches systemctl."""
    units.add(UNIT, RUNS)
    for wrong in ("sshd.service", "dbus.service"):
        with pytest.raises(CommandRejected, match=f"policy does not list {wrong}"):
            restart(units, intents, wrong)
    for wrong in ("*.service", "--now.service", "a b.service", "basic.target", "trainmedic-test-exporter", ""):
        with pytest.raises(CommandRejected, match="is not the full name of a service"):
            restart(units, intents, wrong, RestartPolicy(units=("*.service",)))
    with pytest.raises(CommandRejected, match="policy does not list"):
        restart(units, intents, policy=RestartPolicy())
    with pytest.raises(CommandRejected, match="LoadState is not-found"):
        restart(units, intents, "trainmedic-test-missing.service")
    assert units.shown(UNIT, "ActiveState") == "inactive"


def test_a_machine_without_systemd_is_reported(intents: IntentBook) -> None:
    """The action is unsupported there, whatever the policy allows."""
    executor = RestartUnitExecutor(POLICY, intents, ("no-systemctl",))
    with pytest.raises(CommandUnsupported, match="no-systemctl is not on this machine"):
        executor.perform(accepted("node.restart_unit", unit=UNIT))
