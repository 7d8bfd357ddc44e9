"""Ages of leftovers, as an engine is asked for them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from tests.support.repairs import accepted
from trainmedic.wire.output import fitting
from trainmedic_agent.containers import executor
from trainmedic_agent.containers.engine_api import ContainerEngine, EngineAnswer
from trainmedic_agent.containers.executor import PruneContainersExecutor
from trainmedic_agent.containers.leftovers import LeftoverRemover, Pruning
from trainmedic_agent.containers.policy import ContainersPolicy, Leftover
from trainmedic_agent.errors import CommandFailed, CommandUnsupported


class _Engine:
    def __init__(self) -> None:
        self.hours: list[int] = []

    def prune_build_cache(self, min_age_hours: int, seconds: float) -> int:
        self.hours.append(min_age_hours)
        return 0


@pytest.mark.parametrize(("age", "hours"), [("1:00", 1), ("1:30", 2), ("1:59", 2), ("168:00", 168)])
def test_no_build_cache_younger_than_the_policy_allows_is_removed(age: str, hours: int) -> None:
    """The engine is asked in whole hours."""
    engine = _Engine()
    of_hours, minutes = map(int, age.split(":"))
    policy = ContainersPolicy(frozenset({Leftover.BUILD_CACHE}), timedelta(hours=of_hours, minutes=minutes))
    now = datetime.now(UTC)
    LeftoverRemover(cast(ContainerEngine, engine), policy, now, False, lambda: 9.0, lambda: True).remove()
    assert engine.hours == [hours]


class _EngineWithImage:
    """``refused``: status by name."""

    def __init__(self, refused: dict[str, int]) -> None:
        self.names = ["a:1", "b:1", "c:1"]
        self._refused = refused

    def containers(self, seconds: float) -> list[dict[str, Any]]:
        return []

    def images(self, seconds: float) -> list[dict[str, Any]]:
        return [{"Id": "sha256:1", "RepoTags": list(self.names)}]

    def image(self, ident: str, seconds: float) -> dict[str, Any]:
        return {"Metadata": {"LastTagTime": "2026-01-01T00:00:00Z"}}

    def remove_image(self, name: str, seconds: float) -> None:
        if name in self._refused:
            raise EngineAnswer(self._refused[name], "no")
        self.names.remove(name)


@pytest.mark.parametrize(
    ("refused", "removed", "left", "names"),
    [
        ({}, 1, {}, []),
        ({"a:1": 409}, 0, {"in_use": "c:1"}, ["a:1", "b:1", "c:1"]),
        ({"b:1": 409}, 0, {"partly_untagged": "c:1"}, ["b:1", "c:1"]),
        ({"b:1": 404}, 1, {}, ["b:1"]),
    ],
)
def test_an_image_that_loses_only_some_of_its_names_is_reported_as_such(
    refused: dict[str, int], removed: int, left: dict[str, str], names: list[str]
) -> None:
    engine = _EngineWithImage(refused)
    policy = ContainersPolicy(frozenset({Leftover.UNUSED_IMAGES}), timedelta(hours=1))
    now = datetime(2026, 2, 1, tzinfo=UTC)
    remover = LeftoverRemover(cast(ContainerEngine, engine), policy, now, False, lambda: 9.0, lambda: True)
    remover.remove()
    assert remover.pruning.removed[Leftover.UNUSED_IMAGES] == removed
    assert {reason: each["examples"][0] for reason, each in remover.pruning.output()["left"].items()} == left
    assert engine.names == names


class _EngineThatFails(_EngineWithImage):
    """Has one image without a name, and raises `error` once that is removed."""

    def __init__(self, error: Exception) -> None:
        super().__init__({})
        self.names = ["sha256:1"]
        self._error = error

    def info(self, seconds: float) -> dict[str, Any]:
        return {}

    def containers(self, seconds: float) -> list[dict[str, Any]]:
        if not self.names:
            raise self._error
        return []

    def images(self, seconds: float) -> list[dict[str, Any]]:
        return [{"Id": name} for name in self.names]


@pytest.mark.parametrize("error", [EngineAnswer(500, "no"), CommandFailed("no"), CommandUnsupported("no")])
def test_a_failure_reports_what_was_removed_before(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also if the socket has disappeared, which does not make the node unable."""
    monkeypatch.setattr(executor, "ContainerEngine", lambda socket: _EngineThatFails(error))
    monkeypatch.setattr(PruneContainersExecutor, "_refuse_kubernetes", lambda self: None)
    policy = ContainersPolicy(frozenset({Leftover.DANGLING_IMAGES, Leftover.STOPPED_CONTAINERS}), timedelta(hours=1))
    with pytest.raises(CommandFailed, match="no") as failed:
        PruneContainersExecutor(policy).perform(accepted("disk.prune_containers"))
    assert failed.value.output["removed"] == {"dangling_images": 1}


def test_the_output_is_kept_however_many_texts_an_engine_returns() -> None:
    """Each text of a failing storage driver names another object."""
    pruning = Pruning()
    for number in range(3000):
        pruning.leave(f"container {number:0256x}: device or resource busy", f"{number:0100x}")
    pruning.leave("in_use", "c1")
    output = pruning.output()
    assert output["left"]["in_use"]["count"] == 1
    assert fitting(output) is output
    assert sum(left["count"] for left in output["left"].values()) == 3001
