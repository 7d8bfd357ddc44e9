"""What tests share: a real Redis and PostgreSQL, which they may kill, and a stand-in for the GPU driver."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import redis
import structlog

from tests.driver.driver import Card, Driver, cards
from tests.support import parts
from tests.support.parts import REST, Part, may_have_some_of, parts_of, place_in_rest
from tests.support.postgres import PostgresServer
from tests.support.programs import free_port
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.journal import Journal
from trainmedic_agent.repairs.intents import IntentBook
from trainmedic_server.wiring import interpreter

# Collect garbage as rarely as the server does.
gc.set_threshold(50_000, *interpreter.GC_LATER)

# How long an example takes says something about the machine, and nothing about the code.
hypothesis.settings.register_profile("trainmedic", deadline=None)
hypothesis.settings.load_profile("trainmedic")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background ignores it, and programs that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# With rich, which only the tests' packages bring, it would take a second to print an exception.
structlog.configure(
    [
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", type=Part, choices=list(Part), help="one part of the tests (tests/support/parts.py); default: both"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep the part for test files that are imported later, and compile extensions for this run of tests alone.

    A killed compilation leaves a lock in PyTorch's own directory, for which all later ones would wait.
    """
    parts.selected = config.getoption("--part")
    if "TORCH_EXTENSIONS_DIR" not in os.environ:  # else set by the user, or for this worker
        directory = tempfile.mkdtemp(prefix="torch-extensions-")
        os.environ["TORCH_EXTENSIONS_DIR"] = directory
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say what the quick part leaves out."""
    if config.getoption("--part") is not Part.QUICK:
        return None
    return f"left out, for scripts/test rest: {'; '.join(REST)}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file of the other part unread: it may import what is not installed."""
    part: Part | None = config.getoption("--part")
    if part is None or collection_path.suffix != ".py":
        return None
    return None if may_have_some_of(str(collection_path.relative_to(config.rootpath)), part) else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while test files are imported, which takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave modules and tests, which stay, out of each garbage collection. Else it takes a seventh of the tests'
    time."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the part, and put the longest of the rest first. Leave out what takes long, unless all is
    asked for or it is named."""
    part: Part | None = config.getoption("--part")
    runs_long = os.environ.get("TRAINMEDIC_TEST_KINDS") == "all" or any("::" in argument for argument in config.args)

    def is_left_out(item: pytest.Item) -> bool:
        if part is not None and part not in parts_of(item.nodeid):
            return True
        return not runs_long and item.get_closest_marker("long") is not None

    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        leaving = set(left_out)
        items[:] = [item for item in items if item not in leaving]
    if part is Part.REST:
        items.sort(key=lambda item: place_in_rest(item.nodeid.partition("::")[0]))


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Our commands set logging up for their whole process: one that a test calls in its own must not leave it so."""
    root = logging.getLogger()
    handlers, level, configured = root.handlers[:], root.level, structlog.get_config()
    yield
    structlog.configure(**configured)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def random_numbers_as_they_were() -> Iterator[None]:
    """What one test seeds must not choose for those after it: they would draw the same in each run."""
    state = random.getstate()
    yield
    random.setstate(state)


class RedisServer:
    """A ``redis-server`` process with an append-only file, so that it can be killed and come back."""

    def __init__(self, directory: Path, *options: str, password: str | None = None) -> None:
        self.port = free_port()
        self.directory = directory
        self.password = password
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        listening = () if "--port" in self.options else ("--port", str(self.port))
        protection = ("--requirepass", self.password) if self.password else ()
        fixed = ("--bind", "127.0.0.1", "--dir", str(self.directory))
        kept = ("--save", "", "--appendonly", "yes", "--appendfsync", "no")
        self.process = subprocess.Popen(
            ["redis-server", *fixed, *kept, *listening, *protection, *self.options], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    pass
                if "--port" in self.options:
                    return  # TLS only: the handshake is the test's business
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return
            except (OSError, redis.RedisError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def kill(self) -> None:
        """As if the machine's memory ran out: SIGKILL, and wait until it is gone."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the whole session. Tests use `redis_server`, which hands it out empty."""
    if shutil.which("redis-server") is None:
        pytest.fail("redis-server is not installed")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def intents(tmp_path: Path) -> Iterator[IntentBook]:
    with contextlib.closing(Journal(tmp_path / "state")) as journal:
        yield IntentBook(journal)


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """A Redis that is running and empty. A test may kill and start it."""
    if shared_redis.process is None:
        shared_redis.start()
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
    return shared_redis


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[type[RedisServer]]:
    """Make a Redis with options of its own; it is killed when the test ends."""
    made: list[RedisServer] = []

    class Owned(RedisServer):
        def start(self) -> None:
            made.append(self)
            super().start()

    yield Owned
    for server in made:
        server.kill()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of a Redis that is running and empty."""
    return redis_server.url


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[PostgresServer]:
    """One PostgreSQL for the whole session. Tests use `postgres`, or a database of their own in it."""
    with PostgresServer(outlasts_machine=False) as server:
        yield server


@pytest.fixture
def postgres(shared_postgres: PostgresServer) -> PostgresServer:
    """A PostgreSQL that is running. A test may stop and start it."""
    if shared_postgres.process is None:
        shared_postgres.start()
    return shared_postgres


@pytest.fixture
def make_driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Make a stand-in for the GPU driver with so many GPUs, or with these cards; pynvml in this process finds the
    last one."""
    made: list[Driver] = []

    def make(gpus: int | tuple[Card, ...] = 2, speed: float = 1.0) -> Driver:
        driver = Driver(tmp_path / f"driver-{len(made)}", cards(gpus) if isinstance(gpus, int) else gpus, speed)
        made.append(driver.enter())
        return driver

    yield make
    for driver in reversed(made):
        driver.leave()


@pytest.fixture
def gpu_record(tmp_path: Path) -> Iterator[GpuRecord]:
    """An agent's record of its GPUs, in a journal of its own."""
    with contextlib.closing(Journal(tmp_path / "gpu-record")) as journal:
        yield GpuRecord(journal)


@pytest.fixture
def driver(make_driver: Callable[..., Driver]) -> Driver:
    """The stand-in for the GPU driver, with two GPUs."""
    return make_driver(2)
