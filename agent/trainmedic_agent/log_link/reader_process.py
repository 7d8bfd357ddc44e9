"""The log reader's process, and its user."""

from __future__ import annotations

import contextlib
import ctypes
import grp
import os
import pwd
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from trainmedic.errors import ConfigurationError
from trainmedic_agent.privileges import effective_mask
from trainmedic_core import confined_child, kill_as_user

DEFAULT_USER = "trainmedic-reader"
# IDs of user and group if the default user is missing. The first that this user namespace maps is used.
WITHOUT_ACCOUNT = (2_100_000_017, 60_999)
_LARGEST_ID = 2**32 - 2  # the number after it means "no change" to setresuid(2) and chown(2)
_JOURNAL_GROUP = "systemd-journal"
_STACKS = 16 * 8 * 1024**2  # address space in bytes that threads reserve for stacks and mostly do not use
_PASSED_ON = (
    *("PATH", "LANG", "TZ", "TZDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "TMPDIR"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "VIRTUAL_ENV", "MALLOC_ARENA_MAX"),
)  # variables for the reader, none secret
_PR_SET_PDEATHSIG = 1
_CAP_CHOWN, _CAP_DAC_READ_SEARCH, _CAP_SETGID, _CAP_SETUID = 0, 2, 6, 7
CAP_SYSLOG = 34  # needed to open a restricted kernel log


class ReaderUser(Struct, frozen=True):
    uid: int
    gid: int
    is_without_account: bool = False  # see `WITHOUT_ACCOUNT`


def reader_user(name: str | None) -> ReaderUser:
    """Return the named or default user for reading logs. Raises ConfigurationError.

    A missing default user is replaced by one without an account if this user namespace maps any: the agent's own user
    could signal the agent, and root could open root's files.
    """
    if name is not None and name.isascii() and name.isdigit():
        number = int(name)
        if number > _LARGEST_ID:
            raise ConfigurationError(f"--reader-user: {name} is no user's number; use 0 to {_LARGEST_ID}")
        is_without_account = number in WITHOUT_ACCOUNT and not _has_account(number)
        return ReaderUser(number, _group_of(number), is_without_account)
    try:
        entry = pwd.getpwnam(name or DEFAULT_USER)
    except KeyError:
        if name is not None:
            raise ConfigurationError(f"--reader-user: {name!r} is no user of this node") from None
        free = confined_child.first_mapped([each for each in WITHOUT_ACCOUNT if not _has_account(each)])
        return own_user() if free is None else ReaderUser(free, free, is_without_account=True)
    return ReaderUser(entry.pw_uid, entry.pw_gid)


def usable_user(name: str | None, paths: Sequence[Path], *, is_started: bool) -> tuple[ReaderUser, str | None]:
    """Return the named or default user if it can be used and reach `paths`, else this process's own with the reason.

    `is_started`: this process starts the reader. Raises ConfigurationError.
    """
    user = reader_user(name)
    if user.uid == os.geteuid():
        if name is not None:
            return user, None
        has_no_other = not user.is_without_account and not _is_user(DEFAULT_USER)
        return user, "this user namespace has no other" if has_no_other else "this process runs as the default user"
    if (is_started or user.is_without_account) and not may_become(user):
        return own_user(), f"this process may not start another as user {user.uid}"
    for path in paths:
        if (closed := closed_to(user, path)) is not None:
            return own_user(), f"user {user.uid} may not pass through {closed}"
    return user, None


def own_user() -> ReaderUser:
    return ReaderUser(os.geteuid(), os.getegid())


def has_rights_to_read() -> bool:
    """Return whether this process can open more than its user's files, so that an opener is needed."""
    return any(_has(capability) for capability in (_CAP_DAC_READ_SEARCH, _CAP_SETGID, _CAP_SETUID, CAP_SYSLOG))


def may_become(user: ReaderUser) -> bool:
    if user.uid == os.geteuid():
        return True
    # Without account, its group has no members, so only a change of owner gives it the reader's directory.
    return _has(_CAP_SETUID, _CAP_SETGID) and (not user.is_without_account or _has(_CAP_CHOWN))


def closed_to(user: ReaderUser, path: Path) -> Path | None:
    """Return a parent of `path`, or of its link target, that the user cannot traverse, if any."""
    if user.uid in {0, os.geteuid()}:
        return None
    groups = groups_of(user)
    for parent in dict.fromkeys((*path.absolute().parents, *path.resolve().parents)):
        try:
            facts = parent.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            return parent
        if facts.st_uid == user.uid:
            needed = stat.S_IXUSR
        elif facts.st_gid in groups:
            needed = stat.S_IXGRP
        else:
            needed = stat.S_IXOTH
        if not facts.st_mode & needed:
            return parent
    return None


class ReaderChild(subprocess.Popen[bytes]):
    """The opener as child process and group leader.

    The reading process is its child. With another user, the kernel does not end it with the opener.
    """

    user_of_child: int | None = None  # the reading process's user; None: this process's

    @property
    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def kill(self) -> None:
        # The group keeps its number while it has a process. After the leader is reaped the number could be reused.
        if self.returncode is None or not Path(f"/proc/{self.pid}").exists():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            if self.user_of_child is not None:
                kill_as_user.kill_group(self.pid, self.user_of_child)
        super().kill()


def start(directory: Path, user: ReaderUser, memory: int, log_level: str) -> ReaderChild:
    """`memory`: in bytes. Raises OSError."""
    command = [sys.executable, "-m", "trainmedic_agent", "agent-reader", "--once", "--state-dir", str(directory)]
    command += ["--reader-user", str(user.uid), "--reader-memory", str(memory // 1024**2), "--log-level", log_level]
    child = ReaderChild(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=_environment(os.environ),
        start_new_session=True,
    )
    child.user_of_child = user.uid
    return child


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process."""
    try:
        # The process name in brackets can contain anything.
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1]
    except OSError:
        return False
    return state == [b"T"]


def confine(user: ReaderUser, memory: int) -> None:
    """Become the user, drop all capabilities and limit the memory, in bytes. Raises ConfigurationError."""
    confined_child.drop_bounding_set()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")  # the OOM killer should prefer it to the agent
    if user.uid != os.geteuid():
        try:
            os.setgroups(groups_of(user))
            os.setresgid(user.gid, user.gid, user.gid)
            os.setresuid(user.uid, user.uid, user.uid)
        except OSError as error:
            raise ConfigurationError(f"the reader cannot become user {user.uid}: {error.strerror}") from error
    try:
        confined_child.drop_capabilities()
    except OSError as error:
        raise ConfigurationError(f"the reader cannot drop its rights: {error.strerror}") from error
    limit = memory + _STACKS
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Each followed or searched file needs a descriptor. systemd's soft limit is 1,024, its hard limit 524,288.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # refused if the hard limit is above the kernel's (fs.nr_open)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_with(parent: int) -> None:
    """Make the kernel end this process with a parent of the same user. Raises ConfigurationError.

    A change of user resets this, so call it afterwards.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise ConfigurationError("the process that started the reader has ended")


def _group_of(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return uid


def groups_of(user: ReaderUser) -> list[int]:
    """Return the user's groups; for the replacement without account, its own and the journal's."""
    try:
        return os.getgrouplist(pwd.getpwuid(user.uid).pw_name, user.gid)
    except KeyError:
        groups = [user.gid]
    if user.is_without_account:
        with contextlib.suppress(KeyError):
            groups.append(grp.getgrnam(_JOURNAL_GROUP).gr_gid)
    return groups


def _is_user(name: str) -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False


def _has_account(number: int) -> bool:
    for look in (pwd.getpwuid, grp.getgrgid):
        with contextlib.suppress(KeyError):
            look(number)
            return True
    return False


def _has(*capabilities: int) -> bool:
    """Return whether this process has all capabilities; if unknown, whether it is root."""
    mask = effective_mask("self")
    return os.geteuid() == 0 if mask is None else all(mask >> capability & 1 for capability in capabilities)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in _PASSED_ON or name.startswith("LC_")}
