"""``node.restart_container`` with a real container engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.docker_engine import NAMED_ENGINE, DockerEngine, docker_engine
from tests.support.programs import eventually
from tests.support.repairs import accepted
from trainmedic_agent.containers.engine_api import ContainerEngine
from trainmedic_agent.errors import CommandFailed, CommandInterrupted, CommandRejected, CommandUnsupported
from trainmedic_agent.repairs.containers import RestartContainerExecutor
from trainmedic_agent.repairs.intents import IntentBook
from trainmedic_agent.repairs.policy import RestartPolicy

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 and NAMED_ENGINE is None, reason="Docker's daemon needs root; or name another engine's socket"
)

WORKS = ("sh", "-c", "trap 'exit 0' TERM; /busybox sleep 300 & wait")


@pytest.fixture(scope="module")
def daemon() -> Iterator[DockerEngine]:
    with docker_engine() as engine:
        yield engine


@pytest.fixture
def engine(daemon: DockerEngine) -> DockerEngine:
    daemon.clear()
    daemon.load("service")
    return daemon


def restart(engine: DockerEngine, intents: IntentBook, name: str = "exporter", **more: Any) -> Mapping[str, Any]:
    policy = RestartPolicy(
        containers=("export*",), container_labels=("trainmedic.test=yes",), socket=more.pop("socket", str(engine.path))
    )
    policy = more.pop("policy", policy)
    command = accepted("node.restart_container", container=name, **more)
    return RestartContainerExecutor(policy, intents, ContainerEngine(policy.socket)).perform(command)


def started_at(engine: DockerEngine, name: str = "exporter") -> str:
    return str(engine.ask("GET", f"/containers/{name}/json")["State"]["StartedAt"])


def running(engine: DockerEngine, name: str = "exporter", *command: str, **host: Any) -> None:
    engine.create(name, "service", *(command or WORKS), **host)
    engine.start(name)


def test_a_container_is_restarted_and_keeps_running(engine: DockerEngine, intents: IntentBook) -> None:
    """The engine's own times prove it. The container ignores SIGTERM, and the engine kills it."""
    running(engine, "exporter", "sleep", "300")
    before = started_at(engine)
    output = restart(engine, intents)
    assert (output["container"], output["running"], output["resumed"]) == ("exporter", True, False)
    assert output["started_at_before"] == before
    assert output["started_at"] == started_at(engine) != before


def test_one_command_does_not_restart_a_container_twice(engine: DockerEngine, intents: IntentBook) -> None:
    """The agent stopped after the restart; the resumed command finds a different start time than before."""
    running(engine)
    with pytest.raises(CommandInterrupted):
        restart(engine, intents, stopping=True)
    after = started_at(engine)
    output = restart(engine, intents, resumed=True)
    assert output["started_at"] == started_at(engine) == after


def test_a_container_that_exits_at_its_start_is_not_a_success(engine: DockerEngine, intents: IntentBook) -> None:
    """The engine reports the restart as done."""
    running(engine, "exporter", "false")
    eventually(lambda: engine.states()["exporter"] == "exited", 60, "the container has ended")
    with pytest.raises(CommandFailed, match=r"exporter was started again, and exited \(1\)"):
        restart(engine, intents)


def test_a_stopped_container_is_started(engine: DockerEngine, intents: IntentBook) -> None:
    """Also one that never ran."""
    engine.create("exporter", "service", "sleep", "300")
    assert restart(engine, intents)["running"] is True


def test_only_containers_listed_in_the_policy_are_restarted(engine: DockerEngine, intents: IntentBook) -> None:
    """They are listed by name or label; those that a kubelet manages are never restarted."""
    running(engine, "training")
    before = started_at(engine, "training")
    with pytest.raises(CommandRejected, match="policy does not list training"):
        restart(engine, intents, "training", policy=RestartPolicy(("a.service",), ("export*",), (), str(engine.path)))
    assert started_at(engine, "training") == before
    assert restart(engine, intents, "training", command_id="c2")["running"] is True
    body = b'{"Image": "localhost/service", "Cmd": ["/busybox"], "Labels": {"io.kubernetes.pod.name": "web-0"}}'
    engine.ask("POST", "/containers/create?name=exporter-pod", body)
    with pytest.raises(CommandRejected, match="belongs to Kubernetes"):
        restart(engine, intents, "exporter-pod", command_id="c3")


def test_a_missing_container_or_engine_is_named(engine: DockerEngine, intents: IntentBook) -> None:
    with pytest.raises(CommandRejected, match="there is no container exporter"):
        restart(engine, intents)
    with pytest.raises(CommandUnsupported, match="no container engine listens at"):
        restart(engine, intents, socket=f"{engine.path}-elsewhere")
