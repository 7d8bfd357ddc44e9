"""One agent works on a GPU, a root and a journal: a second one, whatever its name, is refused with the reason."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.driver.driver import Driver, cards
from tests.support.agent_node import KEY, Node
from tests.support.gpu_node import GpuNode
from tests.support.programs import eventually
from trainmedic.wire import envelope
from trainmedic_core import machine_locks

REFUSED = 2
CLEANING = "allow: [disk.clean]\ncleaning: {{rules: {{old: {{roots: [{}], globs: ['**'], min_age: 1h}}}}}}\n"
FIRST = cards(1)[0].uuid


@pytest.fixture
def driver(make_driver: Callable[..., Driver]) -> Driver:
    return make_driver(1)


@pytest.fixture
def node(tmp_path: Path, redis_url: str, driver: Driver) -> Iterator[GpuNode]:
    with GpuNode(tmp_path / "node", redis_url, driver) as running:
        yield running


def refusal(node: Node) -> str:
    """What an agent that ends by itself says."""
    node.start(wait=False)
    try:
        assert node.agent.process.wait(60) == REFUSED, node.agent.tail()
    finally:
        node.agent.end()
    return node.agent.tail()


# --- the same GPU ---------------------------------------------------------------------------------------


def test_no_gpu_stays_capped_by_two_agents(tmp_path: Path, redis_url: str, driver: Driver, node: GpuNode) -> None:
    """The second one would take the first one's cap for the original limit. It reports the owner of the GPU."""
    cap = node.send(node.cap("0", percent=80))
    assert node.final(cap).status == envelope.APPLIED
    text = refusal(GpuNode(tmp_path / "other", redis_url, driver, name="n2"))
    assert f"{FIRST} belongs to another agent of this machine, process {node.agent.process.pid}" in text
    node.final(node.send(node.cap("0", undo_of=cap.id)))
    assert [call.watts for call in driver.sets()] == [560, 700]


def test_a_gpu_that_appears_later_belongs_to_its_first_agent(
    tmp_path: Path, redis_url: str, driver: Driver, node: GpuNode
) -> None:
    """An agent started without a visible GPU does not offer it, gives the reason, and sets no limit."""
    node.final(node.send(node.cap("0", percent=80)))
    late = GpuNode(tmp_path / "late", redis_url, driver, name="n2")
    driver.unload()
    with late:
        driver.reload()

        def problems() -> str:
            return str((late.presence() or {}).get("gpu_problems"))

        eventually(lambda: f"{FIRST} belongs to another agent" in problems(), 60, "the reason in the presence")
        assert (late.presence() or {})["gpus"] == []
        refused = late.final(late.send(late.cap("0", percent=60)))
        assert refused.status == envelope.FAILED
        assert "belongs to another agent" in str(refused.output["reason"])
    assert 420 not in [call.watts for call in driver.sets()]


def test_gpus_of_another_agent_are_not_released(tmp_path: Path, redis_url: str, driver: Driver, node: GpuNode) -> None:
    """The state directory given to ``agent release`` has a recorded cap of its own on them."""
    node.final(node.send(node.cap("0", percent=80)))
    argv = (sys.executable, "-m", "trainmedic_server", "agent", "release", "--state-dir", str(tmp_path / "other"))
    environment = {**os.environ, **driver.environment}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, driver.watts(0)) == (REFUSED, 560)
    assert "belongs to another agent" in done.stderr


@pytest.mark.parametrize(("name", "is_warned"), [("n1", False), ("n2", True)])
def test_the_check_warns_of_another_agent(
    tmp_path: Path, redis_url: str, driver: Driver, node: GpuNode, name: str, is_warned: bool
) -> None:
    """It does not warn of the one that runs under the checked name."""
    argv = (sys.executable, "-m", "trainmedic_server", "agent", "check", "--node", name, "--redis", redis_url, "--json")
    environment = {**os.environ, **driver.environment, "TRAINMEDIC_SIGNING_KEY": KEY}
    checked = subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    warnings = " ".join(json.loads(checked.stdout)["warnings"])
    assert (
        f"{FIRST} belongs to another agent of this machine, process {node.agent.process.pid}" in warnings
    ) is is_warned


def test_a_killed_agent_gets_its_gpu_back_at_once(node: GpuNode) -> None:
    """This works any number of times."""
    for _ in range(3):
        node.kill()
        node.start()
        cap = node.send(node.cap("0", percent=80))
        assert node.final(cap).status == envelope.APPLIED
        node.final(node.send(node.cap("0", undo_of=cap.id)))


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process is needed, which only root can start")
def test_an_unrelated_user_does_not_block_an_agents_root(tmp_path: Path, redis_url: str, driver: Driver) -> None:
    """Any user can hold any name; only a process that could be an agent counts."""
    driver.unload()
    root = tmp_path / "scratch"
    name = f"trainmedic:root:{hashlib.sha256(os.fsencode(root)).hexdigest()[:32]}"
    squatting = (
        "import os, socket, time; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + {name!r}); s.listen(5)\n"
        "print('bound', flush=True); time.sleep(60)"
    )
    argv = (sys.executable, "-c", squatting)
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"bound\n"
        try:
            with GpuNode(tmp_path / "node", redis_url, driver, CLEANING.format(root)):
                pass
        finally:
            stranger.kill()


def test_a_lock_whose_holder_refuses_connections_is_logged_as_ineffective(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The holder is unknown then, and any user can be it."""
    monkeypatch.setattr(machine_locks, "_TRY_SECONDS", 0.0)
    name = f"test:{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(f"\0trainmedic:{name}")
        assert isinstance(machine_locks.NameLock.take(name), machine_locks.NameLock)
    assert [record.lock for record in caplog.records] == [name]  # type: ignore[attr-defined]
    free = machine_locks.NameLock.take(name)
    assert isinstance(machine_locks.NameLock.take(name), machine_locks.Holder)
    assert isinstance(free, machine_locks.NameLock)
    free.release()


# --- the same root --------------------------------------------------------------------------------------


def test_a_root_is_cleaned_by_one_agent(tmp_path: Path, redis_url: str, driver: Driver) -> None:
    """Two agents that clean different roots run side by side."""
    driver.unload()
    root, another = tmp_path / "scratch", tmp_path / "logs"
    with GpuNode(tmp_path / "node", redis_url, driver, CLEANING.format(root)) as node:
        text = refusal(GpuNode(tmp_path / "other", redis_url, driver, CLEANING.format(root), "n2"))
        assert f"root {root} belongs to another agent of this machine, process {node.agent.process.pid}" in text
        with GpuNode(tmp_path / "third", redis_url, driver, CLEANING.format(another), "n3"):
            pass


# --- the same journal -----------------------------------------------------------------------------------


def by_symlink(state: Path, other: Path) -> None:
    other.mkdir()
    (other / "agent.db").symlink_to(state / "agent.db")


def by_hard_link(state: Path, other: Path) -> None:
    other.mkdir()
    (other / "agent.db").hardlink_to(state / "agent.db")


def by_directory(state: Path, other: Path) -> None:
    other.symlink_to(state)


@pytest.mark.parametrize("alias", [by_symlink, by_hard_link, by_directory])
def test_a_journal_has_one_agent_under_any_name(
    tmp_path: Path, redis_url: str, alias: Callable[[Path, Path], None]
) -> None:
    """The first agent continues."""
    with Node(tmp_path / "node", redis_url) as node:
        other = Node(tmp_path / "other", redis_url, name="n2")
        alias(node.state, other.state)
        assert "another agent is running with" in refusal(other)
        assert node.do("node.facts")[0] == envelope.APPLIED


def test_a_copied_journal_is_unusable_while_the_original_is_in_use(tmp_path: Path, redis_url: str) -> None:
    """Once that agent has ended, the copy is a normal journal, and then blocks the original."""
    with Node(tmp_path / "node", redis_url) as node:
        other = Node(tmp_path / "other", redis_url, name="n2")
        shutil.copytree(node.state, other.state)
        assert f"is a copy: the agent with process id {node.agent.process.pid}" in refusal(other)
        assert node.do("node.facts")[0] == envelope.APPLIED
        node.kill()
        with other:
            assert "is a copy" in refusal(node)
        node.start()
        assert node.do("node.facts")[0] == envelope.APPLIED
