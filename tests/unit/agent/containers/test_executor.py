"""Answers of `disk.prune_containers` when the container engine fails in the middle."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from trainmedic.wire import envelope
from trainmedic_agent.containers import executor
from trainmedic_agent.containers.engine_api import EngineAnswer
from trainmedic_agent.containers.policy import ContainersPolicy, Leftover
from trainmedic_agent.errors import CommandFailed
from trainmedic_agent.executors import AcceptedCommand


class FailingEngine:
    """Engine with one stopped container, whose images cannot be listed. It models no other objects."""

    storage = ""
    error: Exception

    def __init__(self, socket: str) -> None:
        self.is_removed = False

    def info(self, seconds: float) -> dict[str, Any]:
        return {"DockerRootDir": self.storage}

    def containers(self, seconds: float) -> list[dict[str, Any]]:
        return [] if self.is_removed else [{"Id": "c1", "Names": ["/old"], "State": "exited"}]

    def container(self, ident: str, seconds: float) -> dict[str, Any]:
        return {"State": {"Status": "exited", "FinishedAt": "2026-01-01T00:00:00Z"}}

    def remove_container(self, ident: str, seconds: float) -> None:
        self.is_removed = True

    def images(self, seconds: float) -> list[dict[str, Any]]:
        raise self.error


@pytest.mark.parametrize("error", [EngineAnswer(500, "busy"), CommandFailed("it did not answer in 120 s")])
def test_a_failure_in_the_middle_reports_what_was_removed_before(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailingEngine, "storage", str(tmp_path))
    monkeypatch.setattr(FailingEngine, "error", error, raising=False)
    monkeypatch.setattr(executor, "ContainerEngine", FailingEngine)
    monkeypatch.setattr(executor.PruneContainersExecutor, "_refuse_kubernetes", lambda self: None)
    now = datetime.now(UTC)
    command = envelope.Command(
        id="c1",
        action="disk.prune_containers",
        target={"kind": "node", "node": "n1"},
        params={},
        run_id="r1",
        playbook="p",
        reason="",
        issued_at=now,
        expires_at=now + timedelta(minutes=5),
    )
    policy = ContainersPolicy(
        frozenset({Leftover.STOPPED_CONTAINERS, Leftover.UNUSED_IMAGES}), timedelta(0), "/engine.sock"
    )
    with pytest.raises(CommandFailed) as raised:
        executor.PruneContainersExecutor(policy).perform(AcceptedCommand(command))
    assert raised.value.output["removed"] == {"stopped_containers": 1}
