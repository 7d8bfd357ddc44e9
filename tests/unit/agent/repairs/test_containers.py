"""``node.restart_container`` with a scripted engine, which models the state alone; the real one is in integration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.repairs import accepted
from trainmedic_agent.containers.engine_api import EngineAnswer
from trainmedic_agent.errors import CommandFailed, CommandRejected
from trainmedic_agent.journal import Journal
from trainmedic_agent.repairs.containers import RestartContainerExecutor
from trainmedic_agent.repairs.intents import IntentBook
from trainmedic_agent.repairs.policy import RestartPolicy


class RemovedOnExit:
    """A container that its restart removes."""

    def __init__(self) -> None:
        self.is_there = True

    def container(self, name: str, seconds: float) -> dict[str, Any]:
        if not self.is_there:
            raise EngineAnswer(404, f"No such container: {name}")
        state = {"StartedAt": "2026-01-01T00:00:00Z", "Running": True}
        return {"Id": "c0ffee", "Name": "/exporter", "Config": {"Labels": {}}, "State": state}

    def restart_container(self, name: str, seconds: float) -> None:
        self.is_there = False


def test_a_container_that_is_gone_after_its_restart_is_not_rejected(tmp_path: Path) -> None:
    """Rejected would mean that nothing was done; also for the resumed command."""
    journal = Journal(tmp_path / "state")
    try:
        policy = RestartPolicy(containers=("exporter",))
        executor = RestartContainerExecutor(policy, IntentBook(journal), RemovedOnExit())  # type: ignore[arg-type]
        for resumed in (False, True):
            with pytest.raises(CommandFailed, match="no container c0ffee; it may have been done before"):
                executor.perform(accepted("node.restart_container", container="exporter", resumed=resumed))
        with pytest.raises(CommandRejected, match="there is no container exporter"):
            executor.perform(accepted("node.restart_container", "c2", container="exporter"))
        executor = RestartContainerExecutor(RestartPolicy(), IntentBook(journal), RemovedOnExit())  # type: ignore[arg-type]
        with pytest.raises(CommandFailed, match=r"policy does not list exporter .*it may have been done before"):
            executor.perform(accepted("node.restart_container", container="exporter", resumed=True))
    finally:
        journal.close()


class Silent(RemovedOnExit):
    """An engine that does not answer the restart."""

    def restart_container(self, name: str, seconds: float) -> None:
        raise CommandFailed("the container engine did not answer POST in 5 s")


def test_a_restart_that_the_engine_does_not_confirm_is_unknown(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state")
    try:
        policy = RestartPolicy(containers=("exporter",))
        executor = RestartContainerExecutor(policy, IntentBook(journal), Silent())  # type: ignore[arg-type]
        with pytest.raises(CommandFailed, match="it may still restart exporter") as failed:
            executor.perform(accepted("node.restart_container", container="exporter"))
        assert failed.value.output["may_be_done"] is True
    finally:
        journal.close()
