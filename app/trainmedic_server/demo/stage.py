from __future__ import annotations

import contextlib
import functools
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from trainmedic_server.adapters.embedded_redis import is_free
from trainmedic_server.demo.alert_relay import AlertRelay, MeasuredAlerts, PrometheusAlerts
from trainmedic_server.demo.child_process import ChildProcess, free_port, is_answering
from trainmedic_server.demo.demo_rules import rules_file
from trainmedic_server.demo.faults import FAULTS, FaultKind
from trainmedic_server.demo.simulated_nodes import SimulatedCluster, SimulatedNode
from trainmedic_server.demo.training_text import FaultFile
from trainmedic_server.errors import DemoFailed

JOBS = {"llm-1": "node-1", "llm-2": "node-2", "llm-3": "node-2"}  # node by job
LEARNED_STEPS = 60  # the losses are then low enough to show a jump
_GPUS = 4
_PLAYBOOKS = Path(__file__).parent / "playbooks"
_FAN_SECONDS = {FaultKind.HEAT: 20.0, FaultKind.ASK: 60.0}
_START_SECONDS = 300.0
_ALERTMANAGER = {
    "route": {
        "receiver": "demo",
        "group_by": ["alertname", "node", "job_name"],
        "group_wait": "1s",
        "group_interval": "1s",
        "repeat_interval": "1m",
    }
}


class DemoStage:
    """Runs all programs while the context lasts; Prometheus and Alertmanager if this machine has them."""

    def __init__(self, directory: Path, port: int = 0, *, only_own: bool = False, plain: bool = False) -> None:
        """`only_own` omits Prometheus and Alertmanager, `plain` PyTorch."""
        self._directory = directory
        self._plain = plain
        if port and not is_free(port):
            raise DemoFailed(f"port {port} is in use; choose another with --port, or leave it out")
        self.url = f"http://127.0.0.1:{port or free_port()}"
        self.prometheus = None if only_own else _path_of_program("prometheus")
        self.alertmanager = (
            _path_of_program("prometheus-alertmanager", "alertmanager") if self.prometheus is not None else None
        )
        self.programs: list[ChildProcess] = []
        self.metrics_of: Mapping[str, str] = {}  # URL by job
        self._stack = contextlib.ExitStack()
        self._relay: AlertRelay | None = None
        self._cluster: SimulatedCluster | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def cause(self, kind: FaultKind) -> None:
        target = FAULTS[kind].target
        if kind in _FAN_SECONDS:
            assert self._cluster is not None
            self._cluster.node(target).stop_fan(0, _FAN_SECONDS[kind])
        else:
            FaultFile(self._directory, target).write(kind)

    def check(self) -> None:
        """Relay alerts if nothing else does. Raise DemoFailed if a program has ended."""
        for program in self.programs:
            program.check()
        if self._relay is not None:
            with contextlib.suppress(httpx.HTTPError):  # the next call repeats it
                self._relay.relay()

    def runs(self) -> Sequence[Mapping[str, Any]]:
        """Return the items of the history, oldest first. Raises httpx.HTTPError."""
        items: list[Mapping[str, Any]] = self._get("/history")["items"]
        return items[::-1]

    def index_of(self, uuid: str) -> int | None:
        return self._cluster.index_of(uuid) if self._cluster is not None else None

    def is_learned(self) -> bool:
        return all(step >= LEARNED_STEPS for step in self._steps().values())

    def _steps(self) -> dict[str, int]:
        jobs = {job["name"]: job["details"] for job in self._get("/jobs")["items"]}
        return {job: jobs.get(job, {}).get("step") or 0 for job in JOBS}

    def wait_until_learned(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self.is_learned():
            if time.monotonic() > deadline:
                steps = ", ".join(f"{job} {step}" for job, step in self._steps().items())
                raise DemoFailed(f"not every job made {LEARNED_STEPS} steps within {_START_SECONDS:g} s: {steps}")
            self.check()
            time.sleep(0.5)

    # --- programs -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        ports = {job: free_port() for job in JOBS}
        self.metrics_of = {job: f"http://127.0.0.1:{port}/metrics" for job, port in ports.items()}
        cluster_port = free_port()
        endpoints = [f"127.0.0.1:{port}" for port in (*ports.values(), cluster_port)]
        monitoring = self._start_monitoring(endpoints)
        options = [f"--{name}={url}" for name, url in monitoring.items()]
        state = self._directory / "state"
        self._start_program(
            "the server",
            [
                *(sys.executable, "-m", "trainmedic_server", "serve", "--mode", "enforce", "--state-dir", str(state)),
                *("--port", self.url.rpartition(":")[2], "--playbooks", str(_PLAYBOOKS), *options),
            ],
            f"{self.url}/ready",
        )
        redis_url = (state / "redis.url").read_text(encoding="utf-8").strip()
        cluster = SimulatedCluster(
            [SimulatedNode(name, redis_url, _GPUS) for name in ("node-1", "node-2")], cluster_port
        )
        cluster.start()
        self._stack.callback(cluster.stop)
        self._cluster = cluster
        for job, port in ports.items():
            self._train(job, port, redis_url)

    def _start_monitoring(self, endpoints: Sequence[str]) -> Mapping[str, str]:
        """Return the URLs of Prometheus and Alertmanager by the server's setting."""
        webhook = f"{self.url}/webhook"
        if self.prometheus is None:
            self._relay = AlertRelay(MeasuredAlerts([f"http://{each}/metrics" for each in endpoints]), webhook)
            return {}
        urls = {}
        config: dict[str, Any] = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "demo", "static_configs": [{"targets": list(endpoints)}]}],
        }
        if self.alertmanager is not None:
            urls["alertmanager"] = self._start_alertmanager(webhook)
            address = urls["alertmanager"].removeprefix("http://")
            config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [address]}]}]}
        self._write("rules.yaml", rules_file())
        self._write("prometheus.yaml", json.dumps(config))
        url = f"http://127.0.0.1:{free_port()}"
        argv = [
            *(self.prometheus, "--config.file=prometheus.yaml", "--storage.tsdb.path=prometheus"),
            f"--web.listen-address={url.removeprefix('http://')}",
        ]
        self._start_program("Prometheus", argv, f"{url}/-/ready")
        if self.alertmanager is None:
            self._relay = AlertRelay(PrometheusAlerts(url), webhook)
        return {**urls, "prometheus-url": url}

    def _start_alertmanager(self, webhook: str) -> str:
        receiver = {"name": "demo", "webhook_configs": [{"url": webhook, "send_resolved": True}]}
        self._write("alertmanager.yaml", json.dumps({**_ALERTMANAGER, "receivers": [receiver]}))
        url = f"http://127.0.0.1:{free_port()}"
        argv = [
            *(str(self.alertmanager), "--config.file=alertmanager.yaml", "--storage.path=alertmanager"),
            *(f"--web.listen-address={url.removeprefix('http://')}", "--cluster.listen-address="),
        ]
        self._start_program("Alertmanager", argv, f"{url}/-/ready")
        return url

    def _train(self, job: str, port: int, redis_url: str) -> None:
        argv = [
            *(sys.executable, "-m", "trainmedic_server.demo.training_job", job),
            *("--directory", str(self._directory), "--metrics-port", str(port), *(["--plain"] if self._plain else [])),
        ]
        environment = {"TRAINMEDIC_REDIS_URL": redis_url, "TRAINMEDIC_NODE": JOBS[job]}
        self._start_program(job, argv, None, environment)

    def _start_program(
        self, name: str, argv: Sequence[str | Path], url: str | None, environment: Mapping[str, str] | None = None
    ) -> None:
        log = self._directory / f"{name.rpartition(' ')[2].lower()}.log"
        program = ChildProcess(name, argv, log, {"TMPDIR": str(self._directory), **(environment or {})})
        self.programs.append(program)
        self._stack.callback(program.end)
        if url is not None:
            program.wait_until(functools.partial(is_answering, url), _START_SECONDS)

    def _write(self, name: str, text: str) -> None:
        (self._directory / name).write_text(text, encoding="utf-8")

    def _get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=10, trust_env=False).raise_for_status().json()


def _path_of_program(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name)) is not None), None)
