"""What a hostile user can put below a log directory, for tests and benchmarks: names, empty files, floods, dumps.

Everything is made by the user of the test, so a job is hidden by other jobs of the same user. That is the harder case:
between users, budgets are stricter.
"""

from __future__ import annotations

import json
import pickle
import threading
from itertools import count
from pathlib import Path
from typing import Self

from trainmedic.wire.log_layout import AttemptLogs

FLOOD = b"step 1: loss 2.0 grad_norm 0.42 lr 1.5e-05 tokens/s 78400 memory 71.2 GB\n" * 200


def expanding_dump(groups: int = 4000) -> bytes:
    """Return a pickle of some 90 KB whose groups all have one list of 1,000 ranks: four million members."""
    shared = str(list(range(1000)))
    config = {str(number): {"desc": "x", "ranks": shared} for number in range(groups)}
    return pickle.dumps({"version": "2.9", "pg_config": config, "entries": [], "pg_status": {}})


class HostileJobs:
    """Jobs of one user below a log directory, made and written by a thread until the block ends."""

    def __init__(
        self, root: Path, node: str, *, sources: int = 200, names: int = 64, empty: int = 210_000, floods: int = 500
    ) -> None:
        self._root = root
        self._node = node
        self._sizes = (sources, names, empty, floods)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._flood, daemon=True)
        self.rounds = 0

    def make(self) -> None:
        """Make the files that stay."""
        sources, names, empty, floods = self._sizes
        named = self._root / "named"
        named.mkdir(parents=True, exist_ok=True)
        for number in range(sources):
            self._sources(number, names, named)
        crowd = AttemptLogs.of(self._root, "crowd", 1)
        crowd.path.mkdir(parents=True, exist_ok=True)
        for number in range(empty):
            (crowd.path / f"rank-{number}.jsonl").touch()
        for number in range(floods):
            path = self._flooded(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(FLOOD)

    def _sources(self, number: int, names: int, named: Path) -> None:
        """A sources file that names files in directories of their own."""
        attempt = AttemptLogs.of(self._root, f"namer-{number}", 1)
        attempt.path.mkdir(parents=True, exist_ok=True)
        files = []
        for name in range(names):
            path = named / f"{number}-{name % 8}" / f"{name}.log"
            path.parent.mkdir(exist_ok=True)
            path.write_text("x\n")
            files.append({"path": str(path), "source": "training"})
        said = {"version": 1, "job": f"namer-{number}", "attempt": 1, "rank": 0, "local_rank": 0, "node": self._node}
        attempt.sources(self._node, 0).write_text(json.dumps({**said, "files": files}))

    def _flooded(self, number: int) -> Path:
        return AttemptLogs.of(self._root, f"flood-{number % 50}", 1 + number // 50).launcher(self._node)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(120)

    def _flood(self) -> None:
        floods, dump = self._sizes[3], expanding_dump()
        for turn in count():
            for number in range(floods):
                if self._stopping.is_set():
                    return
                with self._flooded(number).open("ab") as file:
                    file.write(FLOOD)
                    if file.tell() > 4 * 2**20:
                        file.truncate(0)
            attempt = AttemptLogs.of(self._root, f"dumps-{turn % 20}", 1)
            attempt.flight_recorder.mkdir(parents=True, exist_ok=True)
            attempt.launcher(self._node).touch()
            for rank in range(8):
                attempt.dump(rank).write_bytes(dump)
            self.rounds = turn + 1
            self._stopping.wait(0.2)
