"""The watch for reads where the kernel grants none; with inotify it is tested on real mounts."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainmedic_agent.disk import read_watch
from trainmedic_agent.disk.access_times import AccessTimes
from trainmedic_agent.disk.filesystems import Root
from trainmedic_agent.disk.read_watch import ReadWatch
from trainmedic_agent.disk.report import Reason
from trainmedic_agent.disk.search import MatchedFile
from trainmedic_agent.disk.throttle import Clocks, Throttle
from trainmedic_agent.disk.walk import WalkedDirectory


def test_without_inotify_every_directory_may_be_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user may have no inotify instance left."""
    refusing = SimpleNamespace(inotify_init1=lambda _: -1, inotify_add_watch=lambda *_: -1)
    monkeypatch.setattr(read_watch, "_libc", refusing)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        root = Root(str(tmp_path), fd, os.fstat(fd).st_dev, None, access_times=AccessTimes(0, ("mounted noatime",)))
        directory = WalkedDirectory(root, None, "", 0, -1)
        throttle = Throttle(Clocks(sleep=lambda _: None), 1e11, lambda: False)
        with closing(ReadWatch(60.0, throttle)) as watch:
            watch.watch_files([MatchedFile(directory, "a.log", (root.device, 1), 0, 1)])
            assert watch.obstacle(directory) is Reason.OPEN_UNKNOWN
    finally:
        os.close(fd)
