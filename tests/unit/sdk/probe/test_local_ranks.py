"""Ranks of a probe without a launcher."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainmedic.probe import local_ranks


def test_no_rank_stays_if_a_later_one_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(rank: int, *_: object) -> subprocess.Popen[bytes]:
        if rank:
            raise OSError("too many processes")
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return started[0]

    monkeypatch.setattr(local_ranks, "_start", start)
    with pytest.raises(OSError, match="too many processes"):
        local_ranks.run(2, [])
    assert started[0].poll() is not None
