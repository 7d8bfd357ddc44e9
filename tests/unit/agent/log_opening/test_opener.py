"""The opener and its client: the same answers as without a process between, and no trust in what is asked."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.two_users import ANN, BOB, MAY_GIVE, WAYS, directory, file, open_place, switch_of
from trainmedic_agent.log_opening import opener_frames
from trainmedic_agent.log_opening.guarded_files import GuardedFiles
from trainmedic_agent.log_opening.node_files import FileFacts, LogRefused, NamedBy, NodeFiles, UnreadReason
from trainmedic_agent.log_opening.opener import MOST_NAMES, FileOpener
from trainmedic_agent.log_opening.opener_client import OpenerClient
from trainmedic_agent.log_opening.opener_frames import FrameReader, Opened, OpenerAnswer, OpenFile, Request
from trainmedic_agent.log_opening.own_files import OwnFiles

WAIT_SECONDS = 60.0


class Served:
    """A client whose opener runs in a thread."""

    def __init__(self, files: NodeFiles) -> None:
        own, far = socket.socketpair()
        self.raw = own
        self.client = OpenerClient(own)
        self._thread = threading.Thread(target=FileOpener(files).serve, args=(far,))
        self._thread.start()

    def end(self) -> None:
        self.client.close()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()


@pytest.fixture
def place() -> Iterator[Path]:
    with open_place() as made:
        yield made


@pytest.fixture
def served(place: Path) -> Iterator[Served]:
    made = Served(GuardedFiles([str(place)], switch=switch_of(WAYS[-1])))
    yield made
    made.end()


def read(files: NodeFiles, path: Path, named_by: NamedBy | None = None) -> str:
    with os.fdopen(files.open(str(path), named_by)) as opened:
        return opened.read()


def test_a_client_gets_the_same_data_as_the_files_themselves(place: Path, served: Served) -> None:
    """It gets descriptors, listings and facts, also for names in invalid UTF-8; refusals have their reason."""
    odd = os.fsencode(directory(place / "logs")) + b"/\xff.log"
    Path(os.fsdecode(odd)).write_text("odd\n")
    file(place / "logs" / "a.log", "a\n").chmod(0o644)
    (place / "logs" / "link.log").symlink_to("a.log")
    directory(place / "logs" / "inner")
    own, path = OwnFiles(), str(place / "logs")
    assert read(served.client, place / "logs" / "a.log") == "a\n"
    assert read(served.client, Path(os.fsdecode(odd))) == "odd\n"
    names = [entry.name for entry in own.listing(path, 10).entries]
    assert len(names) == 4
    assert served.client.listing(path, 10) == own.listing(path, 10)
    assert served.client.listing(path, 2).is_cut
    assert served.client.facts(path, [*names, "missing"]) == [*own.facts(path, names), None]
    with pytest.raises(LogRefused) as refused:
        served.client.open(f"{path}/link.log")
    assert refused.value.reason is UnreadReason.LINK
    with pytest.raises(FileNotFoundError):
        served.client.open(f"{path}/missing")
    with pytest.raises(LogRefused):
        served.client.open("/etc/passwd")


def test_a_large_directory_comes_in_pages(place: Path, served: Served) -> None:
    """No frame exceeds the allowed size."""
    names = [f"{'x' * 240}-{number:04}" for number in range(MOST_NAMES + 500)]
    for name in names:
        (place / name).touch()
    assert {entry.name for entry in served.client.listing(str(place), 10_000).entries} == set(names)
    facts = served.client.facts(str(place), names)
    assert len(facts) == len(names)
    assert all(isinstance(each, FileFacts) for each in facts)


@pytest.mark.skipif(not MAY_GIVE, reason="files of other users take CAP_CHOWN and CAP_DAC_OVERRIDE to make")
def test_rights_come_from_the_naming_file_and_not_from_the_client(place: Path, served: Served) -> None:
    """The client cannot choose the user to open as."""
    attempt = directory(directory(place / "job", ANN) / "attempt-1", ANN)
    facts = file(attempt / "sources.json", "{}", ANN, 0o644).stat()
    by = NamedBy(str(attempt / "sources.json"), facts.st_dev, facts.st_ino)
    own = file(directory(place / "ann", ANN, 0o700) / "own.log", "own\n", ANN)
    private = file(directory(place / "bob", BOB, 0o700) / "private.log", "secret\n", BOB)
    assert read(served.client, own, by) == "own\n"
    with pytest.raises(PermissionError):
        served.client.open(str(private), by)


def test_each_thread_has_a_connection_and_none_waits_for_another(place: Path) -> None:
    """An unresponsive file system delays only the thread that asked for it."""
    entered, release = threading.Event(), threading.Event()
    file(place / "quick.log", "quick\n").chmod(0o644)

    class Slow(OwnFiles):
        def open(self, path: str, named_by: NamedBy | None = None) -> int:
            if path.endswith("slow.log"):
                entered.set()
                assert release.wait(WAIT_SECONDS)
            return super().open(path, named_by)

    file(place / "slow.log", "slow\n").chmod(0o644)
    served, texts = Served(Slow()), []
    thread = threading.Thread(target=lambda: texts.append(read(served.client, place / "slow.log")))
    thread.start()
    assert entered.wait(WAIT_SECONDS)
    assert read(served.client, place / "quick.log") == "quick\n"
    release.set()
    thread.join(WAIT_SECONDS)
    assert texts == ["slow\n"]
    served.end()


@pytest.mark.parametrize(
    "raw", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x09{}", b"\x00\x00\x00\x00"]
)
def test_an_invalid_frame_closes_only_its_connection(place: Path, served: Served, raw: bytes) -> None:
    """A compromised reader cannot end the opener or make it allocate memory."""
    file(place / "x.log", "x\n").chmod(0o644)
    hostile, far = socket.socketpair()
    opener_frames.send(served.raw, opener_frames.AddConnection(), far.fileno())
    far.close()
    hostile.settimeout(WAIT_SECONDS)
    with hostile:
        hostile.sendall(raw)
        hostile.shutdown(socket.SHUT_WR)
        assert hostile.recv(1) == b""
    assert read(served.client, place / "x.log") == "x\n"


def test_descriptors_sent_by_the_client_are_closed(place: Path, served: Served) -> None:
    """A request that carries a descriptor keeps none open in the opener."""
    path = file(place / "x.log", "x\n")
    path.chmod(0o644)
    first, second = os.pipe()
    opener_frames.send(served.raw, OpenFile(os.fsencode(path)), second)
    os.close(second)
    answer = FrameReader(served.raw, msgspec.msgpack.Decoder(OpenerAnswer)).next()
    assert answer is not None
    assert isinstance(answer[0], Opened)
    assert answer[1] is not None
    os.close(answer[1])
    assert os.read(first, 1) == b"", "the other end of the pipe is closed"
    os.close(first)


def test_a_descriptor_that_is_no_connection_is_closed(served: Served) -> None:
    """Otherwise a compromised reader could use up the opener's descriptors."""
    first, second = os.pipe()
    with contextlib.suppress(BrokenPipeError):  # the opener is quick to close the connection too
        opener_frames.send(served.raw, opener_frames.AddConnection(), second)
    os.close(second)
    assert select.select([first], [], [], WAIT_SECONDS)[0], "the other end of the pipe is closed"
    os.close(first)


OPENER = """
import socket, sys
from pathlib import Path
from trainmedic_agent.log_opening.guarded_files import GuardedFiles
from trainmedic_agent.log_opening.opener import FileOpener
from trainmedic_agent.log_opening.thread_rights import ThreadRights
rights = ThreadRights()
rights.keep_only_these()
status = dict(line.split(":\\t") for line in Path("/proc/self/status").read_text().splitlines())
print(status["CapPrm"], status["CapEff"], status["CapInh"], status["NoNewPrivs"], flush=True)
files = GuardedFiles([sys.argv[2]], switch=rights if rights.may_be_used() else None)
FileOpener(files).serve(socket.socket(fileno=int(sys.argv[1])))
"""


@pytest.mark.skipif(not os.access(sys.executable, os.X_OK), reason="this user may not start Python")
def test_three_capabilities_are_enough_for_an_opener(place: Path) -> None:
    """It gives up all others for good. With these it opens what a user keeps to himself, for his own job, and what
    only root may read, by the policy. Without any of them it opens what it may, and ends as well."""
    own, far = socket.socketpair()
    command = [sys.executable, "-c", OPENER, str(far.fileno()), str(place)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    public = file(place / "public.log", "public\n", mode=0o644)
    with subprocess.Popen(
        command, env=environment, pass_fds=[far.fileno()], stdout=subprocess.PIPE, text=True
    ) as process:
        far.close()
        client = OpenerClient(own)
        assert process.stdout is not None
        permitted, effective, inheritable, has_no_new = process.stdout.readline().split()
        assert int(permitted, 16) & ~0b11000100 == 0
        assert (effective, int(inheritable, 16), has_no_new) == (permitted, 0, "1")
        assert read(client, public) == "public\n"
        if MAY_GIVE and int(permitted, 16) == 0b11000100:
            assert read(client, file(directory(place / "ann", ANN, 0o700) / "own.log", "own\n", ANN)) == "own\n"
            assert read(client, file(directory(place / "root", 0, 0o700) / "own.log", "root\n", 0)) == "root\n"
            with pytest.raises(PermissionError):
                client.open(str(file(place / "ann" / "private.log", "secret\n", BOB)))
        client.close()
        assert process.wait(WAIT_SECONDS) == 0


def test_a_client_reports_that_the_opener_is_gone(place: Path) -> None:
    """It raises an error of the file, so that its reading continues later."""
    own, far = socket.socketpair()
    client = OpenerClient(own)
    far.close()
    with pytest.raises(OSError, match=r"gone|[Bb]roken pipe"):
        client.open(str(place / "x.log"))
    client.close()


def test_a_client_reconnects_after_a_refused_connection(place: Path) -> None:
    """The opener closes it with the request unread, which resets it."""
    own, far = socket.socketpair()
    opener = FileOpener(OwnFiles())
    opener._free_connections = threading.BoundedSemaphore(1)
    opener._free_connections.acquire()
    thread = threading.Thread(target=opener.serve, args=(far,), daemon=True)
    thread.start()
    client, path = OpenerClient(own), file(place / "x.log", "x\n")
    with pytest.raises(OSError, match=r"gone|reset|[Bb]roken pipe"):
        client.open(str(path))
    opener._free_connections.release()
    assert read(client, path) == "x\n"
    client.close()
    thread.join(WAIT_SECONDS)


def test_a_client_with_too_many_open_files_reports_it(place: Path) -> None:
    """The kernel drops a descriptor beyond the limit."""
    own, far = socket.socketpair()
    client = OpenerClient(own)

    def answer() -> None:
        added = FrameReader(far, msgspec.msgpack.Decoder(Request)).next()
        assert added is not None
        assert added[1] is not None
        with socket.socket(fileno=added[1]) as further:
            FrameReader(further, msgspec.msgpack.Decoder(Request)).next()
            opener_frames.send(further, Opened())

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with pytest.raises(OSError, match="Too many open files"):
        client.open(str(place / "x.log"))
    thread.join(WAIT_SECONDS)
    client.close()
    far.close()
