"""`disk.prune_containers` with a real container engine: what goes, what stays and why, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest

from tests.support.docker_engine import NAMED_ENGINE, DockerEngine, docker_engine
from tests.support.programs import eventually
from tests.support.repairs import accepted
from trainmedic_agent.containers.executor import PruneContainersExecutor
from trainmedic_agent.containers.policy import ContainersPolicy, Leftover
from trainmedic_agent.errors import CommandRejected, CommandUnsupported

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 and NAMED_ENGINE is None, reason="Docker's daemon needs root; or name another engine's socket"
)
ALL = frozenset(Leftover)
PRUNE = "disk.prune_containers"


@pytest.fixture(scope="module")
def daemon() -> Iterator[DockerEngine]:
    with docker_engine() as engine:
        yield engine


@pytest.fixture
def engine(daemon: DockerEngine) -> DockerEngine:
    daemon.clear()
    return daemon


def pruned(
    engine: DockerEngine,
    remove: frozenset[Leftover] = ALL,
    *,
    age: timedelta = timedelta(0),
    keep: tuple[str, ...] = (),
    stopping: bool = False,
    **params: Any,
) -> Mapping[str, Any]:
    policy = ContainersPolicy(remove, age, str(engine.path), keep)
    return PruneContainersExecutor(policy).perform(accepted(PRUNE, stopping=stopping, **params))


def reasons(output: Mapping[str, Any]) -> Mapping[str, int]:
    return {reason: entry["count"] for reason, entry in output["left"].items()}


def filled(engine: DockerEngine) -> None:
    """One container of each kind, an image in use, one without a name, and one that nobody uses."""
    engine.load("job", "old")
    engine.load("job", "old")  # takes the name away from the first
    engine.load("spare")
    for name, host in (
        ("ended", {}),
        ("training", {}),
        ("service", {"RestartPolicy": {"Name": "always"}}),
        ("new", {}),
    ):
        engine.create(name, "job:old", *(("sleep", "300") if name == "training" else ("true",)), **host)
    engine.start("training")
    engine.start("ended")
    eventually(lambda: engine.states()["ended"] == "exited", 60, "the container has ended")


def test_unused_containers_and_images_are_removed_and_the_rest_stays(engine: DockerEngine) -> None:
    """A trial lists the same and removes nothing; containers that run or will restart and used images stay."""
    filled(engine)
    trial = pruned(engine, dry_run=True)
    assert engine.images() == {"job:old", "spare:latest", "<none>:<none>"}
    run = pruned(engine)
    assert engine.states() == {"training": "running", "service": "created"}
    knows_pulls = "age_unknown" not in reasons(run)
    assert engine.images() == ({"job:old"} if knows_pulls else {"job:old", "spare:latest"})
    assert run["removed"] == trial["removed"]
    assert run["removed"]["stopped_containers"] == 2
    assert run["removed"]["dangling_images"] == 1
    assert run["left"]["has_restart_policy"] == {"count": 1, "examples": ["service"]}
    again = pruned(engine)
    assert again["removed"] == {}
    assert run["free_bytes_after"] > run["free_bytes_before"]
    assert os.path.isdir(run["storage"])  # noqa: PTH112


def test_only_the_kinds_in_the_policy_are_removed(engine: DockerEngine) -> None:
    """A policy for images leaves containers, and so the images that these use."""
    filled(engine)
    output = pruned(engine, frozenset({Leftover.DANGLING_IMAGES}))
    assert output["removed"] == {"dangling_images": 1}
    assert set(engine.states()) == {"ended", "training", "service", "new"}
    assert engine.images() == {"job:old", "spare:latest"}


def test_recent_images_and_those_named_in_the_policy_stay(engine: DockerEngine) -> None:
    """A recently named image may be needed by a job that is about to start."""
    filled(engine)
    young = pruned(engine, age=timedelta(hours=1))
    assert young["removed"] == {}
    assert reasons(young)["young"] >= 3
    kept = pruned(engine, keep=("localhost/spare:*", "ended"))
    assert kept["left"]["kept_by_policy"]["count"] == 2
    assert "spare:latest" in engine.images()
    assert "ended" in engine.states()


def test_a_stopping_agent_removes_nothing_more(engine: DockerEngine) -> None:
    """The answer reports that it is incomplete."""
    filled(engine)
    output = pruned(engine, stopping=True)
    assert (output["stopped"], output["removed"]) == ("agent_stopping", {})
    assert "ended" in engine.states()


def test_a_kubernetes_node_is_refused(engine: DockerEngine) -> None:
    """A process or a container's labels reveal it; the kubelet relies on the images that it has pulled."""
    filled(engine)
    policy = ContainersPolicy(ALL, timedelta(0), str(engine.path))
    with pytest.raises(CommandRejected, match="the process kubelet runs here, so this is a Kubernetes node"):
        PruneContainersExecutor(policy, kubelet_sign=lambda: "the process kubelet runs here").perform(accepted(PRUNE))
    engine.ask(
        "POST",
        "/containers/create?name=pause",
        b'{"Image": "localhost/job:old", "Cmd": ["/busybox"], "Labels": {"io.kubernetes.pod.name": "web-0"}}',
    )
    with pytest.raises(CommandRejected, match="has Kubernetes containers"):
        pruned(engine)
    assert "ended" in engine.states()


def test_storage_on_another_file_system_is_refused(engine: DockerEngine) -> None:
    """An alert on /proc is no reason to remove images."""
    filled(engine)
    with pytest.raises(CommandRejected, match="does not lie on /proc"):
        pruned(engine, filesystems=[{"mountpoint": "/proc", "device": "proc"}])
    assert "ended" in engine.states()


def test_a_socket_without_an_engine_is_reported(engine: DockerEngine) -> None:
    """The error says what to do."""
    policy = ContainersPolicy(ALL, timedelta(0), f"{engine.path}-elsewhere")
    with pytest.raises(CommandUnsupported, match=r"no container engine listens at .*-elsewhere; name its socket"):
        PruneContainersExecutor(policy).perform(accepted(PRUNE))
