"""``node.restart_unit`` with a script in place of systemctl, which knows a state and no restart; systemd itself is in
integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.repairs import accepted, program
from trainmedic.wire.steady_time import utc_now
from trainmedic_agent.errors import CommandFailed, CommandRejected
from trainmedic_agent.journal import Journal
from trainmedic_agent.repairs.intents import IntentBook
from trainmedic_agent.repairs.policy import RestartPolicy
from trainmedic_agent.repairs.units import RestartUnitExecutor


def test_a_started_restart_of_a_no_longer_listed_unit_is_not_rejected(tmp_path: Path) -> None:
    """Rejected would mean that nothing was done."""
    shown = program(
        tmp_path / "systemctl", "printf 'LoadState=loaded\\nActiveState=active\\nSubState=x\\nInvocationID=7'"
    )
    journal = Journal(tmp_path / "state")
    try:
        for units, error in (("a.service",), "not started again"), ((), "policy does not list.*it may have been done"):
            executor = RestartUnitExecutor(RestartPolicy(units=units), IntentBook(journal), (str(shown),))
            with pytest.raises(CommandFailed, match=error) as failed:
                executor.perform(accepted("node.restart_unit", unit="a.service", resumed=not units))
            assert failed.value.output.get("may_be_done", False) is (not units)
        with pytest.raises(CommandRejected, match="policy does not list"):
            executor.perform(accepted("node.restart_unit", "c2", unit="a.service"))
    finally:
        journal.close()


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_started_restart_is_unknown_if_systemctl_shows_nothing(tmp_path: Path, is_begun: bool) -> None:
    """The failure never claims that nothing was done, neither before a repeated restart nor after it."""
    silent = program(tmp_path / "systemctl", '[ "$1" = restart ]')
    journal = Journal(tmp_path / "state")
    try:
        intents = IntentBook(journal)
        executor = RestartUnitExecutor(RestartPolicy(units=("a.service",)), intents, (str(silent),))
        if is_begun:
            intents.keep("c1", {"invocation": "7"}, utc_now())
        with pytest.raises(CommandFailed, match="systemctl does not show a") as failed:
            executor.perform(accepted("node.restart_unit", unit="a.service", resumed=is_begun))
        assert failed.value.output.get("may_be_done", False) is is_begun
    finally:
        journal.close()


def test_a_restart_that_cannot_be_read_afterwards_is_unknown(tmp_path: Path) -> None:
    """Systemctl fails once it has restarted the unit."""
    text = (
        f'[ "$1" = restart ] && touch {tmp_path}/done && exit; [ -e {tmp_path}/done ] && exit 1; '
        "printf 'LoadState=loaded\\nActiveState=active\\nSubState=x\\nInvocationID=7'"
    )
    journal = Journal(tmp_path / "state")
    try:
        systemctl = (str(program(tmp_path / "systemctl", text)),)
        executor = RestartUnitExecutor(RestartPolicy(units=("a.service",)), IntentBook(journal), systemctl)
        with pytest.raises(CommandFailed, match="systemctl does not show a") as failed:
            executor.perform(accepted("node.restart_unit", unit="a.service"))
        assert failed.value.output["may_be_done"] is True
    finally:
        journal.close()
