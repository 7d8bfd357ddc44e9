"""A server as a real process, an Alertmanager that goes on delivering to it, and what is watched meanwhile.

Here: starting them, the alerts that must arrive, memory and the time that ``/health`` takes. Not here: the attacks.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import resource
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from tests.support.programs import Program, alertmanagers, eventually, start_alertmanager, start_server

CHART_LIMIT = 512
"""MiB: the memory limit of the server in the Helm chart."""
LATEST = 60.0
"""Seconds within which an alert must arrive, and ``/health`` answer. A guard against hangs on a busy machine."""
ROLES = ("webhook", "viewer", "operator")

PLAYBOOK = """\
playbook: probe
mode: observe
on: {alert: Probe}
target: job
steps:
  - action: job.scale_lr
    with: {factor: 0.5}
"""


def allow_many_files() -> None:
    """Let this process open as many connections as the attacks need."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))


def bearer(role: str | None) -> dict[str, str]:
    """The header of who has that role."""
    return {"Authorization": f"Bearer secret-of-{role}"} if role else {}


def alert(name: str, number: int, **labels: str) -> dict[str, Any]:
    return {
        "status": "firing",
        "labels": {"alertname": name, "job_name": f"job-{number}", **labels},
        "annotations": {"summary": "as they come"},
        "startsAt": datetime.now().astimezone().isoformat(),
    }


def webhook(*alerts: dict[str, Any]) -> bytes:
    return json.dumps({"version": "4", "receiver": "trainmedic", "alerts": alerts}).encode()


@dataclass
class Siege:
    """A server that is attacked."""

    port: int
    program: Program
    alertmanager: str
    has_tokens: bool
    sent: dict[str, float] = field(default_factory=dict)
    slowest_health: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)
    _watchers: list[threading.Thread] = field(default_factory=list)
    _errors: list[BaseException] = field(default_factory=list)

    def role(self, role: str) -> dict[str, str]:
        return bearer(role) if self.has_tokens else {}

    def ask(self, path: str, role: str = "viewer", body: bytes | None = None, seconds: float = 60) -> tuple[int, bytes]:
        """The status and content of one request over a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        with contextlib.closing(connection):
            connection.request("POST" if body is not None else "GET", path, body, self.role(role))
            reply = connection.getresponse()
            return reply.status, reply.read()

    def __enter__(self) -> Self:
        """Begin to watch: an alert goes to Alertmanager, and /health is asked, every fraction of a second."""
        self._over.clear()
        self.sent, self.slowest_health, self._errors = {}, 0.0, []
        self._watchers = [
            threading.Thread(daemon=True, target=self._watch, args=(step,)) for step in (self._send, self._probe)
        ]
        for watcher in self._watchers:
            watcher.start()
        return self

    def __exit__(self, *failure: object) -> None:
        """Every alert has arrived in time, /health was answered in time, and memory stayed below the chart's limit."""
        self._over.set()
        for watcher in self._watchers:
            watcher.join(60)
        if failure[0] is not None:
            return
        assert not self._errors, self._errors
        eventually(lambda: self.sent.keys() <= self._arrived().keys(), LATEST, "every alert arrived", 0.2)
        arrived = self._arrived()
        slowest = max(arrived[job] - at for job, at in self.sent.items())
        peak = self.peak_memory()
        print(f"{len(self.sent)} alerts, slowest {slowest:.2f} s; /health {self.slowest_health:.2f} s; peak {peak} MiB")
        assert slowest < LATEST
        assert peak < CHART_LIMIT
        assert self.program.process.poll() is None

    def peak_memory(self) -> int:
        """The most memory that the process has ever had, in MiB."""
        status = Path(f"/proc/{self.program.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) // 1024

    def _watch(self, step: Any) -> None:
        while not self._over.wait(0.2):
            try:
                step()
            except BaseException as error:
                self._errors.append(error)
                return

    def _send(self) -> None:
        number = len(self.sent)
        labels = alert("Probe", number)["labels"] | {"job_name": f"probe-{time.monotonic_ns()}"}
        at = time.time()
        request = urllib.request.Request(
            f"{self.alertmanager}/api/v2/alerts",
            json.dumps([{"labels": labels, "startsAt": datetime.now().astimezone().isoformat()}]).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=LATEST):
            self.sent[labels["job_name"]] = at

    def _probe(self) -> None:
        began = time.monotonic()
        status, _ = self.ask("/health", seconds=LATEST)
        assert status == 200
        self.slowest_health = max(self.slowest_health, time.monotonic() - began)

    def _arrived(self) -> dict[str, float]:
        """When the server decided on each of the probes, by their jobs."""
        first = min(self.sent.values(), default=time.time())
        arrived: dict[str, float] = {}
        cursor = ""
        while True:
            status, content = self.ask(f"/history?limit=1000&alertname=Probe{cursor}")
            assert status == 200, content
            page = json.loads(content)
            for item in page["items"]:
                decided_at = datetime.fromisoformat(item["timestamp"]).timestamp()
                if decided_at < first - 1:
                    return arrived
                arrived[item["job"]] = decided_at
            if not page["next"]:
                return arrived
            cursor = f"&cursor={page['next']}"


@contextlib.contextmanager
def besieged(directory: Path, *, has_tokens: bool) -> Iterator[Siege]:
    """A server, and an Alertmanager that delivers to it each alert for itself and at once."""
    allow_many_files()
    playbooks = directory / "playbooks"
    playbooks.mkdir()
    (playbooks / "probe.yaml").write_text(PLAYBOOK)
    options: list[str] = []
    if has_tokens:
        tokens = [
            {"name": role, "sha256": hashlib.sha256(f"secret-of-{role}".encode()).hexdigest(), "roles": [role]}
            for role in ROLES
        ]
        (directory / "tokens.yaml").write_text(json.dumps(tokens))
        options = ["--tokens", str(directory / "tokens.yaml")]
    program, url = start_server(directory, *options, playbooks=playbooks)
    receiver: dict[str, Any] = {"url": f"{url}/webhook", "send_resolved": True}
    if has_tokens:
        receiver["http_config"] = {"authorization": {"credentials": "secret-of-webhook"}}
    config = {
        "route": {
            "receiver": "trainmedic",
            "group_by": ["..."],
            "group_wait": "0s",
            "group_interval": "1s",
            "repeat_interval": "1h",
        },
        "receivers": [{"name": "trainmedic", "webhook_configs": [receiver]}],
    }
    (directory / "alertmanager.yml").write_text(json.dumps(config))
    with contextlib.ExitStack() as stack:
        stack.callback(program.end)
        binary = next(iter(alertmanagers().values()))
        alerts, alertmanager_url = start_alertmanager(binary, directory / "alertmanager.yml", directory / "am")
        stack.callback(alerts.end)
        yield Siege(int(url.rpartition(":")[2]), program, alertmanager_url, has_tokens)
