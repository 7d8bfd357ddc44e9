"""The breaker with a real server and a real Redis: jobs on fifty nodes, whose agents are stand-ins that take every
command."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import redis

from tests.support.live import OPEN, Server
from tests.support.messages import delivery
from tests.support.programs import eventually
from trainmedic.wire import envelope

NODES = [f"n{number:02}" for number in range(50)]
JOBS = {f"job-{number}": NODES[10 * number : 10 * number + 10] for number in range(5)}
PLAYBOOK = """
playbook: cap-job
on: {alert: TooHot}
target: job
steps:
  - {id: cap, action: gpu.power_limit, with: {percent: 80}, timeout: 20s, undo: on_resolve}
"""


class Agents:
    """The agents of all nodes in one thread: each answers every command that it has applied it."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._over = threading.Event()
        self.commands: list[envelope.Command] = []

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        for node in NODES:
            gpus = [{"uuid": f"GPU-{node}", "index": 0}]
            self._client.set(envelope.agent_presence(node), json.dumps({"node": node, "gpus": gpus}))
        for job, nodes in JOBS.items():
            ranks = [{"rank": rank, "node": node, "gpu": f"GPU-{node}"} for rank, node in enumerate(nodes)]
            presence = {"job": job, "ranks": [entry["rank"] for entry in ranks], "placement": ranks}
            self._client.set(envelope.job_presence(job), json.dumps(presence))
        thread = threading.Thread(daemon=True, target=self._answer)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            self._client.close()

    def _answer(self) -> None:
        read_to = {envelope.node_commands(node): "0" for node in NODES}
        while not self._over.is_set():
            for stream, entries in self._client.xread(read_to, block=100) or ():
                for entry_id, fields in entries:
                    read_to[stream.decode()] = entry_id
                    command = envelope.Command.decode(fields[b"command"])
                    self.commands.append(command)
                    reply = envelope.Reply(command.id, str(command.target["node"]), envelope.APPLIED)
                    self._client.xadd(envelope.REPLIES, {"reply": reply.encode()})


def test_five_jobs_on_all_nodes_do_not_pass_the_breaker(tmp_path: Path, redis_url: str) -> None:
    """At a share of 0.3, ten of fifty nodes are capped. With the second job it would be twenty: none of its nodes gets
    a command, also after a restart, and what was capped is given back. Once a person closes the breaker
    its count begins again, also for the server that is started after that."""
    options = ("--redis", redis_url, "--breaker-share", "0.3", "--breaker-min-nodes", "2")
    agents = Agents(redis_url)
    with agents.answering(), Server(tmp_path, PLAYBOOK, *options) as server:
        assert server.ask("/webhook", delivery("TooHot", "job-0")).status == 200
        first = server.closed_run()
        assert (first["status"], first["touched"]) == ("succeeded", JOBS["job-0"])
        assert server.ask("/webhook", delivery("TooHot", "job-1")).status == 200
        eventually(lambda: server.ask("/ready").body["breaker_open"], 60, "the breaker opened")
        eventually(lambda: server.runs()[0]["status"] not in OPEN, 60, "its run is closed, which a kill must not break")
        server.kill()
        server.start()
        assert server.ask("/webhook", delivery("TooHot", *list(JOBS)[2:])).status == 200
        runs = {run["job"]: run for run in server.runs()}
        refused = [runs[job] for job in list(JOBS)[1:]]
        assert [(run["status"], run["decision"], run["touched"]) for run in refused] == [
            ("not_started", "breaker_open", [])
        ] * 4
        assert "10 of 50 known nodes were acted on" in runs["job-1"]["message"]
        assert server.ask("/webhook", delivery("TooHot", "job-0", status="resolved")).status == 200
        eventually(lambda: not server.run(runs["job-0"]["run_id"])["owes_undo"], 60, "given back")
        assert {str(command.target["node"]) for command in agents.commands} == set(JOBS["job-0"])
        closed = server.ask("/resume", {"breaker": True}).body
        assert (closed["breaker_open"], closed["breaker_closed_at"] is not None) == (False, True)
        server.kill()
        server.start()
        assert server.ask("/webhook", delivery("TooHot", "job-1")).status == 200
        eventually(lambda: server.runs()[0]["status"] == "succeeded", 60, "the next job is capped after the closing")
        assert server.ask("/ready").body["breaker_open"] is False
    assert {str(command.target["node"]) for command in agents.commands} == {*JOBS["job-0"], *JOBS["job-1"]}
