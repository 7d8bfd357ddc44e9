"""Agent, server and Redis are killed again and again while lines are written: nothing is lost, nothing counts twice."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis
from msgspec.structs import replace

from tests.support.agent_node import KEY as NODE_KEY
from tests.support.findings import of_kernel, told
from tests.support.live import Server
from tests.support.log_node import LogNode
from tests.support.postgres import PostgresServer
from tests.support.programs import eventually
from tests.support.server_group import Servers, trouble
from trainmedic.wire import findings, log_layout
from trainmedic.wire.signing import Signer, identity_key, node_identity
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.domain.finding_codec import FindingUpdate

KEY = "a shared key of the tests"
KILLS = int(os.environ.get("TRAINMEDIC_TEST_KILLS", "6"))
NODES, STREAMS, LINES = 8, 5, 20
RULE = "storage-gone"
"""No shipped rule has the name."""
PLAYBOOK = """
playbook: tell
on: {alert: StorageAway}
mode: observe
target: node
steps: [{id: tell, action: notify, with: {message: "look at {{ target.node }}"}}]
---
log_rule: storage-gone
source: kernel
contains: ["nfs: server"]
match: ['nfs: server (?P<server>\\S+) not responding']
ends: ['nfs: server (?P<server>\\S+) OK']
role: root
cause: storage
target: node
alert: {name: StorageAway, severity: critical, component: storage, until: ends}
"""

MARKED = """
playbook: tell
on: {alert: Marked}
mode: observe
target: cluster
steps: [{id: tell, action: notify, with: {message: "look at {{ labels.n }}"}}]
---
log_rule: marked
source: launcher
contains: ["MARK"]
match: ['MARK (?P<n>\\d+)']
role: root
cause: code
alert: {name: Marked, labels: {n: "{{ fields.n }}"}, until: 1h}
"""
MARKS = 150


class Agent(threading.Thread):
    """A node's agent as far as it tells: each update is kept until Redis has said that it has it, and then no more.

    Where the answer is lost the update is sent again, so some come twice. It is itself restarted now and then: then
    it begins with the oldest update that was not acknowledged before its last note, as from its disk.
    """

    def __init__(self, node: str, url: str, chance: random.Random) -> None:
        super().__init__(daemon=True)  # it goes on for ever where Redis stays away
        self._node, self._url, self._chance = node, url, chance
        self._signer = Signer.of(identity_key(KEY.encode(), node_identity(node)))
        self._waiting: deque[FindingUpdate] = deque(self._updates())
        self.sent = 0

    def _updates(self) -> list[FindingUpdate]:
        at, numbers = datetime.now(UTC), itertools.count(1)
        made = []
        for line in range(1, LINES + 1):
            for stream in range(STREAMS):
                finding = replace(of_kernel(RULE, self._node, at), id=f"stream-{stream}", count=line)
                made.append(told(finding, next(numbers), lines=[f"line of stream {stream}"] if line == 1 else ()))
        return made

    def run(self) -> None:
        taken: list[FindingUpdate] = []
        while self._waiting:
            try:
                with redis.Redis.from_url(self._url, socket_timeout=1) as client:
                    while self._waiting:
                        time.sleep(self._chance.uniform(0, 0.08))
                        update = self._waiting[0]
                        raw = finding_codec.encode(update)
                        fields: Any = {findings.FIELD: raw, **self._signer.fields(raw)}
                        client.xadd(findings.FINDINGS, fields)
                        self.sent += 1
                        if self._chance.random() < 0.05:  # killed before it noted what it has sent of late
                            self._waiting.extendleft(reversed(taken[-3:]))
                            del taken[-3:]
                            continue
                        taken.append(self._waiting.popleft())
            except redis.RedisError:
                time.sleep(0.05)


Victim = tuple[Callable[[], Any], Callable[[], Any]]
"""How to kill one, and how to start it again."""


def kill_at_random(victims: list[Victim], chance: random.Random) -> None:
    """Kill one of them at a random moment, and start it again after a while; a number of times."""
    for _ in range(KILLS):
        time.sleep(chance.uniform(0.1, 1.2))
        kill, start = chance.choice(victims)
        kill()
        time.sleep(chance.uniform(0, 0.5))
        start()


def test_kills_of_server_and_redis_lose_nothing_and_count_nothing_twice(tmp_path: Path, own_redis: Any) -> None:
    """Eight nodes with five streams each give eight findings that count every line once, and an alert and run each."""
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    print(f"seed {seed}, {KILLS} kills")
    store = own_redis(tmp_path)
    store.start()
    empty = tmp_path / "no rules"
    empty.mkdir()
    options = ("--redis", store.url, "--log-rules", str(empty))
    with Server(tmp_path / "server", PLAYBOOK, *options, environment={"TRAINMEDIC_SIGNING_KEY": KEY}) as server:
        victims = [(server.kill, lambda: server.start(wait=False)), (store.kill, store.start)]
        tell_meanwhile(store.url, seed, lambda: kill_at_random(victims, chance))
        each_counts_once(server, store.url)


def test_each_update_counts_once_with_several_servers(tmp_path: Path, redis_url: str, postgres: PostgresServer) -> None:
    """The leader is killed, cut off from all others, and hangs for longer than the takeover."""
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    kinds = chance.sample(["kill", "cut", "hang"], 3)
    print(f"seed {seed}: {kinds}")

    def part(servers: Servers) -> None:
        for kind in kinds:
            time.sleep(chance.uniform(0.3, 1.0))
            trouble(kind, servers, postgres)

    with Servers(tmp_path, PLAYBOOK, postgres.database(), redis_url) as servers:
        tell_meanwhile(redis_url, seed, lambda: part(servers))
        servers.wait()
        each_counts_once(servers, redis_url)


def tell_meanwhile(url: str, seed: int, happens: Callable[[], None]) -> None:
    """Have all nodes tell all of their updates, some of them twice, while this happens."""
    agents = [Agent(f"node-{number}", url, random.Random(seed + number)) for number in range(NODES)]
    for agent in agents:
        agent.start()
    happens()
    for agent in agents:
        agent.join()
    assert sum(agent.sent for agent in agents) > NODES * STREAMS * LINES, "nothing came twice"


def each_counts_once(server: Server, url: str) -> None:
    """Each node has one finding, with every line counted once, all excerpts, and one run."""
    with redis.Redis.from_url(url) as client:
        eventually(lambda: client.xlen(findings.FINDINGS) == 0, 60, "all findings are taken")
    items = eventually(lambda: server.ask("/findings?limit=1000").body, 60, "an answer")["items"]
    assert Counter({item["node"]: item["count"] for item in items}) == Counter(
        {f"node-{number}": STREAMS * LINES for number in range(NODES)}
    )
    assert len(items) == NODES
    eventually(lambda: len(server.runs()) >= NODES, 60, "a run for each")
    time.sleep(6)  # what would be told twice is told by now
    assert Counter(run["node"] for run in server.runs()) == Counter(item["node"] for item in items)
    for item in items:
        shown = server.ask(f"/findings/{item['id']}").body
        assert {excerpt["lines"][0] for excerpt in shown["excerpts"]} == {
            f"line of stream {stream}" for stream in range(STREAMS)
        }


def test_a_line_in_a_file_becomes_one_finding_one_alert_and_one_run(tmp_path: Path, own_redis: Any) -> None:
    """A real agent follows the file; agent, server or Redis may be killed."""
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    print(f"seed {seed}, {KILLS} kills")
    store = own_redis(tmp_path)
    store.start()
    logs, empty = tmp_path / "logs", tmp_path / "no rules"
    logs.mkdir()
    empty.mkdir()
    attempt = log_layout.AttemptLogs.of(logs, "llm-1", 1)
    attempt.path.mkdir(parents=True)
    options = ("--redis", store.url, "--log-rules", str(empty))
    environment = {"TRAINMEDIC_SIGNING_KEY": NODE_KEY}
    with (
        Server(tmp_path / "server", MARKED, *options, environment=environment) as server,
        LogNode(tmp_path / "node", store.url, roots=[str(logs)]) as node,
    ):
        eventually(lambda: 'log_rules_info{version=""}' not in node.metrics(), 60, "rules from the server", 0.2)
        victims: list[Victim] = [
            (server.kill, lambda: server.start(wait=False)),
            (store.kill, store.start),
            (node.kill, lambda: node.start(wait=False)),
        ]
        killer = threading.Thread(daemon=True, target=kill_at_random, args=(victims, chance))
        killer.start()
        launcher = attempt.launcher("n1")
        for mark in range(MARKS):
            with launcher.open("a") as file:
                file.write(f"all is well\nMARK {mark}\n")
            time.sleep(chance.uniform(0, 0.1))
        killer.join()

        def found() -> list[dict[str, Any]]:
            answer = server.ask("/findings?limit=1000")
            return answer.body["items"] if answer.status == 200 else []

        eventually(lambda: len(found()) >= MARKS and len(server.runs()) >= MARKS, 90, "all marks", 0.5)
        time.sleep(6)  # what would come twice has come by now
        items, runs = found(), server.runs()
    assert Counter(item["labels"]["n"] for item in items) == Counter(str(mark) for mark in range(MARKS))
    assert {item["count"] for item in items} == {1}
    assert Counter(run["alert_labels"]["n"] for run in runs) == Counter(str(mark) for mark in range(MARKS))
