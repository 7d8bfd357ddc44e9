"""Whether an open directory is still where its path says."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainmedic_agent.disk import place
from trainmedic_agent.disk.place import is_in_place


@pytest.fixture(params=["openat2", "ENOSYS", "EPERM"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the system call, without it, and where a container may not use it."""
    if request.param != "openat2":

        def refused(*_: object) -> int:
            ctypes.set_errno(getattr(errno, request.param))
            return -1

        monkeypatch.setattr(place, "_openat2", refused)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.usefixtures("_kernel")
def test_only_the_same_directory_at_the_path_is_in_place(tmp_path: Path) -> None:
    """A moved directory, another at its path, or one behind a link, on the way or at the end, is not."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    path = str(tmp_path / "a" / "b")
    with opened(tmp_path / "a" / "b") as fd:
        assert is_in_place(fd, path)
        (tmp_path / "a").rename(tmp_path / "c")
        assert not is_in_place(fd, path)
        (tmp_path / "a").symlink_to("c")
        assert not is_in_place(fd, path)
        (tmp_path / "a").unlink()
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "b").symlink_to(tmp_path / "c" / "b")
        assert not is_in_place(fd, path)
        (tmp_path / "a" / "b").unlink()
        (tmp_path / "a" / "b").mkdir()
        assert not is_in_place(fd, path)
        (tmp_path / "a" / "b").rmdir()
        (tmp_path / "c" / "b").rename(tmp_path / "a" / "b")
        assert is_in_place(fd, path)


@pytest.mark.usefixtures("_kernel")
def test_a_path_that_is_too_long_for_the_kernel_is_still_looked_up(tmp_path: Path) -> None:
    """The cleaner enters 128 levels, whose names may have 255 bytes each."""
    name, levels = "d" * 250, 20
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    try:
        path = "/".join([str(tmp_path), *[name] * levels])
        assert is_in_place(fd, path)
        (tmp_path / name).rename(tmp_path / "moved")
        assert not is_in_place(fd, path)
    finally:
        os.close(fd)


def test_a_failed_lookup_is_an_error_and_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise a lack of descriptors would look like a move."""

    def none_left(_: bytes) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(place, "_open_path", none_left)
    with opened(tmp_path) as fd, pytest.raises(OSError, match="too many"):
        is_in_place(fd, str(tmp_path))
