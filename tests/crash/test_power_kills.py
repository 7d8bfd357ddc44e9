"""The agent and Redis are killed while power limits are set and given back: nothing happens twice, and no cap
outlives its lease.

``TRIALS`` in the environment says how many random moments are tried.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tests.conftest import RedisServer
from tests.driver.driver import SET_LIMIT, Driver
from tests.support.gpu_node import GpuNode
from tests.support.programs import eventually
from trainmedic.wire import envelope
from trainmedic.wire.envelope import Command

TRIALS = int(os.environ.get("TRIALS", "8"))
GPUS = 8
LEASE = 1.2
ALIVE = 0.7
"""Seconds that an agent which lives may take to end a cap whose lease is over."""


@pytest.fixture
def node(tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]) -> Iterator[GpuNode]:
    with GpuNode(tmp_path / "node", redis_url, make_driver(2)) as running:
        yield running


def die(node: GpuNode) -> None:
    """Wait for the kill that the driver was told to give; then the next process."""
    node.agent.process.wait(60)
    node.start(wait=False)


@pytest.mark.parametrize("after", [False, True], ids=["before the limit is set", "after the limit is set"])
def test_an_agent_killed_while_setting_a_limit_sets_it_once(node: GpuNode, after: bool) -> None:
    """The next process finishes the command from its intent: it is answered as applied, with the value from
    before it. So with its undo."""
    node.driver.fail(SET_LIMIT, times=1, kill=True, after=after)
    cap = node.send(node.cap("0", percent=80))
    die(node)
    reply = node.final(cap)
    assert (reply.status, reply.output["previous_watts"], reply.output["limit_watts"]) == (envelope.APPLIED, 700, 560)
    node.driver.fail(SET_LIMIT, times=1, kill=True, after=after)
    undo = node.send(node.cap("0", undo_of=cap.id))
    die(node)
    reply = node.final(undo)
    assert (reply.status, reply.output["limit_watts"]) == (envelope.APPLIED, 700)
    assert [call.watts for call in node.driver.sets()] == [560, 700]


def test_an_agent_killed_between_two_gpus_caps_each_once(node: GpuNode) -> None:
    """One command caps both; the kill comes after the first."""
    node.driver.fail(SET_LIMIT, gpu=0, times=1, kill=True, after=True)
    cap = node.send(node.cap(["0", "1"], percent=80))
    die(node)
    assert node.final(cap).status == envelope.APPLIED
    assert [(call.gpu, call.watts) for call in node.driver.sets()] == [(0, 560), (1, 560)]


def test_a_cap_that_expired_while_the_agent_was_dead_is_reverted(node: GpuNode) -> None:
    """It was set and not reported, and its expiry passed before the report: nothing of it stays."""
    node.driver.fail(SET_LIMIT, times=1, kill=True, after=True)
    cap = node.send(node.cap("0", percent=80, lasting=1.0))
    node.agent.process.wait(60)
    time.sleep(1.0)
    node.start()
    assert node.final(cap).status == envelope.EXPIRED
    assert node.driver.watts(0) == 700


def test_a_cap_without_an_observed_effect_ends_with_its_lease(node: GpuNode) -> None:
    """The agent was killed as the driver had set the limit, and returns after the lease: it takes the limit as its
    own, although it never saw it, and gives the power back."""
    node.driver.fail(SET_LIMIT, times=1, kill=True, after=True)
    cap = node.send(node.cap("0", percent=80, lease_seconds=0.5))
    node.agent.process.wait(60)
    time.sleep(0.5)
    node.start()
    reply = node.final(cap)
    assert (reply.status, node.driver.watts(0)) == (envelope.FAILED, 700)
    assert "its lease had run out" in str(reply.output["reason"])
    assert [call.watts for call in node.driver.sets()] == [560, 700]


def test_an_unobserved_change_between_two_caps_is_not_taken_as_external(node: GpuNode) -> None:
    """The stricter of two caps is undone, the agent killed as the driver had set the milder limit, and both are
    over when it is back: the limit from before is."""
    mild = node.send(node.cap("0", percent=80, lease_seconds=2))
    hard = node.send(node.cap("0", percent=60, lease_seconds=2))
    node.final(mild)
    node.final(hard)
    node.driver.fail(SET_LIMIT, times=1, kill=True, after=True)
    undo = node.send(node.cap("0", undo_of=hard.id))
    node.agent.process.wait(60)
    time.sleep(2)
    node.start()
    reply = node.final(undo)
    assert (reply.status, reply.output["limit_watts"]) == (envelope.APPLIED, 700)
    assert "note" not in reply.output
    assert [call.watts for call in node.driver.sets()] == [560, 420, 560, 700]


class Trial:
    """Caps on every GPU of a node, and the undo of every second one; the others run out. Something is killed at a
    random moment meanwhile."""

    def __init__(self, node: GpuNode, server: RedisServer, chance: random.Random) -> None:
        self.node = node
        self.server = server
        self.chance = chance
        self.watts = chance.sample(range(360, 690), GPUS)
        self.first = len(node.driver.attempts())

    def run(self) -> None:
        caps = [self.node.cap(str(gpu), watts=watts, lease_seconds=LEASE) for gpu, watts in enumerate(self.watts)]
        kill_at = self.chance.choice(("cap", "restore"))
        back_at = self._go(caps, kills=kill_at == "cap")
        replies = [self.node.final(cap) for cap in caps]
        for reply in replies:  # one that was down for longer than the lease finds that it has ended
            late = reply.status == envelope.FAILED and "has ended" in str(reply.output["reason"])
            assert reply.status == envelope.APPLIED or late, reply
        undos = [self.node.cap(str(gpu), undo_of=cap.id) for gpu, cap in enumerate(caps) if gpu % 2]
        if kill_at == "restore":
            self.chance.choice((lambda: None, lambda: time.sleep(LEASE * self.chance.random())))()
            back_at = self._go(undos, kills=True)
        else:
            self._go(undos, kills=False)
        for undo in undos:
            assert self.node.final(undo).status == envelope.APPLIED
        ends = [
            envelope.read_time(reply.output["lease_until"]).timestamp() if "lease_until" in reply.output else None
            for reply in replies
        ]
        eventually(self._is_given_back, 60, "the limits from before", every=0.02)
        self._judge(ends, back_at)

    def _go(self, commands: list[Command], kills: bool) -> float:
        """Send them, kill meanwhile, and bring back what was killed; when that was."""
        moment = self.chance.uniform(0, 0.06)
        for command in commands[:4]:
            self.node.send(command)
        if not kills:
            for command in commands[4:]:
                self.node.send(command)
            return 0.0
        time.sleep(moment)
        victims = self.chance.choice(("agent", "redis", "both"))
        if victims != "agent":
            self.server.kill()
        if victims != "redis":
            self.node.kill()
        if victims != "agent":
            self.server.start()
        if victims != "redis":
            self.node.start(wait=False)
        for command in commands:  # as the server does that does not know whether they arrived
            self._send_again(command)
        if victims != "redis":
            eventually(lambda: (self.node.presence() or {}).get("pid") == self.node.agent.process.pid, 60, "the agent")
        return time.time()

    def _send_again(self, command: Command) -> None:
        while True:
            try:
                self.node.send(command)
                return
            except redis.RedisError:
                time.sleep(0.02)

    def _is_given_back(self) -> bool:
        return all(self.node.driver.watts(gpu) == 700 for gpu in range(GPUS))

    def _judge(self, ends: list[float | None], back_at: float) -> None:
        """Each GPU was set to its cap once and back once, the latter in time."""
        calls = self.node.driver.attempts()[self.first :]
        for gpu, (watts, end) in enumerate(zip(self.watts, ends, strict=True)):
            of_gpu = [call for call in calls if call.gpu == gpu]
            if end is None and not of_gpu:
                continue
            assert [(call.watts, call.code) for call in of_gpu] == [(watts, 0), (700, 0)]
            assert of_gpu[1].at < max(end or of_gpu[0].at + LEASE, back_at) + ALIVE


def test_random_kills_neither_repeat_nor_prolong_a_cap(
    tmp_path: Path, own_redis: type[RedisServer], make_driver: Callable[..., Driver]
) -> None:
    """The agent, Redis or both are killed while caps are set, undone or expire."""
    seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
    server = own_redis(tmp_path)
    server.start()
    with GpuNode(tmp_path / "node", server.url, make_driver(GPUS)) as node:
        for trial in range(TRIALS):
            one = Trial(node, server, random.Random(f"{seed}/{trial}"))
            try:
                one.run()
            except AssertionError as error:
                raise AssertionError(f"trial {trial}, SEED={seed}: {error}\n{node.agent.tail(15)}") from error
