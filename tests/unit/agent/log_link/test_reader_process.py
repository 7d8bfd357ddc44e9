"""What the reader gives up before it reads anything."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.programs import PYTHON_PATH, eventually
from trainmedic_agent.log_link import reader_process
from trainmedic_agent.log_link.link_socket import LinkSocket
from trainmedic_agent.log_link.reader_process import ReaderChild, ReaderUser
from trainmedic_agent.log_opening import thread_rights
from trainmedic_agent.settings.agent_reader import ReaderSettings
from trainmedic_agent.wiring import agent_reader
from trainmedic_core import confined_child
from trainmedic_server.errors import ConfigurationError

_CONFINED = """
import os, resource, sys
from trainmedic_agent.log_link import reader_process
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
reader_process.confine(reader_process.own_user(), 96 * 1024**2)
def outcome(act):
    try:
        act()
    except (MemoryError, PermissionError) as error:
        return type(error).__name__
    return "done"
print(outcome(lambda: bytearray(400 * 1024**2)))
status = open("/proc/self/status").read()
print(*(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("CapPrm", "CapEff", "CapAmb"))))
print(next(line.split()[1] for line in status.splitlines() if line.startswith("NoNewPrivs")))
print(len(set(resource.getrlimit(resource.RLIMIT_NOFILE))))
"""

_CONFINED_BY_A_LOWERED_KERNEL = """
import resource
from trainmedic_agent.log_link import reader_process
set_limit = resource.setrlimit
def refuse(which, limits):
    if which == resource.RLIMIT_NOFILE:
        raise ValueError("not allowed to raise maximum limit")
    set_limit(which, limits)
resource.setrlimit = refuse
reader_process.confine(reader_process.own_user(), 96 * 1024**2)
print("confined")
"""

_KILLS_A_READER = """
import os, signal, sys
from trainmedic_agent.log_link.reader_process import ReaderChild
script = '''
import os, signal
child = os.fork()
if child == 0:
    os.setresuid(20_004, 20_004, 20_004)
    os.kill(os.getpid(), signal.SIGSTOP)
os.waitpid(child, os.WUNTRACED)
print(child, flush=True)
os.waitpid(child, 0)
'''
reader = ReaderChild([sys.executable, "-c", script], stdout=-1, start_new_session=True)
reader.user_of_child = 20_004
child = int(reader.stdout.readline())
try:
    os.kill(child, signal.SIGKILL)
except PermissionError as error:
    print(type(error).__name__)
reader.kill()
reader.wait()
reader.stdout.read()  # ends with the last process that has the pipe
print("ended")
"""
_KILLS_A_PARSER = """
import os, signal, sys
from trainmedic_core import confined_child, confined_process
process = confined_process.ConfinedProcess("trainmedic_agent.disk.metadata_child", (), 100)
assert process.ask(b"latest 3\\n100", 60.0) == b'{"step": 100}\\n'
child = process._process.process
assert os.stat(f"/proc/{child.pid}").st_uid in (0, *confined_child.PARSER_IDS)
try:
    child.kill()
except PermissionError as error:
    print(type(error).__name__)
process.end()
assert child.returncode is not None
print("ended")
"""


@pytest.mark.parametrize("number", [2**32 - 1, 2**32, 10**30])
def test_an_invalid_user_number_is_rejected(number: int) -> None:
    """The first of these numbers would keep the reader under the agent's user."""
    with pytest.raises(ConfigurationError, match=r"--reader-user: .* use 0 to 4294967294"):
        reader_process.reader_user(str(number))


def test_a_confined_process_has_no_capability_little_memory_and_many_files() -> None:
    """This holds for every starting user and every soft limit on open files."""
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "-c", _CONFINED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["MemoryError", "0 0 0", "1", "1"]


def test_a_process_with_a_fixed_limit_on_open_files_is_confined() -> None:
    """The kernel refuses any change while the hard limit is above ``fs.nr_open``."""
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "-c", _CONFINED_BY_A_LOWERED_KERNEL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "confined\n"


def test_secrets_are_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's environment is an allowlist of what it needs."""
    seen: list[dict[str, str]] = []

    def started(*_: object, env: dict[str, str], **__: object) -> SimpleNamespace:
        seen.append(env)
        return SimpleNamespace()

    monkeypatch.setattr(reader_process, "ReaderChild", started)
    monkeypatch.setenv("TRAINMEDIC_SIGNING_KEY", "key")
    monkeypatch.setenv("REDISCLI_AUTH", "password")
    monkeypatch.setenv("TZ", "UTC")
    reader_process.start(tmp_path, reader_process.own_user(), 96 * 1024**2, "info")
    (environment,) = seen
    assert "TZ" in environment
    assert not {"TRAINMEDIC_SIGNING_KEY", "REDISCLI_AUTH"} & environment.keys()


@pytest.mark.parametrize("leader_ends_first", [False, True])
def test_a_readers_end_also_ends_its_child(leader_ends_first: bool) -> None:
    """A stopped child of another user does not end with its parent by itself."""
    script = "import os, subprocess; print(subprocess.Popen(['sleep', '600'], stdout=2).pid, flush=True); os.read(0, 1)"
    reader = ReaderChild(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    with reader.stdin, reader.stdout:
        child = int(reader.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        if leader_ends_first:
            reader.stdin.close()
            reader.wait(60)
        reader.kill()
        reader.wait(60)
    eventually(lambda: is_over(child), 60, "the end of the child")


def is_over(pid: int) -> bool:
    """Whether a process has ended. Where nobody waits for it, it stays as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_nonexistent_user_is_a_fault() -> None:
    """The default user is an exception: without it, logs are read as before."""
    with pytest.raises(ConfigurationError, match="no user of this node"):
        reader_process.reader_user("nobody-by-that-name")
    assert reader_process.reader_user("4711").uid == 4711


def test_an_agent_that_runs_as_the_default_user_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is not the user namespace."""
    monkeypatch.setattr(reader_process, "DEFAULT_USER", pwd.getpwuid(os.geteuid()).pw_name)
    user, reason = reader_process.usable_user(None, [Path("/")], is_started=True)
    assert (user.uid, reason) == (os.geteuid(), "this process runs as the default user")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a user to give up")
def test_root_reads_under_a_user_without_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also works if no trainmedic-reader user exists. Its number, given to the child, is the same user."""
    monkeypatch.setattr(reader_process, "DEFAULT_USER", "nobody-by-that-name")
    user, reason = reader_process.usable_user(None, [Path("/")], is_started=True)
    if not reader_process.may_become(user):
        assert (user.uid, reason is None) == (0, False), "what cannot be is said"
        return
    assert user.uid in reader_process.WITHOUT_ACCOUNT
    assert reason is None
    assert reader_process.reader_user(str(user.uid)) == user
    monkeypatch.setattr(reader_process, "may_become", lambda _: False)
    user, reason = reader_process.usable_user(None, [Path("/")], is_started=True)
    assert (user.uid, "may not start" in (reason or "")) == (0, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process under another user")
@pytest.mark.parametrize("kills", ["a reader", "a parser"])
def test_a_stopped_child_of_another_user_is_ended_without_cap_kill(kills: str) -> None:
    """Root's agent may lack that capability but can change the user, or the child had no other user."""
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    launcher = ["setpriv", "--bounding-set", "-kill", "--inh-caps", "-kill", sys.executable, "-c"]
    done = subprocess.run(
        [*launcher, _KILLS_A_READER if kills == "a reader" else _KILLS_A_PARSER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["PermissionError", "ended"], done.stderr


def test_the_uids_of_the_user_namespace_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod with a user namespace has 65,536 of them."""
    for name in ("uid_map", "gid_map"):
        (tmp_path / name).write_text("         0     100000      65536\n")
    monkeypatch.setattr(confined_child, "_SELF", tmp_path)
    assert confined_child.first_mapped(reader_process.WITHOUT_ACCOUNT) == reader_process.WITHOUT_ACCOUNT[1]
    (tmp_path / "gid_map").write_text("         0     100000      1000\n")
    assert confined_child.first_mapped(reader_process.WITHOUT_ACCOUNT) is None


def test_a_directory_that_the_user_may_not_enter_is_named(tmp_path: Path) -> None:
    """The agent then reads under its own user, and reports it."""
    closed = tmp_path / "closed"
    (closed / "state").mkdir(parents=True)
    for parent in tmp_path.parents:
        if not parent.stat().st_mode & 0o001:
            expected: Path | None = parent
            break
    else:
        expected = None
    other = ReaderUser(os.geteuid() + 4711, os.getegid() + 4711)
    closed.chmod(0o755)
    assert reader_process.closed_to(other, closed / "state") in (tmp_path, expected)
    closed.chmod(0o700)
    assert reader_process.closed_to(other, closed / "state") == closed
    assert reader_process.closed_to(reader_process.own_user(), closed / "state") is None


@pytest.fixture
def others_directory() -> Iterator[Path]:
    """A directory through which every user may pass."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name).resolve()
        if any(not parent.stat().st_mode & 0o001 for parent in top.parents):
            pytest.skip("temporary directories of this machine are closed to other users")
        top.chmod(0o755)
        yield top


_OTHER = ReaderUser(os.geteuid() + 4711, os.getegid() + 4711)


def test_a_link_into_a_closed_directory_is_closed(others_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state directory or a virtual environment's Python can be a link, often below root's home."""
    closed = others_directory / "home"
    (closed / "state").mkdir(parents=True)
    (closed / "python").touch()
    for name in ("state", "python"):
        (others_directory / name).symlink_to(closed / name)
    monkeypatch.setattr(sys, "executable", str(others_directory / "python"))
    closed.chmod(0o755)
    assert reader_process.closed_to(_OTHER, others_directory / "state" / "reader") is None
    closed.chmod(0o700)
    assert reader_process.closed_to(_OTHER, others_directory / "state" / "reader") == closed


def test_a_directory_that_does_not_exist_yet_is_not_closed(others_directory: Path) -> None:
    """``trainmedic agent check`` is called before the first start."""
    assert reader_process.closed_to(_OTHER, others_directory / "none" / "deeper" / "state") is None


def test_a_stopped_process_is_recognised() -> None:
    """Its name does not matter, and an ended process does not count."""
    script = "import ctypes; ctypes.CDLL(None).prctl(15, b') T 1 (', 0, 0, 0); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert not reader_process.is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        eventually(lambda: reader_process.is_stopped(child.pid), 60, "a stopped process")
        child.kill()
    assert not reader_process.is_stopped(child.pid)


def test_an_opener_that_cannot_drop_rights_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the system calls of the machine type are unknown."""
    monkeypatch.setattr(thread_rights.platform, "machine", lambda: "mips")
    monkeypatch.setattr(reader_process, "has_rights_to_read", lambda: True)
    user = str(os.geteuid())
    with pytest.raises(ConfigurationError, match="cannot drop its rights: users cannot be changed on mips"):
        agent_reader.run(ReaderSettings(tmp_path, user, 256 * 1024**2, "error"), once=True)


def test_a_reader_whose_links_end_at_once_pauses_between_them(tmp_path: Path) -> None:
    """Without pauses, when the agent refuses its user, each would use a core and fill its log."""
    link = LinkSocket(tmp_path, os.geteuid(), os.getegid())
    links = 0

    def take_link() -> bool:
        nonlocal links
        if (accepted := link.accept()) is not None:
            connection, peer = accepted
            peer.close()
            connection.close()
            links += 1
        return accepted is not None

    command = [sys.executable, "-m", "trainmedic_agent", "agent-reader", "--state-dir", str(tmp_path)]
    reader = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": PYTHON_PATH})
    try:
        eventually(take_link, 60, "a first link")
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            take_link()
        assert links <= 6
    finally:
        reader.kill()
        reader.wait()
        link.close()
