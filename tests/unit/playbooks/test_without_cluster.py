"""How playbooks see that the server has no Kubernetes cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_server import errors
from trainmedic_server.actions.kubernetes.jobs import CreateClusterJob
from trainmedic_server.ports.actions import Services
from trainmedic_server.simulation import virtual_time
from trainmedic_server.simulation.virtual_time import VirtualClock

PLAYBOOKS = Path(__file__).parents[3] / "playbooks"
WORDS = "no Kubernetes cluster"


@pytest.mark.parametrize("name", ["gpu-broken", "node-down"])
def test_the_words_that_playbooks_look_for_are_those_of_the_action(name: str) -> None:
    """A health check that cannot be made is not one that has failed: the jobs take the node back."""
    assert f'"{WORDS}" in (steps.healthy.error' in (PLAYBOOKS / f"{name}.yaml").read_text()

    async def ask() -> None:
        action = CreateClusterJob(Services(VirtualClock(), None, None, None, None, None))  # type: ignore[arg-type]
        with pytest.raises(errors.PermanentFailure, match=WORDS):
            _ = action.cluster

    virtual_time.run(ask())
