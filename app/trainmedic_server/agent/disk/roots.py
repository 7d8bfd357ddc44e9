"""Opening a rule's roots, once for a command: each from ``/`` on, part by part, following no link.

The directory that is open then is the one that the checks were made on, whatever happens to its name
afterwards. Refused is a root

- that is missing, or has a symbolic link on its way: its real path belongs in the policy;
- that belongs to somebody other than root, the agent's user, and the policy's ``owners``;
- whose way leads through a directory in which somebody else could put another in its place: one of another
  owner, or one that group or others may write in without the sticky bit;
- that is the filesystem of the system: ``/`` by another name;
- that is, or lies in, the agent's own state directory. One that lies below a root is `Root.spared`, and the walk
  does not enter it, under whatever name.

Not here: which paths a policy may name at all (``reading``), and what is below (``walk``).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Root:
    """An open root. ``device`` and ``mount`` say on which filesystem, and by which mount, it lies; ``spared`` is the
    device and inode of a directory below it that is never entered."""

    path: str
    fd: int
    device: int
    mount: int | None
    spared: tuple[int, int] | None = None

    def holds(self, fd: int) -> bool:
        """Whether what is open is on the root's filesystem and mount."""
        return os.fstat(fd).st_dev == self.device and mount_of(fd) == self.mount


@dataclass(frozen=True, slots=True)
class Opened:
    """The roots of a rule that could be opened, in its order, and the sentences about the others by path."""

    roots: tuple[Root, ...]
    refused: Mapping[str, str]


@contextmanager
def opened(paths: tuple[str, ...], owners: frozenset[int], spared: tuple[int, int] | None = None) -> Iterator[Opened]:
    """The roots, open while the block runs. `owners` beside root and the agent's own user; `spared` is the device
    and inode of the agent's state directory."""
    trusted = owners | {0, os.geteuid()}
    roots: list[Root] = []
    refused: dict[str, str] = {}
    with ExitStack() as stack:
        for path in paths:
            found = _open(path, trusted, spared)
            if isinstance(found, str):
                refused[path] = found
                continue
            stack.callback(os.close, found.fd)
            if any(os.path.samestat(os.fstat(found.fd), os.fstat(other.fd)) for other in roots):
                refused[path] = f"{path} is the same directory as another root of the rule"
                continue
            roots.append(found)
        yield Opened(tuple(roots), refused)


def enter(parent: int, name: str) -> int:
    """The descriptor of the directory `name` in the open directory `parent`; a link is not followed. Raises OSError."""
    return os.open(name, _DIRECTORY, dir_fd=parent)


def mount_of(fd: int) -> int | None:
    """The id of the mount by which `fd` was reached; None where the kernel does not say.

    It tells a bind mount of the same filesystem, which has the same device number.
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:  # noqa: PTH123
            return next((int(line.split()[1]) for line in lines if line.startswith("mnt_id:")), None)
    except OSError:
        return None


def identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """The device and inode of what is there; None where nothing is."""
    try:
        return _identity(Path(path).stat())
    except OSError:
        return None


def _open(path: str, trusted: frozenset[int], spared: tuple[int, int] | None) -> Root | str:
    """The root at `path`, or why it is refused."""
    fd = os.open("/", _DIRECTORY)
    try:
        top = os.fstat(fd)
        walked = ""
        for name in path.split("/")[1:]:
            if (risk := _risk(walked or "/", os.fstat(fd), trusted)) is not None:
                return risk
            walked = f"{walked}/{name}"
            try:
                below = enter(fd, name)
            except OSError as error:
                return _why(path, walked, error, is_link=_is_link(fd, name))
            os.close(fd)
            fd = below
            if spared == _identity(os.fstat(fd)):
                return f"{walked} is the agent's state directory; name another one with --state-dir, or another root"
        facts = os.fstat(fd)
        if facts.st_uid not in trusted:
            return f"{path} belongs to user {facts.st_uid}; name that user under owners if it may be cleaned"
        if os.path.samestat(facts, top):
            return f"{path} is the root of the whole filesystem"
        root = Root(path, fd, facts.st_dev, mount_of(fd), spared)
        fd = -1
        return root
    finally:
        if fd >= 0:
            os.close(fd)


def _risk(path: str, facts: os.stat_result, trusted: frozenset[int]) -> str | None:
    """Why somebody could exchange what is in this directory, on the way to a root; None where nobody can."""
    if facts.st_uid not in trusted:
        return f"{path}, on the way to it, belongs to user {facts.st_uid}, who is not among the owners"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not facts.st_mode & stat.S_ISVTX:
        return f"{path}, on the way to it, may be written by others, who could put another directory in its place"
    return None


def _why(path: str, at: str, error: OSError, *, is_link: bool) -> str:
    if is_link:
        return f"{at} is a symbolic link; name the real path of {path}"
    return f"{at}: {error.strerror}"


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def _is_link(parent: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False
