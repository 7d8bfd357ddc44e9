"""An undo is owed until it is certain that nothing is left to take back, whatever job, Redis or keys have forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

import trainmedic
from tests.support.live import Job, Server
from tests.support.messages import KEY, delivery, resolved
from tests.support.programs import PYTHON_PATH, eventually
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.envelope import new_id

PLAYBOOK = """
playbook: slow-down
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, timeout: 20s, undo: on_resolve}
"""


class RecordingJob(Job):
    """A job whose loop keeps a record of its own of what is in force, as the integrations do."""

    def __init__(self, name: str, redis_url: str, factors: dict[str, float]) -> None:
        super().__init__(name, redis_url)
        self.factors = factors

    def __enter__(self) -> RecordingJob:
        super().__enter__()

        def in_force(command_id: str) -> bool:
            return command_id in self.factors

        @self._medic.on("job.scale_lr", in_force=in_force)
        def scale(command: trainmedic.JobCommand) -> dict[str, Any]:
            if command.undo_of is not None:
                del self.factors[command.undo_of]
            else:
                self.factors[command.id] = command.params["factor"]
            return {}

        return self


def undo_of(server: Server) -> dict[str, Any]:
    undo: dict[str, Any] = server.only_run()["steps"][0]["undo"]
    return undo


def tried(server: Server) -> dict[str, Any]:
    """The undo, once it has been tried without success."""
    return eventually(lambda: (undo := undo_of(server))["error"] and undo, 60, "undo tried", 0.05)


def emptied(redis_url: str) -> None:
    """As Redis comes back where its disk was lost."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()


def command(server: Server, *arguments: str) -> str:
    """What the command line prints about the server."""
    argv = [sys.executable, "-m", "trainmedic_server", *arguments, "--server", f"http://127.0.0.1:{server.port}"]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "COLUMNS": "300"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def slowed(server: Server) -> dict[str, Any]:
    """An alert that has halved the job's learning rate; what was delivered."""
    fired = delivery("Spike", "llm")
    assert server.ask("/webhook", fired).status == 200
    assert server.closed_run()["status"] == "succeeded"
    return fired


def test_an_active_effect_is_undone_whatever_the_memory_says(tmp_path: Path, redis_url: str) -> None:
    """The only note of the command is deleted, and the job is another process: its own record of
    what is in force counts first."""
    factors: dict[str, float] = {}
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url) as server:
        with RecordingJob("llm", redis_url, factors):
            fired = slowed(server)
        (command_id,) = factors
        with redis.Redis.from_url(redis_url) as client:
            assert client.delete(f"trainmedic:memory:job:llm:{command_id}") == 1
        with RecordingJob("llm", redis_url, factors):
            assert server.ask("/webhook", resolved(fired)).status == 200
            assert server.undone_run()["steps"][0]["undo"]["status"] == "done"
        assert factors == {}


def test_a_key_of_another_type_in_redis_blocks_no_command(tmp_path: Path, redis_url: str) -> None:
    """The keys are those of the job's memory."""
    with redis.Redis.from_url(redis_url) as client:
        client.rpush("trainmedic:memory-since:job:llm", "x")
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url) as server, Job("llm", redis_url) as job:
        slowed(server)
    assert job.done == ["job.scale_lr 0.5"]


def test_the_undo_of_a_forgotten_command_stays_pending_until_closed_manually(tmp_path: Path, redis_url: str) -> None:
    """Redis came back empty and the job is another process, so it cannot know. Users see the reason and close it."""
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url) as server:
        with Job("llm", redis_url) as job:
            fired = slowed(server)
        assert job.done == ["job.scale_lr 0.5"]
        emptied(redis_url)
        with Job("llm", redis_url) as restarted:
            assert server.ask("/webhook", resolved(fired)).status == 200
            undo = tried(server)
            assert undo["status"] == "running"
            assert "does not know the command" in undo["error"]
            assert undo["retry_at"] is not None
            (item,) = server.ask("/history?owes_undo=true").body["items"]
            assert (item["owes_undo"], item["undone_at"]) == (True, None)
            assert "does not know the command" in item["undo_error"]
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as metrics:
                assert "trainmedic_undos_delayed 1.0" in metrics.read().decode()
            shown = command(server, "status")
            assert "1 pending in closed runs, FAILED when last tried: 1" in shown
            assert f"{item['run_id']}: rank 0 of job 'llm' failed: job 'llm' does not know the command" in shown
            assert "undo_error" in command(server, "history", "--owes-undo", "--output", "json")
            assert "last attempt failed" in command(server, "history", "show", item["run_id"])
            path = f"/runs/{item['run_id']}/close_undo"
            assert server.ask(path, {}).status == 422
            assert server.ask(path, {"note": "  "}).status == 422
            closed = command(server, "runs", "close-undo", item["run_id"], "--note", "the rate was set by hand")
            assert closed == "slow-down job:llm: succeeded\n"
            assert undo_of(server)["status"] == "closed"
            assert undo_of(server)["because"] == "closed by anonymous: the rate was set by hand"
            assert server.ask(path, {"note": "again"}).status == 409
            assert server.ask("/history?owes_undo=true").body["items"] == []
            assert restarted.done == []


def test_a_job_with_a_record_of_active_effects_reverts_them_without_its_memory(tmp_path: Path, redis_url: str) -> None:
    """The active effects count, not the remembered commands."""
    factors: dict[str, float] = {}
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url) as server:
        with RecordingJob("llm", redis_url, factors):
            fired = slowed(server)
        assert list(factors.values()) == [0.5]
        emptied(redis_url)
        with RecordingJob("llm", redis_url, factors):
            assert server.ask("/webhook", resolved(fired)).status == 200
            assert server.undone_run()["steps"][0]["undo"]["status"] == "done"
        assert factors == {}


def test_a_restarted_job_reports_that_nothing_is_active(tmp_path: Path, redis_url: str) -> None:
    """This is certain, although the server has it recorded as applied."""
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url) as server:
        with RecordingJob("llm", redis_url, {}):
            fired = slowed(server)
        emptied(redis_url)
        with RecordingJob("llm", redis_url, {}):
            assert server.ask("/webhook", resolved(fired)).status == 200
            undo = server.undone_run()["steps"][0]["undo"]
    assert undo["status"] == "done"
    assert {name: undo["output"][name] for name in ("nothing_to_undo", "known")} == {
        "nothing_to_undo": True,
        "known": "not_in_force",
    }


def test_a_command_that_never_arrived_has_nothing_to_undo_even_after_a_restart(tmp_path: Path, redis_url: str) -> None:
    """Redis must have lost nothing since before the command was issued."""
    hasty = PLAYBOOK.replace("20s", "1s")
    with Server(tmp_path, hasty, "--redis", redis_url) as server:
        with Job("llm", redis_url) as first, redis.Redis.from_url(redis_url) as client:
            eventually(lambda: client.exists("trainmedic:memory-since:job:llm"), 60, "the memory is marked")
        fired = delivery("Spike", "llm")
        assert server.ask("/webhook", fired).status == 200
        assert server.closed_run()["steps"][0]["status"] == "unknown"
        with Job("llm", redis_url) as second:
            assert server.ask("/webhook", resolved(fired)).status == 200
            undo = server.undone_run()["steps"][0]["undo"]
        assert (undo["status"], undo["output"]["known"]) == ("done", "never_applied")
        assert first.done + second.done == []


def test_an_undo_rejected_for_its_signature_is_executed_once_the_keys_agree(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job got a key before the server did, then drops it again. Its refusal is answered, and trusted."""
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url) as server:
        with Job("llm", redis_url) as job:
            fired = slowed(server)
        monkeypatch.setenv("TRAINMEDIC_SIGNING_KEY", KEY)
        with Job("llm", redis_url) as refusing:
            assert server.ask("/webhook", resolved(fired)).status == 200
            undo = tried(server)
            assert undo["status"] == "running"
            assert "is not signed" in undo["error"]
            assert server.only_run()["owes_undo"] is True
        monkeypatch.delenv("TRAINMEDIC_SIGNING_KEY")
        with Job("llm", redis_url) as agreeing:
            assert server.undone_run(within=120)["steps"][0]["undo"]["status"] == "done"
    assert (job.done, refusing.done, agreeing.done) == (["job.scale_lr 0.5"], [], ["job.scale_lr 2"])


@pytest.fixture
def memory(redis_url: str) -> Callable[[], Any]:
    """Makes the memory of another process of the job."""
    return lambda: CommandMemory("job:llm", new_id())


def test_a_memory_is_complete_only_while_redis_has_lost_nothing(
    tmp_path: Path, own_redis: Any, memory: Callable[[], Any]
) -> None:
    """Another process of the job knows what never came. After a restart of Redis, which may have lost its last writes,
    where its keys are gone, and where it has evicted some, nobody does."""
    server = own_redis(tmp_path)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert memory().mark_whole(client) is not None
        unseen = new_id()
        assert memory().covers(client, unseen)
        server.kill()
        server.start()
        assert not memory().covers(client, unseen)
        later = new_id()
        assert memory().covers(client, later)
        time.sleep(0.01)  # ids count milliseconds
        client.flushall()
        assert not memory().covers(client, later)
        last = new_id()
        assert memory().covers(client, last)
        time.sleep(0.01)
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "3mb")
        for number in range(3000):
            client.set(f"filler-{number}", "x" * 2000)
        assert client.info()["evicted_keys"] > 0  # type: ignore[index]
        client.config_set("maxmemory", "0")
        assert not memory().covers(client, last)
        assert not memory().covers(client, "no id of a server's")
