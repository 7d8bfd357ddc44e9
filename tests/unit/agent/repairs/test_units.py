"""``node.restart_unit`` with a script in place of systemctl, which knows a state and no restart; systemd itself is in
integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.repairs import accepted, program
from trainmedic_agent.errors import CommandFailed, CommandRejected
from trainmedic_agent.journal import Journal
from trainmedic_agent.repairs.intents import IntentBook
from trainmedic_agent.repairs.policy import RestartPolicy
from trainmedic_agent.repairs.units import RestartUnitExecutor


def test_one_that_the_policy_no_longer_lists_is_not_rejected_once_begun(tmp_path: Path) -> None:
    """Rejected would mean that nothing was done."""
    shown = program(
        tmp_path / "systemctl", "printf 'LoadState=loaded\\nActiveState=active\\nSubState=x\\nInvocationID=7'"
    )
    journal = Journal(tmp_path / "state")
    try:
        for units, error in (("a.service",), "not started again"), ((), "policy does not list.*it may have been done"):
            executor = RestartUnitExecutor(RestartPolicy(units=units), IntentBook(journal), (str(shown),))
            with pytest.raises(CommandFailed, match=error):
                executor.perform(accepted("node.restart_unit", unit="a.service", resumed=not units))
        with pytest.raises(CommandRejected, match="policy does not list"):
            executor.perform(accepted("node.restart_unit", "c2", unit="a.service"))
    finally:
        journal.close()
