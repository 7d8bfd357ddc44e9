"""Protection of the run: ``trainmedic serve`` with its Redis, Prometheus and Alertmanager, as shipped.

Rules, playbooks and both configurations are those of the checkout; only their durations, and Prometheus's repeat
interval, are divided by one factor, and the addresses are free ports. Expressions, thresholds, labels and numbers of
steps stay. See `_playbooks` for further changes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.unattended.trees import HERE, Tree
from tests.acceptance.intervals import hasten
from tests.support.programs import Program, alertmanagers, free_port, start_alertmanager, start_prometheus

_RESTART_AFTER = 0.5
"""Seconds before an ended service is restarted; systemd waits longer."""
_STARTS_WITHIN = 180.0
_RESENT_AFTER = 60
"""Seconds until Prometheus repeats an alert, by default, and so shows the end of an inhibited one."""
_RESTARTS_A_NODE = """\
# In place of the shipped one, which tells people: the processes of the slow rank's node are started again.
playbook: training-straggler
on:
  alert: TrainingStraggler
target: job
guards:
  cooldown: 10m
  max_runs: {count: 40, per: 1d}
steps:
  - id: save
    action: job.checkpoint
    timeout: 5m
  - id: leave
    action: launcher.exclude_node
    with: {node: "{{ labels.rank_node }}"}
    timeout: 10m
    undo: on_failure
  - id: return
    action: launcher.include_node
    with: {node: "{{ labels.rank_node }}"}
    timeout: 10m
  - id: recovered
    wait_for: resolved
    timeout: 30m
on_failure:
  - action: notify
    on_error: continue
    with: {title: "{{ target.job }} has a slow rank", message: "{{ annotations.summary }}"}
"""


class Server:
    """``trainmedic serve``, restarted whenever it ends, as by systemd."""

    def __init__(self, directory: Path, playbooks: Path, tree: Tree) -> None:
        self.state = directory / "state"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._directory = directory
        self._tree = tree
        self._argv = [sys.executable, "-m", "trainmedic_server", "serve", "--port", str(port), "--mode", "enforce"]
        self._argv += ["--state-dir", str(self.state), "--playbooks", str(playbooks)]
        self._ends = threading.Event()
        self._starts = 0
        directory.mkdir(parents=True)
        self._program = self._start()
        self._program.wait_for(f"{self.url}/ready", _STARTS_WITHIN)
        self._watch = threading.Thread(target=self._keep_running, daemon=True)
        self._watch.start()

    def kill(self) -> None:
        self._program.process.kill()

    def kill_redis(self) -> None:
        """Kill the server's own Redis, which it must restart."""
        pid = self._program.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(OSError):
                if b"redis" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(int(child), signal.SIGKILL)

    def end(self) -> None:
        self._ends.set()
        self._watch.join()
        self._program.end()

    def _start(self) -> Program:
        self._starts += 1
        log = self._directory / f"server-{self._starts}.log"
        return Program(self._argv, log, {"PYTHONPATH": self._tree.python_path})

    def _keep_running(self) -> None:
        while not self._ends.wait(0.1):
            if self._program.process.poll() is not None and not self._ends.wait(_RESTART_AFTER):
                self._program = self._start()


class Stack:
    """Running services, and the history."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.state = server.state

    def runs(self) -> list[dict[str, Any]]:
        """Return every run of a playbook, oldest first, with its alerts, steps and events."""
        with self._client() as client:
            items, cursor = [], None
            while True:
                page = client.get("/history", params={"limit": 500, **({"cursor": cursor} if cursor else {})})
                items += page.raise_for_status().json()["items"]
                cursor = page.json()["next"]
                if not cursor:
                    break
            started = [item for item in reversed(items) if item["status"] != "not_started"]
            return [client.get(f"/history/{item['run_id']}").raise_for_status().json() for item in started]

    def open_runs(self) -> int:
        with self._client() as client:
            states = ("running", "waiting", "awaiting_approval")
            return sum(len(client.get("/history", params={"status": state}).json()["items"]) for state in states)

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.server.url, timeout=30)


@contextmanager
def running(directory: Path, metrics_port: int, faster: int, tree: Tree = HERE) -> Iterator[Stack]:
    """Run everything in `directory` until the context ends."""
    with ExitStack() as stack:
        server = Server(directory / "server", _playbooks(directory / "playbooks", faster, tree), tree)
        stack.callback(server.end)
        _configure(directory, server.url, metrics_port, faster, tree)
        binary = alertmanagers()["installed"]
        alerts, alerts_url = start_alertmanager(binary, directory / "alertmanager.yml", directory / "alertmanager")
        stack.enter_context(alerts)
        config = directory / "prometheus.yml"
        config.write_text(config.read_text().replace("127.0.0.1:9093", alerts_url.removeprefix("http://")))
        resend = f"--rules.alert.resend-delay={1000 * _RESENT_AFTER // faster}ms"
        prometheus, _ = start_prometheus(config, directory / "prometheus", options=[resend])
        stack.enter_context(prometheus)
        yield Stack(server)


def _playbooks(directory: Path, faster: int, tree: Tree) -> Path:
    """Copy the shipped playbooks with three changes: as many runs a day as there are faults; a slow rank's node is
    restarted, where the shipped playbook notifies people; defaults are written out, to be divided.
    """
    directory.mkdir(parents=True)
    for path in (tree.root / "playbooks").glob("*.yaml"):
        if path.name.endswith("_template.yaml"):
            shutil.copy(path, directory)
        elif not path.name.endswith("_test.yaml"):
            text = re.sub(r"max_runs: \{count: \d+, per: 1d\}", "max_runs: {count: 40, per: 1d}", path.read_text())
            text = re.sub(r"action: node\.facts\n(?!    timeout:)", "action: node.facts\n    timeout: 1m\n", text)
            text = re.sub(r"retry: \{attempts: (\d+)\}", r"retry: {attempts: \1, delay: 2s}", text)
            (directory / path.name).write_text(hasten(text, faster))
    (directory / "training-straggler.yaml").write_text(hasten(_RESTARTS_A_NODE, faster))
    return directory


def _configure(directory: Path, server_url: str, metrics_port: int, faster: int, tree: Tree) -> None:
    monitoring = tree.root / "monitoring"
    for name in ("rules", "targets"):
        (directory / name).mkdir()
    for rules in (monitoring / "rules").glob("*.yaml"):
        (directory / "rules" / rules.name).write_text(hasten(rules.read_text(), faster))
    (directory / "targets" / "nodes.yaml").write_text("[]\n")
    (directory / "targets" / "jobs.yaml").write_text(f"- targets: ['127.0.0.1:{metrics_port}']\n")
    alertmanager = hasten((monitoring / "alertmanager.yml").read_text(), faster)
    (directory / "alertmanager.yml").write_text(alertmanager.replace("http://127.0.0.1:8080", server_url))
    prometheus = hasten((monitoring / "prometheus.yml").read_text(), faster)
    prometheus = prometheus.replace("127.0.0.1:8080", server_url.removeprefix("http://"))
    (directory / "prometheus.yml").write_text(prometheus)
