"""The users of the chart's Redis, with the real server: real jobs and agents work under them, and can do no more."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.helm import charts
from tests.helm.chart_redis import ChartRedis
from tests.support import doc_pages
from tests.support.agent_node import KEY, Node
from tests.support.live import Job, Server
from tests.support.messages import delivery, make_command, resolved
from tests.support.programs import Program, eventually, free_port, system_path
from trainmedic.wire import envelope
from trainmedic.wire.signing import Signer, identity_key, job_identity, node_identity

VALUES = {"redis": {"users": {"jobs": ["llm-1", "llm-2"]}}}
PLAYBOOK = """
playbook: slow-down
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, undo: on_resolve}
  - {wait_for: resolved, timeout: 1h}
"""


@pytest.fixture
def chart_redis(tmp_path: Path) -> Iterator[ChartRedis]:
    with ChartRedis(tmp_path / "redis", VALUES) as made:
        yield made


def job(url: str) -> Job:
    """The job llm-1 with the key of its own identity, as a tenant has it."""
    return Job("llm-1", url, identity_key(KEY.encode(), job_identity("llm-1")).decode())


def start_agent(node: Node, url: str, wait: bool = True) -> None:
    """The agent under the URL that its pod has, with the key of its own identity; the test's part is the server's."""
    node.start("--redis", url, wait=wait, TRAINMEDIC_SIGNING_KEY=key_of(node))


def key_of(node: Node) -> str:
    return identity_key(KEY.encode(), node_identity(node.name)).decode()


def test_the_server_can_use_our_keys_but_not_administer_redis(chart_redis: ChartRedis) -> None:
    """With the server's password our keys can be used; scripts, other keys and administration are refused."""
    with chart_redis.client() as client:
        client.xadd(envelope.REPLIES, {"a": "b"})
        for refused in (["CONFIG", "GET", "*"], ["EVAL", "return 1", "0"], ["SET", "other", "1"], ["FLUSHALL"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*refused)
    assert (chart_redis.directory / "run" / "users.conf").stat().st_mode & 0o077 == 0


def test_a_job_works_with_its_own_user(chart_redis: ChartRedis, tmp_path: Path) -> None:
    """Command, undo, a Redis that is killed in between, and the next process of the job: with a real server and the
    key of the job alone; and Redis has refused nothing."""
    server = Server(tmp_path / "server", PLAYBOOK, "--redis", chart_redis.url())
    server.start(TRAINMEDIC_SIGNING_KEY=KEY)
    with chart_redis.client() as client:
        with contextlib.ExitStack() as ended, job(chart_redis.url("job-llm-1")) as training:
            ended.callback(server.stop)
            fired = delivery("Spike", "llm-1")
            assert server.ask("/webhook", fired).status == 200
            eventually(lambda: training.done == ["job.scale_lr 0.5"], 60, "the command", 0.02)
            eventually(lambda: server.only_run()["waiting_on"] == "resolved", 60, "its answer", 0.05)
            assert chart_redis.refused() == set()
            chart_redis.kill()
            chart_redis.start()
            assert server.ask("/webhook", resolved(fired)).status == 200
            assert server.undone_run()["steps"][0]["undo"]["status"] == "done"
            (applied, _), _ = training.effects
        assert client.exists(envelope.job_presence("llm-1")) == 0
        with job(chart_redis.url("job-llm-1")) as training:
            again, new = make_command(id=applied), make_command()
            for command in (again, new):
                raw = command.encode()
                client.xadd(
                    envelope.job_commands("llm-1"),
                    {"command": raw, **Signer.of(KEY.encode()).fields(raw, job_identity("llm-1"))},
                )
            assert client.exists("trainmedic:memory-since:job:llm-1"), "the job knows since when Redis remembers"
            eventually(lambda: client.xlen(envelope.job_commands("llm-1")) == 0, 60, "both are answered", 0.02)
            assert [each for each, _ in training.effects] == [new.id], "the first was remembered in Redis"
    assert chart_redis.refused() == set()


def test_an_agent_works_with_the_agents_user(chart_redis: ChartRedis, tmp_path: Path) -> None:
    """Command, undo, a Redis kill in between, and the agent's next process; Redis refuses nothing."""
    node = Node(tmp_path / "node", chart_redis.url())
    key = key_of(node)
    try:
        start_agent(node, chart_redis.url("agent"))
        capped = node.send(node.command("gpu.power_limit"), key)
        assert node.final(capped).status == envelope.APPLIED
        chart_redis.kill()
        chart_redis.start()
        undo = node.send(node.command("gpu.power_limit", undo_of=capped.id), key)
        assert node.final(undo).status == envelope.APPLIED
        node.agent.end()
        start_agent(node, chart_redis.url("agent"))
        node.send(capped, key)
        assert node.final(capped, nth=2).status == envelope.APPLIED
        assert [line.split()[0] for line in node.notes()] == ["begin", "end", "undo", "end"]
        eventually(lambda: node.pending() == 0, 60, "every command taken off the stream")
    finally:
        node.agent.end()
    assert chart_redis.refused() == set()


def test_the_documented_users_match_the_charts(chart_redis: ChartRedis) -> None:
    """docs/how-to/redis.md shows the chart's rules, with the server as `server`; but a node's agent is confined
    to this node there."""
    charts_own = dict(line.split(" ", 1) for line in (chart_redis.directory / "etc" / "users").read_text().splitlines())
    documented = {}
    for line in documented_users().splitlines()[1:]:
        user, rules = re.fullmatch(r"user (\S+) on >password-of-\S+ (.+)", line).groups()  # type: ignore[union-attr]
        documented[user] = rules
    assert documented.keys() == {"server", "agent-gpu-1", "job-llm-1"}
    assert documented["server"] == charts_own["default"]
    assert documented["job-llm-1"] == charts_own["job-llm-1"]
    assert documented["agent-gpu-1"].replace("gpu-1", "*") == charts_own["agent"]


def documented_users() -> str:
    page = (charts.ROOT / "docs" / "how-to" / "redis.md").read_text()
    (block,) = [block for block in doc_pages.blocks(page) if block.option("file") == "users.acl"]
    return block.body


def test_an_agent_works_with_the_documented_user_of_its_node(tmp_path: Path) -> None:
    """The server works next to it; another node's keys are refused."""
    (tmp_path / "users.acl").write_text(documented_users())
    port = free_port()
    options = ("--bind", "127.0.0.1", "--port", str(port), "--save", "", "--aclfile", "users.acl")
    login = f"@127.0.0.1:{port}/0"
    with Program(["redis-server", *options], tmp_path / "redis.log", {"PATH": system_path()}):
        node = Node(tmp_path / "node", f"redis://server:password-of-the-server{login}", name="gpu-1")
        agent_url = f"redis://agent-gpu-1:password-of-gpu-1{login}"
        start_agent(node, agent_url, wait=False)
        try:
            eventually(lambda: has_started(node), 60, "the agent's presence")
            command = node.send(node.command("gpu.power_limit"), key_of(node))
            assert node.final(command).status == envelope.APPLIED
        finally:
            node.agent.end()
        with redis.Redis.from_url(agent_url) as client:
            assert [attempt for attempt in others("node:gpu-2") if is_allowed(client, attempt)] == []


def has_started(node: Node) -> bool:
    """Whether the agent is there, and Redis as well."""
    try:
        return node.presence() is not None
    except redis.exceptions.ConnectionError:
        return False


def test_clients_from_before_an_upgrade_continue_to_work(tmp_path: Path) -> None:
    """A job and an agent with the server's password work on when Redis gets its users, and after it; an agent of the
    new release that is started first waits until Redis knows its user."""
    kept = {"own": {"password": "of-the-server"}}
    before = {"redis": {"existingSecret": "own"}}
    after = {"redis": {"existingSecret": "own", "users": {"existingSecret": "users", "jobs": ["llm-1"]}}}
    old, new = Node(tmp_path / "old", "", name="old"), Node(tmp_path / "new", "", name="new")
    with ChartRedis(tmp_path / "redis", before, kept) as chart_redis:
        assert chart_redis.passwords.keys() == {"default"}
        old.url = new.url = chart_redis.url()
        with contextlib.ExitStack() as started:
            start_agent(old, chart_redis.url())
            started.callback(old.agent.end)
            training = started.enter_context(job(chart_redis.url()))
            start_agent(new, f"redis://agent:of-the-agents@127.0.0.1:{chart_redis.port}/0", wait=False)
            started.callback(new.agent.end)
            eventually(lambda: "no connection to Redis" in new.agent.tail(), 60, "the new agent is refused")
            kept["users"] = {"agent": "of-the-agents", "job-llm-1": "of-the-job"}
            chart_redis.lay_out(charts.parsed(charts.rendered(after)), kept)
            chart_redis.restart()
            for node in (old, new):
                eventually(node.presence, 60, f"the {node.name} agent is there")
                command = node.send(node.command("gpu.power_limit"), key_of(node))
                assert node.final(command).status == envelope.APPLIED
            assert training.done == []
            with chart_redis.client() as client:
                eventually(lambda: client.exists(envelope.job_presence("llm-1")), 60, "the job is there")


def test_a_user_without_a_password_blocks_no_other_user(tmp_path: Path) -> None:
    """A job whose password is missing from its user's Secret cannot log in; the others can. Without the
    server's password Redis does not start, for its user would need none."""
    values = {"redis": {"users": {"existingSecret": "users", "jobs": ["llm-1"]}}}
    with ChartRedis(tmp_path / "a", values, {"users": {"agent": "of-the-agents"}}) as chart_redis:
        assert chart_redis.client("agent").ping()
        for password in ("", "of-the-agents"):
            with pytest.raises(redis.exceptions.AuthenticationError):
                login(chart_redis, "job-llm-1", password)
        assert chart_redis.program
        assert "job-llm-1 cannot log in" in chart_redis.program.tail()
    own = {"redis": {"existingSecret": "own"}}
    with (
        pytest.raises(AssertionError, match="none under the key password"),
        ChartRedis(tmp_path / "b", own, {"own": {"password": ""}}),
    ):
        pass


ADMINISTRATION = [
    ["ACL", "LIST"],
    ["ACL", "WHOAMI"],
    ["CLIENT", "LIST"],
    ["CLIENT", "KILL", "TYPE", "normal"],
    ["CONFIG", "GET", "*"],
    ["DBSIZE"],
    ["EVAL", "return 1", "0"],
    ["FLUSHALL"],
    ["FLUSHDB"],
    ["FUNCTION", "LIST"],
    ["KEYS", "*"],
    ["MONITOR"],
    ["PUBLISH", "trainmedic", "x"],
    ["RANDOMKEY"],
    ["REPLICAOF", "127.0.0.1", "1"],
    ["SAVE"],
    ["SCAN", "0"],
    ["SHUTDOWN", "NOSAVE"],
    ["SUBSCRIBE", "trainmedic"],
    ["SWAPDB", "0", "1"],
]
REPLIES = [
    ["XRANGE", "trainmedic:replies", "-", "+"],
    ["XREAD", "STREAMS", "trainmedic:replies", "0"],
    ["XREADGROUP", "GROUP", "trainmedic", "x", "STREAMS", "trainmedic:replies", ">"],
    ["XLEN", "trainmedic:replies"],
    ["XINFO", "STREAM", "trainmedic:replies"],
    ["XTRIM", "trainmedic:replies", "MAXLEN", "0"],
    ["XDEL", "trainmedic:replies", "1-1"],
    ["XACK", "trainmedic:replies", "trainmedic", "1-1"],
    ["XGROUP", "CREATE", "trainmedic:replies", "x", "0"],
    ["XGROUP", "DESTROY", "trainmedic:replies", "trainmedic"],
    ["DEL", "trainmedic:replies"],
    ["EXPIRE", "trainmedic:replies", "1"],
    ["SET", "trainmedic:replies", "x"],
    ["COPY", "trainmedic:replies", "trainmedic:job:llm-1"],
    ["RENAME", "trainmedic:replies", "trainmedic:job:llm-1"],
]


def others(whose: str) -> list[list[str]]:
    """What somebody could do to the keys of a job or node, such as ``job:llm-2``."""
    kind, name = whose.split(":", 1)
    stream = f"trainmedic:commands:{whose}"
    presence = f"trainmedic:{kind.replace('node', 'agent')}:{name}"
    memory = (f"trainmedic:memory:{whose}:c1", f"trainmedic:memory-since:{whose}")
    made = [
        ["XADD", stream, "*", "command", "{}"],
        ["XRANGE", stream, "-", "+"],
        ["XGROUP", "CREATE", stream, "trainmedic", "0", "MKSTREAM"],
        ["XREADGROUP", "GROUP", "trainmedic", "x", "STREAMS", stream, ">"],
        ["XACK", stream, "trainmedic", "1-1"],
        ["XDEL", stream, "1-1"],
        ["XADD", presence, "*", "command", "{}"],
    ]
    for key in (stream, presence, *memory):
        made += [["GET", key], ["GETRANGE", key, "0", "-1"], ["SET", key, "x"], ["DEL", key], ["EXPIRE", key, "1"]]
    return [*made, ["DUMP", presence], ["TYPE", presence], ["EXISTS", presence]]


@pytest.mark.parametrize(
    ("user", "whose"),
    [
        ("job-llm-1", ["job:llm-2", "job:llm-11", "job:llm", "job:*", "node:n1"]),
        ("agent", ["job:llm-1", "job:n1"]),
    ],
)
def test_a_user_is_limited_to_its_own_keys(chart_redis: ChartRedis, user: str, whose: list[str]) -> None:
    """It cannot access other users' streams, presence or memory, read replies, or administer."""
    attempts = [*ADMINISTRATION, *REPLIES, *(attempt for each in whose for attempt in others(each))]
    # To its own streams only the server writes.
    attempts += [["XADD", f"trainmedic:commands:{own}", "*", "command", "{}"] for own in ("job:llm-1", "node:n1")]
    with chart_redis.client() as server, chart_redis.client(user) as client:
        entry = server.xadd(envelope.REPLIES, {"reply": "{}"})
        server.set(envelope.job_presence("llm-2"), "{}")
        assert [attempt for attempt in attempts if is_allowed(client, attempt)] == []
        with client.pipeline(transaction=True) as pipeline:
            pipeline.get(envelope.job_presence("llm-2"))
            with pytest.raises(redis.exceptions.NoPermissionError):
                pipeline.execute()
        entries: Any = server.xrange(envelope.REPLIES)
        assert [one for one, _ in entries] == [entry]
        assert client.xadd(envelope.REPLIES, {"reply": "{}"})


def is_allowed(client: redis.Redis, attempt: list[str]) -> bool:
    """Whether Redis lets this user do that, whatever comes of it."""
    try:
        client.execute_command(*attempt)
    except redis.exceptions.NoPermissionError:
        return False
    except redis.exceptions.ResponseError:
        pass
    return True


LAST_ID = f"{2**64 - 1}-{2**64 - 1}"


@pytest.mark.parametrize("trimming", [[], ["MAXLEN", "0"]], ids=["as an entry", "and trimmed away"])
def test_exhausted_reply_ids_block_clients_only_briefly(
    chart_redis: ChartRedis, tmp_path: Path, trimming: list[str]
) -> None:
    """Redis then accepts no reply from any client; the server resets the ids."""
    server = Server(tmp_path / "server", PLAYBOOK, "--redis", chart_redis.url())
    with contextlib.ExitStack() as ended, chart_redis.client("job-llm-2") as tenant:
        server.start(TRAINMEDIC_SIGNING_KEY=KEY)
        ended.callback(server.stop)
        ended.enter_context(job(chart_redis.url("job-llm-1")))
        with tenant.pipeline(transaction=True) as pipeline:
            pipeline.execute_command("XADD", envelope.REPLIES, *trimming, LAST_ID, "reply", "{}")
            pipeline.xadd(envelope.REPLIES, {"reply": "{}"})
            with pytest.raises(redis.exceptions.ResponseError, match="exhausted"):
                pipeline.execute()
        assert server.ask("/webhook", delivery("Spike", "llm-1")).status == 200
        eventually(lambda: server.only_run()["waiting_on"] == "resolved", 60, "the reply of llm-1", 0.1)
        assert server.only_run()["steps"][0]["status"] == "succeeded"


def test_a_password_is_valid_only_for_its_user(chart_redis: ChartRedis) -> None:
    """No user logs in with the password of another, or without one."""
    passwords = {"": "", **chart_redis.passwords}
    assert len(set(passwords.values())) == 5
    for user in chart_redis.passwords:
        login(chart_redis, user, passwords[user])
        for owner in passwords.keys() - {user}:
            with pytest.raises(redis.exceptions.AuthenticationError):
                login(chart_redis, user, passwords[owner])


def login(chart_redis: ChartRedis, user: str, password: str) -> None:
    client = redis.Redis(port=chart_redis.port, username=user, password=password, retry=Retry(NoBackoff(), 0))
    with contextlib.closing(client):
        client.ping()
