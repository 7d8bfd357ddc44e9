"""Old runs are archived before they are deleted: each is in the archive or in the store, and in the archive once."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.run_store_values import at, closed, event, gpu, heard, run
from tests.support.programs import PYTHON_PATH
from trainmedic_server import errors
from trainmedic_server.adapters.gzip_archive import GzipArchive
from trainmedic_server.adapters.sql_store import old_runs, prune
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.run import Run
from trainmedic_server.ports.archive import ArchivedRun
from trainmedic_server.ports.store import HistoryFilter


class Killed(BaseException):
    """Ends what is under way, as a kill does."""


class DyingArchive(GzipArchive):
    """An archive whose process dies as a file has been written, with or without its name."""

    def __init__(self, directory: Path, *, at_file: int, unnamed: bool = False) -> None:
        super().__init__(directory)
        self._left, self._unnamed, self._path = at_file, unnamed, directory

    def write(self, archived: Sequence[ArchivedRun]) -> None:
        self._left -= 1
        if self._left == 0 and self._unnamed:
            (self._path / "runs.part").write_bytes(b"half of a fi")
            raise Killed
        super().write(archived)
        if self._left == 0:
            raise Killed


def documents(directory: Path) -> list[dict[str, Any]]:
    """Every line of the archive, in the order of its files."""
    files = sorted(directory.glob("runs-*.ndjson.gz"))
    return [json.loads(line) for path in files for line in gzip.decompress(path.read_bytes()).splitlines()]


async def keep(store: SqlStore, *runs: Run) -> None:
    def work(tx: Any) -> None:
        tx.save_alerts([heard()])
        tx.add_runs(runs)
        tx.link([(each.id, each.alert) for each in runs])
        tx.append([event("started", each.id, note="now") for each in runs])

    await store.transact(work)


async def ids_of(store: SqlStore) -> set[str]:
    return {each.id async for each in store.stream(HistoryFilter())}


async def test_a_deleted_run_is_in_the_archive_whole(store: SqlStore, tmp_path: Path) -> None:
    """With its alerts, steps and events; an open one and a young one stay where they are."""
    old, opened, young = closed(1), run(2, gpu(2)), closed(100, gpu(3))
    await keep(store, old, opened, young)
    assert await store.prune(at(50), GzipArchive(tmp_path / "kept")) == 1
    [line] = documents(tmp_path / "kept")
    assert (line["run"]["id"], line["run"]["alert_labels"]) == (old.id, dict(old.alert_labels))
    assert line["run"]["created_at"] == "2026-03-01T12:01:00Z"
    assert [each["fingerprint"] for each in line["alerts"]] == ["f1"]
    assert [(each["action"], each["position"]) for each in line["steps"]] == [("gpu.power_limit", 0)]
    assert [(each["kind"], each["data"]) for each in line["events"]] == [("started", {"note": "now"})]
    assert await ids_of(store) == {opened.id, young.id}


async def test_nothing_is_deleted_that_cannot_be_archived(store: SqlStore, tmp_path: Path) -> None:
    """Whatever stands in the way of writing or of reading back."""
    await keep(store, closed(1))
    (tmp_path / "file").touch()
    with pytest.raises(errors.ArchiveUnavailable):
        await store.prune(at(50), GzipArchive(tmp_path / "file"))
    assert len(await ids_of(store)) == 1


@pytest.mark.parametrize("unnamed", [False, True])
async def test_a_kill_at_any_place_leaves_each_run_once(
    store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    """As a file is written, as it has its name, and between the deletions of its runs."""
    monkeypatch.setattr(old_runs, "IN_A_FILE", 4)
    monkeypatch.setattr(prune, "BATCH", 2)
    runs = [closed(number, gpu(number)) for number in range(11)]
    await keep(store, *runs)
    with pytest.raises(Killed):
        await store.prune(at(50), DyingArchive(tmp_path, at_file=2, unnamed=unnamed))
    deletions = iter((False, True))
    delete = store._delete

    async def dying(work: Any) -> int:
        if next(deletions, False):
            raise Killed
        return await delete(work)

    monkeypatch.setattr(store, "_delete", dying)
    with pytest.raises(Killed):
        await store.prune(at(50), GzipArchive(tmp_path))
    await store.prune(at(50), GzipArchive(tmp_path))
    assert [line["run"]["id"] for line in documents(tmp_path)] == [each.id for each in runs]
    assert await ids_of(store) == set()


async def test_a_run_that_has_changed_since_it_was_archived_stays(store: SqlStore, tmp_path: Path) -> None:
    """It is archived once more, as it is then; the later line counts."""
    await keep(store, closed(1))
    with pytest.raises(Killed):
        await store.prune(at(50), DyingArchive(tmp_path, at_file=1))
    [run_id] = await ids_of(store)
    await store.transact(lambda tx: tx.append([event("undo_ordered", run_id)]))
    assert await store.prune(at(50), GzipArchive(tmp_path)) == 1
    assert [[each["kind"] for each in line["events"]] for line in documents(tmp_path)] == [
        ["started"],
        ["started", "undo_ordered"],
    ]


DOOMED = """
import asyncio, sys
from datetime import timedelta
from pathlib import Path
from tests.contract.run_store_values import at
from trainmedic_server.adapters.gzip_archive import GzipArchive
from trainmedic_server.adapters.sql_store import old_runs
from trainmedic_server.adapters.sql_store.store import SqlStore

async def main():
    store = SqlStore.open(sys.argv[1])
    print("open", flush=True)
    await store.prune(at(50_000), GzipArchive(Path(sys.argv[2])))
    await store.close()

old_runs.IN_A_FILE = 100
asyncio.run(main())
"""


async def test_sigkill_while_runs_move_into_the_archive(tmp_path: Path) -> None:
    """At some moment, then to the end: nothing is lost, nothing is there twice."""
    url = f"sqlite:///{tmp_path}/trainmedic.db"
    store = SqlStore.open(url)
    runs = [closed(number, gpu(number)) for number in range(300)]
    await keep(store, *runs)
    await store.close()
    kept = tmp_path / "kept"
    for seconds in (0.2, None):
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", DOOMED, url, str(kept)),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        )
        assert program.stdout is not None
        while (line := await program.stdout.readline()) and line != b"open\n":
            pass
        if seconds is not None:
            await asyncio.sleep(seconds)
            if program.returncode is None:
                program.send_signal(signal.SIGKILL)
        assert await program.wait() in (0, -signal.SIGKILL)
    assert sorted(line["run"]["id"] for line in documents(kept)) == sorted(each.id for each in runs)
    store = SqlStore.open(url)
    assert await ids_of(store) == set()
    await store.close()
