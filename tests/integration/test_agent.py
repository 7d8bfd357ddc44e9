"""The node agent as a real process, over a real Redis: what it carries out, refuses, remembers and gives up."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from tests.conftest import RedisServer
from tests.support.agent_node import KEY, Node, later
from tests.support.programs import eventually
from trainmedic.wire import envelope
from trainmedic.wire.signing import Signer


@pytest.fixture
def node(tmp_path: Path, redis_url: str) -> Iterator[Node]:
    with Node(tmp_path / "node", redis_url) as running:
        yield running


def test_a_command_is_executed_and_answered(node: Node) -> None:
    """It is accepted, then answered with the executor's output; the stream is empty afterwards."""
    command = node.send(node.command("gpu.power_limit"))
    reply = node.final(command)
    assert (reply.status, reply.output, reply.sender, reply.rank) == (
        envelope.APPLIED,
        {"watts": 320.0, "resumed": False},
        "n1",
        None,
    )
    assert [one.status for one in node.replies(command.id)] == [envelope.ACCEPTED, envelope.APPLIED]
    assert node.notes() == [f"begin {command.id}", f"end {command.id}"]
    eventually(lambda: node.pending() == 0, 60, "an empty stream")


def test_the_presence_lists_what_the_node_offers(node: Node) -> None:
    """It states the identity, the allowed actions and the GPUs; the key expires by itself."""
    presence = node.presence()
    assert presence is not None
    assert presence["node"] == "n1"
    assert presence["actions"] == ["disk.clean", "gpu.power_limit", "node.facts"]
    assert presence["gpus"] == [{"index": 0, "uuid": "GPU-1"}]
    assert len(presence["policy"]) == 12
    assert {"host", "pid", "version", "instance", "at"} <= presence.keys()
    with redis.Redis.from_url(node.url) as client:
        assert 0 < int(client.ttl(envelope.agent_presence("n1"))) <= 30  # type: ignore[arg-type]


def test_two_agents_with_one_name_get_no_commands(node: Node) -> None:
    """A copied setting must not cap a GPU of the wrong node; earlier caps are still reverted."""
    cap = node.send(node.command("gpu.power_limit"))
    node.final(cap)
    now = envelope.write_time(envelope.utc_now())
    other = {"node": "n1", "instance": "another", "pid": 7, "host": "other-host", "at": now}
    with redis.Redis.from_url(node.url) as client:
        sealed = Signer.of(KEY.encode()).seal(json.dumps(other).encode(), envelope.agent_presence("n1"))
        client.set(envelope.agent_presence("n1"), sealed, ex=30)
    eventually(lambda: (node.presence() or {}).get("pid") != 7, 60, "the agent's next announcement")
    status, output = node.do("gpu.power_limit")
    assert status == envelope.FAILED
    assert "process 7 on 'other-host'" in output["reason"]
    assert node.do("gpu.power_limit", undo_of=cap.id, restore=True)[0] == envelope.APPLIED
    assert sum("another agent has the name n1 too" in line for line in node.agent.log.read_text().splitlines()) == 1


def test_a_repeated_command_is_answered_and_not_executed_again(node: Node) -> None:
    """The repeat comes at once, while the command runs, or after a restart of the agent."""
    command = node.command("gpu.power_limit", seconds=0.3)
    node.send(command)
    node.noted(f"begin {command.id}")
    node.send(command)
    first = node.final(command)
    node.send(command)
    assert node.final(command, nth=2).output == first.output
    node.kill()
    node.start()
    node.send(command)
    third = node.final(command, nth=3)
    assert (third.status, third.output, third.at) == (first.status, first.output, first.at)
    assert node.notes() == [f"begin {command.id}", f"end {command.id}"]


def test_an_interrupted_command_is_resumed(node: Node) -> None:
    """The agent is killed during a command; the next process finishes it and knows of the first attempt."""
    command = node.send(node.command("gpu.power_limit", seconds=0.5))
    node.noted(f"begin {command.id}")
    node.kill()
    node.start()
    reply = node.final(command)
    assert (reply.status, reply.output["resumed"]) == (envelope.APPLIED, True)
    assert node.notes() == [f"begin {command.id}", f"begin {command.id} resumed", f"end {command.id} resumed"]


def test_an_interrupted_and_expired_command_is_reverted(node: Node) -> None:
    """It is too late to finish it: none of it stays active, and the answer is that it was not applied. The same
    command can come again with more time."""
    command = node.send(node.command("gpu.power_limit", lasting=0.7, seconds=5))
    node.noted(f"begin {command.id}")
    eventually(lambda: node.pending() == 0, 60, "the answer that it is accepted")  # else the command comes again
    node.kill()
    time.sleep(0.7)
    node.start()
    assert node.final(command).status == envelope.EXPIRED
    assert node.notes() == [f"begin {command.id}", f"abandon {command.id} resumed"]
    again = node.send(replace(later(command, 30), params={}))
    assert node.final(again, nth=2).status == envelope.APPLIED


def test_only_genuine_timely_and_allowed_commands_are_executed(node: Node) -> None:
    """Each refusal has its status and gives the reason; none leaves a trace."""

    def outcome(command: envelope.Command, key: str | None = KEY) -> tuple[str, str]:
        reply = node.final(node.send(command, key))
        return reply.status, str(reply.output["reason"])

    cap = "gpu.power_limit"
    assert outcome(node.command(cap), None) == (
        envelope.REJECTED,
        "the command is not signed, and a signing key is in use here",
    )
    assert outcome(node.command(cap), "another key") == (envelope.REJECTED, "the command has a wrong signature")
    elsewhere = replace(node.command(cap), target={"kind": "node", "node": "n2"})
    assert outcome(elsewhere) == (envelope.REJECTED, "the command is for another node")
    assert outcome(node.command(cap, lasting=-1))[0] == envelope.EXPIRED
    assert outcome(node.command("gpu.power_limits")) == (
        envelope.UNSUPPORTED,
        "this agent does not know gpu.power_limits; did you mean 'gpu.power_limit'?",
    )
    assert node.notes() == []


def test_an_unreadable_message_is_skipped(node: Node) -> None:
    """The messages after it are processed."""
    with redis.Redis.from_url(node.url) as client:
        client.xadd(envelope.node_commands("n1"), {"command": b"{"})
        client.xadd(envelope.node_commands("n1"), {"command": b'{"v": 2}'})
        client.xadd(envelope.node_commands("n1"), {"command": b"x" * 300_000})
    assert node.do("node.facts")[0] == envelope.APPLIED
    eventually(lambda: node.pending() == 0, 60, "an empty stream")


def test_without_a_policy_the_agent_only_reads(tmp_path: Path, redis_url: str) -> None:
    """Reads are answered, changes are rejected, and the reply names what is missing."""
    with Node(tmp_path / "node", redis_url, policy=None) as node:
        assert node.do("node.facts") == (envelope.APPLIED, {"load": 1.0})
        status, output = node.do("gpu.power_limit")
        assert (status, node.notes()) == (envelope.REJECTED, [])
        assert output["reason"].endswith("no policy file, so it only reads")


def test_the_policy_that_forbids_a_command_is_named(tmp_path: Path, redis_url: str) -> None:
    """The reply has its path, so that readers of the history know where to look."""
    with Node(tmp_path / "node", redis_url, policy="allow: [disk.clean]") as node:
        status, output = node.do("gpu.power_limit")
        assert status == envelope.REJECTED
        assert str(tmp_path / "node" / "policy.yaml") in output["reason"]


def test_failures_are_answered_with_the_known_details(node: Node) -> None:
    """One failure is reported by the executor, one was unforeseen; the worker queue continues."""
    assert node.do("gpu.power_limit", fail=True) == (envelope.FAILED, {"reason": "as it was told", "watts": 1})
    reason = "ZeroDivisionError: division by zero; it may have had an effect"
    assert node.do("node.facts", divisor=0) == (envelope.FAILED, {"reason": reason, "may_be_done": True})
    assert node.do("node.facts")[0] == envelope.APPLIED


def test_an_undo_of_an_unapplied_command_blocks_it(node: Node) -> None:
    """The undo succeeds without work, and the late command is rejected, also after a restart."""
    late = node.command("gpu.power_limit")
    assert node.do("gpu.power_limit", undo_of=late.id, restore=True) == (
        envelope.APPLIED,
        {"nothing_to_undo": True, "known": "never_applied"},
    )
    node.kill()
    node.start()
    node.send(late)
    assert node.final(late).status == envelope.REJECTED
    assert node.notes() == []


def test_an_agent_that_lost_its_journal_does_not_claim_nothing_to_undo(node: Node) -> None:
    """The card may still be capped. The agent knows of later commands, including those it never received."""
    cap = node.send(node.command("gpu.power_limit"))
    assert node.final(cap).status == envelope.APPLIED
    node.kill()
    shutil.rmtree(node.state)
    node.start()
    status, output = node.do("gpu.power_limit", undo_of=cap.id, restore=True)
    assert status == envelope.FAILED
    assert "the agent on node 'n1' does not know the command" in output["reason"]
    unsent = node.command("gpu.power_limit")
    assert node.do("gpu.power_limit", undo_of=unsent.id, restore=True)[1]["known"] == "never_applied"
    assert node.do("gpu.power_limit", undo_of="no-id-of-a-server", restore=True)[0] == envelope.FAILED


def test_an_undo_waits_for_its_command(node: Node) -> None:
    """Sent while the command is still running, the undo is executed after it."""
    first = node.send(node.command("gpu.power_limit", seconds=0.3))
    undo = node.send(node.command("gpu.power_limit", undo_of=first.id, restore=True))
    assert node.final(undo).status == envelope.APPLIED
    assert node.notes() == [f"begin {first.id}", f"end {first.id}", f"undo {undo.id}", f"end {undo.id}"]


def test_a_stricter_policy_does_not_block_an_undo(node: Node) -> None:
    """Changes made under the old policy are reverted under the new one."""
    first = node.send(node.command("gpu.power_limit"))
    assert node.final(first).status == envelope.APPLIED
    node.agent.end()
    (node.directory / "policy.yaml").write_text("allow: [disk.clean]")
    node.start()
    assert node.do("gpu.power_limit")[0] == envelope.REJECTED
    assert node.do("gpu.power_limit", undo_of=first.id, restore=True)[0] == envelope.APPLIED


def test_a_long_cleanup_does_not_delay_a_cap(node: Node) -> None:
    """Each worker queue has a thread of its own."""
    cleanup = node.send(node.command("disk.clean", seconds=20))
    node.noted(f"begin {cleanup.id}")
    assert node.do("gpu.power_limit")[0] == envelope.APPLIED
    assert f"end {cleanup.id}" not in node.notes()


def test_sigterm_leaves_nothing_half_done(node: Node) -> None:
    """It ends within seconds: commands finish or are resumed by the next process; the presence is removed."""
    cap = node.send(node.command("gpu.power_limit", seconds=0.5))
    cleanup = node.send(node.command("disk.clean", seconds=60, lasting=120))
    waiting = node.send(node.command("disk.clean"))
    node.noted(f"begin {cap.id}")
    node.noted(f"begin {cleanup.id}")
    eventually(lambda: node.replies(waiting.id), 60, "all are taken")
    assert node.agent.end() == 0  # it is killed where it takes long
    assert node.final(cap).status == envelope.APPLIED
    assert node.presence() is None
    assert [one.status for one in node.replies(cleanup.id)] == [envelope.ACCEPTED]
    node.start()
    assert node.final(cleanup).status == envelope.APPLIED
    assert node.final(waiting).status == envelope.APPLIED
    ends = [line for line in node.notes() if line.startswith("end")]
    assert ends == [f"end {cap.id}", f"end {cleanup.id} resumed", f"end {waiting.id} resumed"]


def test_a_second_signal_ends_it_at_once(node: Node) -> None:
    """This works even if an executor does not end."""
    command = node.send(node.command("gpu.power_limit", seconds=30))
    node.noted(f"begin {command.id}")
    process = node.agent.process
    process.terminate()
    eventually(lambda: '"stopping"' in node.agent.log.read_text(), 60, "the log of the first signal", every=0.01)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("keeps_its_data", [True, False])
def test_a_failure_of_redis_stops_nothing(tmp_path: Path, own_redis: type[RedisServer], keeps_its_data: bool) -> None:
    """A started command is finished; its reply waits in the journal, even over a restart, and arrives when
    Redis is back; a repeat is not done again, although Redis may have forgotten everything."""
    data = tmp_path / "redis"
    data.mkdir()
    server = own_redis(data)
    server.start()
    with Node(tmp_path / "node", server.url) as node:
        command = node.send(node.command("gpu.power_limit", seconds=0.4))
        node.noted(f"begin {command.id}")
        server.kill()
        if not keeps_its_data:
            shutil.rmtree(data)
            data.mkdir()
        node.recorded(command, envelope.APPLIED)
        node.kill()
        node.start(wait=False)
        log = node.agent.log
        eventually(lambda: "no connection to Redis" in log.read_text(), 60, "word that Redis is away", every=0.02)
        server.start()
        assert node.final(command).status == envelope.APPLIED
        node.send(command)
        assert node.final(command, nth=2).status == envelope.APPLIED
        assert node.notes() == [f"begin {command.id}", f"end {command.id}"]
        assert log.read_text().count("no connection to Redis") == 1
        assert "connected to Redis again" in log.read_text()


def test_an_agent_that_cannot_write_its_journal_does_not_act(node: Node) -> None:
    """During this time each command fails with the reason; afterwards the agent continues."""
    pid = node.agent.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    status, output = node.do("gpu.power_limit")
    assert (status, node.notes()) == (envelope.FAILED, [])
    assert "agent.db cannot be used" in output["reason"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert node.do("gpu.power_limit")[0] == envelope.APPLIED
