"""Programs that act on webhooks: Trainmedic and its alternatives, if installed.

Each gets alerts that it has not seen before, and acts on each by one HTTP request to a sink that records the time:
- **trainmedic**: ``trainmedic serve``, a playbook with one ``http.request``.
- **webhook**: an executor that forks a command for each webhook (github.com/adnanh/webhook, Debian's ``webhook``), on
  PATH or by ``--executor PATH``; the command is ``curl``.
- **ansible-rulebook**: from PyPI, with ``ansible-core`` and Java, on PATH or by ``--ansible-rulebook PATH``; its own
  webhook source, and a rule that runs ``ansible.builtin.uri``.

Printed for each: webhooks acknowledged per second, over 16 connections; the median from a webhook to its act, one at a
time; how many of a storm's acknowledged webhooks were acted on ``--within`` so many seconds; how many of those
acknowledged until SIGKILL were never acted on after a restart, and how many twice; and the peak memory of its process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.sender import Connection, alert, webhook
from tests.support.programs import PYTHON_PATH, Program, eventually, free_port

_CONNECTIONS = 16
_PROGRAMS = {"--executor": "webhook", "--ansible-rulebook": "ansible-rulebook"}
"""Options with the peers' paths, and their names on PATH."""


class Sink(ThreadingHTTPServer):
    """Receiver of acts, as ``GET /<id>``, which records ``time.time()``."""

    request_queue_size = 1024
    daemon_threads = True

    def __init__(self) -> None:
        self.acts: list[tuple[str, float]] = []
        acts = self.acts

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                acts.append((self.path.lstrip("/"), time.time()))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def times(self) -> Counter[str]:
        return Counter(name for name, _ in list(self.acts))


@dataclass(frozen=True)
class Peer:
    name: str
    path: str
    """Path of its webhook."""
    configure: Callable[[Path, int, str], Sequence[str | Path]]
    """Writes its configuration into a directory, for a port and the sink's URL; returns the start command."""
    webhooks: int
    """Webhooks of a storm."""
    environment: dict[str, str] = field(default_factory=dict)


@contextmanager
def sink() -> Iterator[Sink]:
    """Run a sink on the loopback."""
    with Sink() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()


def _trainmedic(directory: Path, port: int, sink_url: str) -> Sequence[str | Path]:
    playbooks = directory / "playbooks"
    playbooks.mkdir(exist_ok=True)
    (playbooks / "peer.yaml").write_text(f"""\
playbook: peer
on: {{alert: Benchmark}}
target: job
steps:
  - action: http.request
    with: {{url: "{sink_url}/{{{{ labels.job_name | urlencode }}}}", method: GET}}
    timeout: 1m
""")
    serve = (sys.executable, "-m", "trainmedic_server", "serve", "--port", str(port), "--mode", "enforce")
    return (*serve, "--state-dir", directory / "state", "--playbooks", playbooks)


def _executor(program: Path) -> Callable[[Path, int, str], Sequence[str | Path]]:
    def configure(directory: Path, port: int, sink_url: str) -> Sequence[str | Path]:
        act = directory / "act.sh"
        act.write_text(f'#!/bin/sh\nexec curl --silent --output /dev/null "{sink_url}/$1"\n')
        act.chmod(0o755)
        name = {"source": "payload", "name": "alerts.0.labels.job_name"}
        hook = {"id": "act", "execute-command": str(act), "pass-arguments-to-command": [name]}
        (directory / "hooks.json").write_text(json.dumps([hook]))
        return (program, "-hooks", directory / "hooks.json", "-ip", "127.0.0.1", "-port", str(port))

    return configure


def _rulebook(program: Path) -> Callable[[Path, int, str], Sequence[str | Path]]:
    def configure(directory: Path, port: int, sink_url: str) -> Sequence[str | Path]:
        local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        (directory / "inventory.yaml").write_text(json.dumps({"all": {"hosts": {"localhost": local}}}))
        url = f"{sink_url}/{{{{ event.payload.alerts[0].labels.job_name }}}}"
        action = {"run_module": {"name": "ansible.builtin.uri", "module_args": {"url": url}}}
        rule = {"name": "act", "condition": "event.payload.alerts is defined", "action": action}
        source = {"eda.builtin.webhook": {"host": "127.0.0.1", "port": port}}
        book = [{"name": "peer", "hosts": "all", "sources": [source], "rules": [rule]}]
        (directory / "rulebook.yaml").write_text(json.dumps(book))
        return (program, "--rulebook", directory / "rulebook.yaml", "--inventory", directory / "inventory.yaml")

    return configure


def found(executor: Path | None, rulebook: Path | None) -> list[Peer]:
    """Return Trainmedic, and the installed peers."""
    peers = [Peer("trainmedic", "/webhook", _trainmedic, 2000, {"PYTHONPATH": PYTHON_PATH})]
    if executor is not None:
        peers.append(Peer("webhook (forks)", "/hooks/act", _executor(executor), 2000))
    if rulebook is not None:
        # It calls programs that stand beside it.
        path = f"{rulebook.parent}{os.pathsep}{os.environ['PATH']}"
        java = {"JAVA_HOME": str(Path(program).resolve().parents[1])} if (program := shutil.which("java")) else {}
        peers.append(Peer("ansible-rulebook", "/endpoint", _rulebook(rulebook), 30, {"PATH": path, **java}))
    return peers


class Trial:
    """One peer, its sink, and sent alerts."""

    def __init__(self, peer: Peer, directory: Path, into: Sink) -> None:
        self._peer = peer
        self._sink = into
        self._port = free_port()
        self._argv = peer.configure(directory, self._port, into.url)
        self._log = directory / "program.log"
        self._sent = 0
        self.program: Program

    def start(self) -> None:
        """Start or restart it, and wait until it accepts connections."""
        self.program = Program(self._argv, self._log, self._peer.environment)
        eventually(lambda: asyncio.run(self._is_there()), 90, f"{self._peer.name} listens", every=0.1)

    async def _is_there(self) -> bool:
        if self.program.process.poll() is not None:
            raise SystemExit(f"{self._peer.name} ended:\n{self.program.tail()}")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return False
        writer.close()
        return True

    def names(self, count: int) -> list[str]:
        """Return so many new names of alerts."""
        self._sent += count
        return [f"job-{number}" for number in range(self._sent - count, self._sent)]

    async def send(
        self, names: Iterable[str], connections: int, on_reply: Callable[[int], None] = lambda count: None
    ) -> dict[str, float]:
        """Return when each acknowledged alert was sent, without those cut off by a kill."""
        queue, acknowledged = iter(names), dict[str, float]()

        async def drain() -> None:
            with suppress(OSError):
                connection = await Connection.open(f"http://127.0.0.1:{self._port}")
                try:
                    for name in queue:
                        labels = {"alertname": "Benchmark", "severity": "critical", "job_name": name}
                        exchange = await connection.send(webhook([alert(labels)], self._peer.path))
                        if exchange.status == 200:
                            acknowledged[name] = exchange.sent_at
                        on_reply(len(acknowledged))
                finally:
                    connection.close()

        await asyncio.gather(*(drain() for _ in range(connections)))
        return acknowledged

    def acted(self, names: Iterable[str], within: float) -> Counter[str]:
        """Return how often each was acted on, once all were or that time is over."""
        wanted, deadline = set(names), time.monotonic() + within
        while time.monotonic() < deadline and not wanted <= self._sink.times().keys():
            time.sleep(0.05)
        times = self._sink.times()
        return Counter({name: times[name] for name in wanted})

    def reaction(self, rounds: int) -> float:
        """Return the median seconds from sending a webhook to its act, one at a time."""
        seconds = []
        for name in self.names(rounds):
            ((_, sent_at),) = asyncio.run(self.send([name], 1)).items()
            if self.acted([name], 60)[name]:
                seconds.append(next(at for acted, at in self._sink.acts if acted == name) - sent_at)
        if not seconds:
            raise SystemExit(f"{self._peer.name} acts on nothing:\n{self.program.tail()}")
        return statistics.median(seconds)

    def storm(self, within: float) -> tuple[float, int, int]:
        """Return webhooks acknowledged per second, their number, and how many were acted on in time."""
        began = time.monotonic()
        acknowledged = asyncio.run(self.send(self.names(self._peer.webhooks), _CONNECTIONS))
        rate = len(acknowledged) / (time.monotonic() - began)
        return rate, len(acknowledged), sum(map(bool, self.acted(acknowledged, within).values()))

    def kill(self, within: float) -> tuple[int, int, int]:
        """Return how many were acknowledged until SIGKILL in a storm, and of these never acted on, and acted on more
        than once.
        """
        enough = self._peer.webhooks // 2

        def kill(count: int) -> None:
            if count >= enough:
                self.program.process.send_signal(signal.SIGKILL)

        acknowledged = asyncio.run(self.send(self.names(self._peer.webhooks), _CONNECTIONS, kill))
        self.program.process.wait()
        self.start()
        acted = self.acted(acknowledged, within)
        return len(acknowledged), sum(not times for times in acted.values()), sum(t > 1 for t in acted.values())

    def peak_mib(self) -> float:
        """Return the peak memory of its process, without forked ones."""
        status = Path(f"/proc/{self.program.process.pid}/status").read_text()
        peak = re.search(r"VmHWM:\s*(\d+) kB", status)
        assert peak is not None
        return int(peak[1]) / 1024


def measure(peer: Peer, within: float, rounds: int) -> str:
    with tempfile.TemporaryDirectory() as name, sink() as into:
        trial = Trial(peer, Path(name), into)
        trial.start()
        try:
            trial.reaction(3)  # warms it up
            reaction = trial.reaction(rounds)
            rate, taken, done = trial.storm(within)
            memory = trial.peak_mib()
            told, lost, twice = trial.kill(within)
        finally:
            trial.program.end()
    return (
        f"{peer.name}: {rate:.3g} acknowledged webhooks/s, {reaction * 1000:.0f} ms from a webhook to its act,"
        f" {done} of {taken} acted on within {within:g} s of the storm, {memory:.0f} MiB;"
        f" of {told} acknowledged until SIGKILL {lost} lost and {twice} twice"
    )


def _program(path: str) -> Path:
    found = shutil.which(path)
    if found is None:
        raise argparse.ArgumentTypeError(f"there is no program {path}")
    return Path(found)


def add_programs(parser: argparse.ArgumentParser, wanted: Iterable[str] = _PROGRAMS) -> None:
    """Add the peers' paths, by default from PATH."""
    for option in wanted:
        name = _PROGRAMS[option]
        parser.add_argument(option, type=_program, default=shutil.which(name), metavar="PATH", help=f"of {name}")


def program_words(options: argparse.Namespace, wanted: Iterable[str] = _PROGRAMS) -> list[str]:
    """Return these options as arguments again."""
    paths = {option: getattr(options, option[2:].replace("-", "_")) for option in wanted}
    return [word for option, path in paths.items() if path is not None for word in (option, str(path))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_programs(parser)
    parser.add_argument("--within", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=20, help="webhooks sent one at a time")
    options = parser.parse_args()
    for peer in found(options.executor, options.ansible_rulebook):
        print(measure(peer, options.within, options.rounds), flush=True)
    for name, path in (("webhook", options.executor), ("ansible-rulebook", options.ansible_rulebook)):
        if path is None:
            print(f"{name} is not on this machine")


if __name__ == "__main__":
    main()
