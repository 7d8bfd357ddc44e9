"""Two users of a node with files of their own, as far as this process may have them.

With the rights to give files away, the users are real ones. Otherwise all files belong to this process, and a test
takes what it can from that: see `MAY_GIVE` and `WAYS`.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainmedic_agent.log_opening.thread_rights import ThreadRights

ANN, BOB = 20_001, 20_002
"""Two users whom no database knows."""
TEAM = 20_100
"""A group."""


def _may_give() -> bool:
    with tempfile.TemporaryDirectory() as name:
        try:
            os.chown(name, ANN, ANN)
        except OSError:
            return False
        return _is_root_of_files(name)


def _is_root_of_files(directory: str) -> bool:
    """Whether this process may use the files of others, so that it can look after the users' files."""
    path = Path(directory) / "of-ann"
    try:
        path.touch()
        os.chown(path, ANN, ANN)
        path.chmod(0o600)
        path.read_bytes()
    except OSError:
        return False
    return True


def _may_take_rights() -> bool:
    try:
        return ThreadRights().may_be_used()
    except OSError:
        return False


MAY_GIVE = _may_give()
"""Whether this process may make files of other users."""
MAY_TAKE = _may_take_rights()
"""Whether this process may open files with the rights of other users."""
WAYS = ("modes", "rights") if MAY_TAKE else ("modes",)
"""How users' rights are applied: by a comparison with file modes, or by taking them."""


def switch_of(way: str) -> ThreadRights | None:
    return ThreadRights() if way == "rights" else None


@contextmanager
def open_place() -> Iterator[Path]:
    """Make a directory that every user may enter."""
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if all(parent.stat().st_mode & stat.S_IXOTH for parent in (Path(base), *Path(base).parents)):
            break
    made = Path(tempfile.mkdtemp(prefix="two-users-", dir=base))
    try:
        made.chmod(0o755)
        yield made
    finally:
        shutil.rmtree(made)


def directory(path: Path, owner: int | None = None, mode: int = 0o755, group: int | None = None) -> Path:
    """Make a directory of a user."""
    path.mkdir(parents=True, exist_ok=True)
    return _given(path, owner, mode, group)


def file(path: Path, text: str, owner: int | None = None, mode: int = 0o600, group: int | None = None) -> Path:
    """Make a file of a user."""
    path.write_text(text)
    return _given(path, owner, mode, group)


def _given(path: Path, owner: int | None, mode: int, group: int | None) -> Path:
    if owner is not None:
        os.chown(path, owner, owner if group is None else group)
    path.chmod(mode)
    return path
