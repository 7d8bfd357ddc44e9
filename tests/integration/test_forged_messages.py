"""Somebody who can write everything in Redis, and has not the signing key: he commands nothing, and leaves a trace.

A real server, Redis, agent and job. The GPU driver is a stand-in.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.driver.driver import Driver, cards
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.live import Job, Server
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually
from trainmedic.wire import envelope
from trainmedic.wire.signing import Signer, identity_key, job_identity, node_identity

FIRST, SECOND = (card.uuid for card in cards(2))
PLAYBOOKS = """
playbook: slow-down
on: {alert: LossSpike}
target: job
steps: [{id: cut, action: job.scale_lr, with: {factor: 0.5}, timeout: 6s, undo: on_resolve}]
---
playbook: save-job-on-gpu
on: {alert: GPUFailing}
target: {job: "gpu:alert"}
steps: [{id: save, action: job.checkpoint, timeout: 6s}]
---
playbook: cool-job
on: {alert: TooHot}
target: job
steps: [{id: cap, action: gpu.power_limit, with: {percent: 80}, timeout: 6s, undo: on_resolve}]
"""


@pytest.fixture
def server(tmp_path: Path, redis_url: str) -> Iterator[Server]:
    signed = {"TRAINMEDIC_SIGNING_KEY": KEY}
    with Server(tmp_path / "server", PLAYBOOKS.strip(), "--redis", redis_url, environment=signed) as serving:
        yield serving


@pytest.fixture
def attacker(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def refusals(server: Server, reason: str) -> float:
    """How many messages the server has refused for that reason."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        name = f'trainmedic_refused_messages_total{{reason="{reason}"}} '
        return sum(
            float(line.removeprefix(name)) for line in answer.read().decode().splitlines() if line.startswith(name)
        )


def logged(server: Server) -> str:
    assert server.program is not None
    return server.program.log.read_text()


def presence(job: str, signer: Signer | None = None, **members: Any) -> bytes:
    now = envelope.write_time(datetime.now(UTC))
    raw = json.dumps({"job": job, "rank": 0, "at": now, **members}).encode()
    return raw if signer is None else signer.seal(raw, envelope.job_presence(job))


def decision(server: Server, fired: dict[str, Any]) -> str:
    (run,) = server.ask("/webhook", fired).body["runs"]
    return str(run["decision"])


def test_a_gpu_added_to_a_presence_brings_no_job_a_command(
    server: Server, redis_url: str, attacker: redis.Redis
) -> None:
    """The presence is unsigned or signed with another job's key."""
    other = Signer.of(identity_key(KEY.encode(), job_identity("llm-2")))
    with Job("llm-1", redis_url, KEY):
        for number, signer in enumerate((None, Signer.of(b"made up"), other)):
            placement = [{"rank": 0, "node": "n1", "gpu": FIRST}]
            forged = presence("llm-1", signer, placement=placement)
            # The job writes its own every five seconds; this stands for long enough to be read.
            refused = refusals(server, "presence")
            eventually(
                lambda forged=forged, refused=refused: (
                    attacker.set(envelope.job_presence("llm-1"), forged) and refusals(server, "presence") > refused
                ),
                20,
                "the server has read it",
                every=0.2,
            )
            fired = delivery("GPUFailing", f"any-{number}")
            fired["alerts"][0]["labels"] = {"alertname": "GPUFailing", "UUID": FIRST}
            assert decision(server, fired) == "target_unknown"
        assert attacker.xlen(envelope.job_commands("llm-1")) == 0
        (shown,) = server.ask("/jobs").body["items"]
        assert shown["believed"] is False
        assert shown["claims"]["placement"] == placement
    assert "ignoring untrusted presence" in logged(server)


def test_a_forged_placement_caps_no_node(server: Server, attacker: redis.Redis) -> None:
    """An unknown job claims fifty nodes."""
    placement = [{"rank": number, "node": f"gpu-{number}", "gpu": f"GPU-{number:04}"} for number in range(50)]
    attacker.set(envelope.job_presence("llm-9"), presence("llm-9", ranks=list(range(50)), placement=placement))
    assert decision(server, delivery("TooHot", "llm-9")) == "started"
    run = server.closed_run()
    assert run["status"] == "failed"
    assert "is not trusted: it is not signed" in run["message"]
    assert [key for key in attacker.keys("trainmedic:commands:node:*") if attacker.xlen(key)] == []


def test_a_gpu_claimed_by_two_jobs_is_not_capped(server: Server, attacker: redis.Redis) -> None:
    """Both have signed with their own keys: it is unknown which of them is right."""
    for job in ("llm-1", "llm-2"):
        signer = Signer.of(identity_key(KEY.encode(), job_identity(job)))
        places = [{"rank": 0, "node": "n1", "gpu": FIRST}]
        attacker.set(envelope.job_presence(job), presence(job, signer, ranks=[0], placement=places))
    assert decision(server, delivery("TooHot", "llm-2")) == "started"
    run = server.closed_run()
    assert (run["status"], attacker.xlen(envelope.node_commands("n1"))) == ("failed", 0)
    assert "the location that job 'llm-2' reports is contradicted" in run["message"]
    items = server.ask("/jobs").body["items"]
    assert [item["doubts"][0].rpartition(" by ")[2] for item in items] == ["job llm-2 too", "job llm-1 too"]


def forged_replies(command_id: str, status: str, genuine: dict[bytes, bytes]) -> Iterator[dict[Any, Any]]:
    """A reply in every way that somebody without the key could think of; `genuine` is a command of the server's."""
    yield {"command_id": command_id, "status": status, "x": genuine[b"command"], "signature": genuine[b"signature"]}
    yield {"reply": genuine[b"command"], "signature": genuine[b"signature"]}
    plain = envelope.Reply(command_id, "llm-1/0@host", status, 0, {"reason": "forged"})
    yield {"reply": plain.encode()}
    yield {"command_id": command_id, "status": status, "from": "llm-1", "rank": "0", "output": "{}"}
    yield {"reply": plain.encode(), "signature": "0" * 64}
    yield {"reply": plain.encode(), **Signer.of(b"made up").fields(plain.encode())}
    for job in ("llm-1", "llm-2"):
        reply = envelope.Reply(command_id, f"{job}/0@host", status, 0, {"reason": "forged"}, job=job).encode()
        yield {"reply": reply, **Signer.of(identity_key(KEY.encode(), job_identity("llm-2"))).fields(reply)}


def test_a_rank_that_did_not_answer_is_reported_missing(server: Server, attacker: redis.Redis) -> None:
    """Genuine replies state four ranks; the presence, of another moment, lists one."""
    genuine = Signer.of(identity_key(KEY.encode(), job_identity("llm-1")))
    attacker.set(envelope.job_presence("llm-1"), presence("llm-1", genuine, ranks=[0]))
    assert decision(server, delivery("LossSpike", "llm-1")) == "started"
    command_id = only_command(attacker, "llm-1")["id"]
    reply = envelope.Reply(command_id, "llm-1/0@host", envelope.APPLIED, 0, job="llm-1", ranks=4).encode()
    fields: dict[Any, Any] = {"reply": reply, **genuine.fields(reply)}
    attacker.xadd(envelope.REPLIES, fields)
    run = server.closed_run()
    assert (run["status"], run["steps"][0]["attempts"][0]["status"]) == ("failed", "unknown")
    assert "only 1 of 4 ranks" in run["message"]


def as_value(fields: dict[bytes, bytes], body: bytes) -> bytes:
    """A genuine entry of a stream in the form of a value of a key."""
    return fields[body][:-1] + b',"signature":"' + fields[b"signature"] + b'"}'


def only_entry(attacker: redis.Redis, job: str) -> dict[bytes, bytes]:
    """The one command on the stream of a job as it stands there, once it does."""
    ((_, fields),) = eventually(lambda: attacker.xrange(envelope.job_commands(job)), 60, "the command", every=0.005)
    return dict(fields)


def only_command(attacker: redis.Redis, job: str) -> dict[str, Any]:
    command: dict[str, Any] = json.loads(only_entry(attacker, job)[b"command"])
    return command


@pytest.mark.parametrize("status", ["applied", "rejected", "failed"])
def test_a_forged_reply_is_not_an_outcome(server: Server, attacker: redis.Redis, status: str) -> None:
    """No job has answered, so the outcome is unknown and the undo pending."""
    fired = delivery("LossSpike", "llm-1")
    assert decision(server, fired) == "started"
    command = only_command(attacker, "llm-1")
    for fields in forged_replies(command["id"], status, only_entry(attacker, "llm-1")):
        attacker.xadd(envelope.REPLIES, fields)
    run = server.closed_run()
    step = run["steps"][0]
    assert run["status"] == "failed"
    assert [attempt["status"] for attempt in step["attempts"]] == ["unknown"]
    assert step["undo"]["status"] in ("armed", "running")
    assert refusals(server, "signature") + refusals(server, "other_command") == 7
    assert "refusing reply" in logged(server)


def test_a_forged_rejection_does_not_end_an_undo(server: Server, redis_url: str, attacker: redis.Redis) -> None:
    """The job is unavailable during the forgery, recovers and carries out the undo."""
    fired = delivery("LossSpike", "llm-1")
    with Job("llm-1", redis_url, KEY) as job:
        assert decision(server, fired) == "started"
        assert server.closed_run()["status"] == "succeeded"
        assert job.done == ["job.scale_lr 0.5"]
    server.ask("/webhook", resolved(fired))
    for status in ("rejected", "applied", "unsupported"):
        entry = only_entry(attacker, "llm-1")
        for fields in forged_replies(json.loads(entry[b"command"])["id"], status, entry):
            attacker.xadd(envelope.REPLIES, fields)
    eventually(lambda: refusals(server, "signature") >= 10, 60, "the forgeries were read")
    assert server.only_run()["steps"][0]["undo"]["status"] == "running"
    with Job("llm-1", redis_url, KEY) as job:
        assert server.undone_run()["steps"][0]["undo"]["status"] == "done"
        assert len(job.done) == 1


def test_a_forged_command_does_not_affect_a_genuine_one(server: Server, redis_url: str, attacker: redis.Redis) -> None:
    """The job rejects an unsigned command with the genuine ID. This is not an answer to the genuine one."""
    fired = delivery("LossSpike", "llm-1")
    with Job("llm-1", redis_url, KEY) as job:
        job.hold()
        assert decision(server, fired) == "started"
        command = only_command(attacker, "llm-1")
        for params in ({"factor": 0.5}, {"factor": 0.001}):
            raw = json.dumps({**command, "params": params}).encode()
            attacker.xadd(envelope.job_commands("llm-1"), {"command": raw})
            attacker.xadd(envelope.job_commands("llm-1"), {"command": raw, "signature": "0" * 64})
        eventually(lambda: refusals(server, "other_command") == 4, 60, "the job has refused what was forged")
        job.go_on()
        assert server.closed_run()["status"] == "succeeded"
        assert job.done == ["job.scale_lr 0.5"]


def test_a_forged_note_is_not_an_outcome(server: Server, redis_url: str, attacker: redis.Redis) -> None:
    """Even a job that has just started, without other sources, trusts neither its own note of another
    command, nor one that somebody else wrote."""
    with Job("llm-1", redis_url, KEY) as job:
        assert decision(server, delivery("LossSpike", "llm-1")) == "started"
        assert server.closed_run()["status"] == "succeeded"
        (other,) = [command_id for command_id, _ in job.effects]
    (genuine,) = [value for value in [attacker.get(f"trainmedic:memory:job:llm-1:{other}")] if value]
    made_up = json.dumps({"by": "x", "status": "applied", "output": {}}).encode()
    for number, kind in enumerate(("of another command", "unsigned", "another key", "the command itself"), 1):
        fired = delivery("LossSpike", "llm-1")
        fired["alerts"][0]["fingerprint"] = f"another-{number}"
        assert decision(server, fired) == "started"
        command_id = only_command(attacker, "llm-1")["id"]
        key = f"trainmedic:memory:job:llm-1:{command_id}"
        forged = {
            "of another command": genuine,
            "unsigned": made_up,
            "another key": Signer.of(b"made up").seal(made_up, key),
            "the command itself": as_value(attacker.xrange(envelope.job_commands("llm-1"))[0][1], b"command"),
        }
        attacker.set(key, forged[kind])
        with Job("llm-1", redis_url, KEY) as job:
            eventually(lambda: server.runs()[0]["status"] == "failed", 60, "the outcome is given up", 0.1)
            assert job.done == []
        step = server.run(server.runs()[0]["run_id"])["steps"][0]
        assert [attempt["status"] for attempt in step["attempts"]] == ["unknown"]
        assert step["undo"]["status"] in ("armed", "running")
        attacker.delete(envelope.job_commands("llm-1"))


@pytest.mark.long
def test_a_forged_rival_does_not_stop_an_agent(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver], server: Server, attacker: redis.Redis
) -> None:
    """The agent continues to execute commands, and writes its own presence again."""
    driver = make_driver(1)
    signer = Signer.of(identity_key(KEY.encode(), job_identity("llm-1")))
    with GpuNode(tmp_path / "node", redis_url, driver) as node:
        place = [{"rank": 0, "node": "n1", "gpu": FIRST}]
        attacker.set(envelope.job_presence("llm-1"), presence("llm-1", signer, ranks=[0], placement=place))
        now = envelope.write_time(datetime.now(UTC))
        rival = {"node": "n1", "instance": "a rival", "pid": 7, "host": "elsewhere", "at": now}
        key = envelope.agent_presence("n1")
        reply = envelope.Reply("c1", "n1", envelope.APPLIED, node="n1").encode()
        own = Signer.of(identity_key(KEY.encode(), node_identity("n1")))
        genuine_reply = {b"reply": reply, b"signature": own.fields(reply)[b"signature"].encode()}
        for value in (
            json.dumps(rival).encode(),
            signer.seal(json.dumps(rival).encode(), key),
            as_value(genuine_reply, b"reply"),
        ):
            attacker.set(key, value)
            eventually(lambda: (node.presence() or {}).get("pid") != 7, 60, "the agent's next announcement")
        assert decision(server, delivery("TooHot", "llm-1")) == "started"
        assert server.closed_run()["status"] == "succeeded"
        assert driver.watts(0) == 560
        assert "a client without the signing key has written" in node.agent.log.read_text()
