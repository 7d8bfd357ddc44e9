"""Findings from Redis to alerts: a real server, a real Redis, and a real Alertmanager."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from msgspec.structs import replace

from tests.support import programs
from tests.support.findings import GPU, of_kernel, of_training, told
from tests.support.live import Job, Server
from tests.support.programs import PYTHON_PATH, eventually
from trainmedic.wire import envelope, findings
from trainmedic.wire.findings import RulesNotice
from trainmedic.wire.signing import Signer, identity_key, node_identity
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.lines.rule import RuleSet

KEY = "a shared key of the tests"
RUNBOOKS = "https://git.example.org/docs/on-call.md"
PLAYBOOKS = """
playbook: drain-node
on: {alert: [GPUXidLogged, TrainingOutOfMemory]}
mode: observe
target: node
steps: [{id: tell, action: notify, with: {message: "look at {{ target.node }}"}}]
---
log_rule: gpu-xid
source: kernel
contains: ["NVRM: Xid ("]
match: ['NVRM: Xid \\(PCI:(?P<pci>[0-9a-fA-F:.]{7,16})\\): (?P<xid>\\d{1,3})']
role: root
cause: gpu
target: gpu
gpu: "{{ fields.pci }}"
alert: {name: GPUXidLogged, severity: critical, component: gpu, labels: {xid: "{{ fields.xid }}"}, until: boot}
---
log_rule: cuda-oom
source: training
contains: ["CUDA out of memory"]
match: ['CUDA out of memory']
role: root
cause: gpu_memory
target: job
alert: {name: TrainingOutOfMemory, severity: warning, component: training, until: 10m}
"""


class FindingSender:
    """The agents of nodes, as far as they tell findings and read rules."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url)

    def present(self, node: str) -> None:
        """Say that the node's agent is there."""
        key, at = envelope.agent_presence(node), envelope.write_time(datetime.now(UTC))
        raw = json.dumps({"node": node, "at": at}).encode()
        self.client.set(key, Signer.of(KEY.encode()).seal(raw, key), ex=30)

    def tell(self, update: FindingUpdate, key: bytes | None = None) -> None:
        """Put an update into the stream, signed by the node's own key or by another."""
        raw = finding_codec.encode(update)
        signer = Signer.of(key or identity_key(KEY.encode(), node_identity(update.node)))
        self.client.xadd(findings.FINDINGS, {findings.FIELD: raw, **signer.fields(raw)})  # type: ignore[dict-item]

    def waiting(self) -> int:
        return int(self.client.xlen(findings.FINDINGS))

    def rules(self, node: str) -> RuleSet | None:
        """The rules as the node's agent believes them, with its own key alone."""
        value, raw = self.client.get(findings.notice_of_rules(node)), self.client.get(findings.RULES)
        if value is None or raw is None:
            return None
        own = Signer.of(identity_key(KEY.encode(), node_identity(node)))
        notice = RulesNotice.decode(value, node, own)
        return RuleSet.decode(raw) if notice.is_of(raw) else None


@pytest.fixture
def sender(redis_url: str) -> Iterator[FindingSender]:
    made = FindingSender(redis_url)
    yield made
    made.client.close()


def serve(tmp_path: Path, redis_url: str, *options: str) -> Server:
    empty = tmp_path / "no rules"
    empty.mkdir(exist_ok=True)
    return Server(
        tmp_path / "server",
        PLAYBOOKS.strip(),
        *("--redis", redis_url, "--log-rules", str(empty), *options),
        environment={"TRAINMEDIC_SIGNING_KEY": KEY},
    )


@pytest.fixture
def server(tmp_path: Path, redis_url: str) -> Iterator[Server]:
    serving = serve(tmp_path, redis_url)
    with serving:
        yield serving


def shown(server: Server, query: str = "") -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = server.ask(f"/findings?{query}").body["items"]
    return items


def xid(node: str = "node-2", **members: Any) -> FindingUpdate:
    finding = of_kernel("gpu-xid", node, datetime.now(UTC), GPU, labels={"xid": "79"}, fields={"xid": "79"})
    return told(replace(finding, **members), lines=["kernel: quiet", "NVRM: Xid 79", "kernel: quiet again"])


def cli(server: Server, *argv: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "trainmedic_server", *argv, "--server", f"http://127.0.0.1:{server.port}"],
        env={"PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_finding_becomes_an_alert_and_a_run_that_shows_its_lines(server: Server, sender: FindingSender) -> None:
    """Without an Alertmanager the intake takes it; the stream is then empty, and the CLI shows the course."""
    sender.tell(xid())
    run = eventually(server.runs, 60, "a run")[0]
    assert (run["alert_name"], run["status"], run["node"]) == ("GPUXidLogged", "observed", "node-2")
    eventually(lambda: sender.waiting() == 0, 60, "the stream is empty")
    [item] = shown(server, "node=node-2&rule=gpu-xid&role=root&since=1h&suspected=false")
    assert item["alert"]["labels"]["UUID"] == GPU
    [behind] = server.run(run["run_id"])["findings"]
    assert behind["id"] == item["id"]
    assert behind["excerpt"]["lines"][1] == "NVRM: Xid 79"
    assert "NVRM: Xid 79" in cli(server, "history", "show", run["run_id"])
    assert item["id"] in cli(server, "findings", "--node", "node-2")
    story = cli(server, "findings", "show", item["id"])
    assert "> NVRM: Xid 79" in story
    assert "alertname=GPUXidLogged" in story


def test_a_finding_not_signed_by_its_node_is_rejected(server: Server, sender: FindingSender) -> None:
    """Unsigned, foreign and malformed messages are counted and removed from the stream."""
    sender.tell(xid(), b"made up")
    sender.tell(xid(), identity_key(KEY.encode(), node_identity("node-1")))
    sender.client.xadd(findings.FINDINGS, {findings.FIELD: b"{}"})
    sender.client.xadd(findings.FINDINGS, {b"other": b"\xff" * 100})
    sender.client.xadd(findings.FINDINGS, {findings.FIELD: b"x" * (findings.LARGEST_UPDATE + 1)})
    eventually(lambda: sender.waiting() == 0, 60, "the stream is empty")
    assert shown(server) == []
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        metrics = answer.read().decode()
    assert 'trainmedic_refused_messages_total{reason="signature"} 2.0' in metrics
    assert 'trainmedic_refused_messages_total{reason="unreadable"} 3.0' in metrics


def test_a_stream_with_exhausted_ids_is_restarted(server: Server, sender: FindingSender) -> None:
    """One entry with the greatest ID would prevent every agent from reporting."""
    sender.client.xadd(findings.FINDINGS, {b"a": b"b"}, id=f"{2**64 - 1}-{2**64 - 1}")

    def tell() -> bool:
        try:
            sender.tell(xid())
        except redis.ResponseError:
            return False
        return True

    eventually(tell, 60, "the stream takes entries again")
    (item,) = eventually(lambda: shown(server), 60, "a finding")
    assert item["rule"] == "gpu-xid"


def test_a_connected_job_is_trusted(server: Server, sender: FindingSender, redis_url: str) -> None:
    """Its signed presence contains its placement."""
    with Job("llm-1", redis_url, KEY):
        (item,) = eventually(lambda: server.ask("/jobs").body["items"], 60, "the job is known")
        node = item["nodes"][0]
        time.sleep(6)  # the presences are read every five seconds
        sender.tell(told(of_training("cuda-oom", node, "llm-1", 0, datetime.now(UTC))))
        sender.tell(told(of_training("cuda-oom", "node-9", "llm-1", 0, datetime.now(UTC))))
        items = eventually(lambda: (found := shown(server)) and len(found) == 2 and found, 60, "two findings")
    assert {item["target"] for item in items} == {"job:llm-1", "node:node-9"}

    def of_unknown() -> dict[str, Any] | None:
        return next((run for run in server.runs() if run["alert_labels"].get("seen_on") == "node-9"), None)

    run = eventually(of_unknown, 60, "a run for each")
    assert run["decision"] == "target_unknown"


def test_agents_receive_the_rules_and_their_changes(server: Server, sender: FindingSender) -> None:
    """The rule files are next to the playbooks; a node reads them with its own key; /ready reports a faulty file."""
    sender.present("node-1")
    rules = eventually(lambda: sender.rules("node-1"), 60, "rules")
    assert set(rules.by_name) == {"gpu-xid", "cuda-oom"}
    assert server.ask("/ready").body["log_rules"] == {"ok": True, "detail": "2 loaded", "caution": False}
    oom = server.directory / "playbooks" / "2.yaml"
    oom.write_text(oom.read_text().replace("CUDA out of memory", "OUT OF MEMORY"))
    (server.directory / "playbooks" / "3.yaml").write_text("log_rule: wrong\nsource: kernel\n")
    changed = eventually(
        lambda: (now := sender.rules("node-1")) and now.by_name["cuda-oom"] != rules.by_name["cuda-oom"] and now,
        60,
        "other rules",
    )
    assert changed.by_name["cuda-oom"].contains == ("OUT OF MEMORY",)
    ready = eventually(lambda: not (now := server.ask("/ready").body)["log_rules"]["ok"] and now, 60, "a wrong file")
    assert ready["ready"] is True
    assert "errors: see the log" in ready["log_rules"]["detail"]


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A real Alertmanager that sends to a server whose port is known later, and can be stopped and started."""
    binary = programs.alertmanagers().get("installed")
    if binary is None:
        pytest.fail("no Alertmanager is installed")
    port = programs.free_port()
    config = tmp_path / "alertmanager.yml"
    config.write_text(
        "route: {receiver: trainmedic, group_by: ['...'], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}\n"
        f"receivers: [{{name: trainmedic, webhook_configs: [{{url: 'http://127.0.0.1:{port}/webhook'}}]}}]\n"
    )
    program, url = programs.start_alertmanager(binary, config, tmp_path / "am")
    with program:
        yield {"url": url, "port": port, "binary": binary, "config": config, "directory": tmp_path / "am"}


def listed(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/api/v2/alerts") as answer:
        alerts: list[dict[str, Any]] = json.load(answer)
    return alerts


def test_through_an_alertmanager_silences_hold_and_resolutions_return(
    tmp_path: Path, redis_url: str, sender: FindingSender, alertmanager: dict[str, Any]
) -> None:
    """The alert returns by the webhook like any other; a silenced one does not."""
    server = serve(tmp_path, redis_url, "--alertmanager", alertmanager["url"], "--runbook-url", RUNBOOKS)
    server.argv[server.argv.index("--port") + 1] = str(alertmanager["port"])
    server.port = alertmanager["port"]
    silence = {
        "matchers": [{"name": "node", "value": "node-3", "isRegex": False}],
        "startsAt": "2026-01-01T00:00:00Z",
        "endsAt": "2099-01-01T00:00:00Z",
        "createdBy": "test",
        "comment": "quiet",
    }
    request = urllib.request.Request(
        f"{alertmanager['url']}/api/v2/silences", json.dumps(silence).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).close()
    with server:
        first = xid()
        sender.tell(first)
        sender.tell(xid("node-3"))
        [run] = eventually(server.runs, 60, "a run")
        assert run["node"] == "node-2"
        alerts = eventually(
            lambda: len(found := listed(alertmanager["url"])) == 2 and found, 60, "both alerts are there"
        )
        assert {alert["labels"]["node"]: alert["status"]["state"] for alert in alerts} == {
            "node-2": "active",
            "node-3": "suppressed",
        }
        assert {alert["annotations"]["runbook_url"] for alert in alerts} == {f"{RUNBOOKS}#alerts-from-logs"}
        [behind] = server.run(run["run_id"])["findings"]
        assert behind["excerpt"]["at"] == 1
        sender.tell(replace(first, finding=replace(first.finding, is_over=True)))
        resolved = lambda: server.run(run["run_id"])["alerts"][0]["status"] == "resolved"  # noqa: E731
        eventually(resolved, 60, "the alert has resolved")
        assert [len(server.run(each["run_id"])["alerts"]) for each in server.runs()] == [1]
