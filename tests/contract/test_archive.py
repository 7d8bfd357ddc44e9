"""Old runs are archived before they are deleted: each is in the archive or in the store, and in the archive once."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.contract.run_store_values import at, closed, event, gpu, heard, run
from tests.support.programs import PYTHON_PATH
from trainmedic_server import errors
from trainmedic_server.adapters import gzip_archive
from trainmedic_server.adapters.gzip_archive import GzipArchive
from trainmedic_server.adapters.sql_store import old_runs, prune
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.run import Run
from trainmedic_server.ports.archive import ArchivedRun
from trainmedic_server.ports.store import HistoryFilter
from trainmedic_server.wiring import background as wiring_archive
from trainmedic_server.wiring.background import opened_archive


class Killed(BaseException):
    """Ends what is under way, as a kill does."""


class DyingArchive(GzipArchive):
    """An archive whose process dies as a file has been written, with or without its name."""

    def __init__(self, directory: Path, *, at_file: int, unnamed: bool = False) -> None:
        super().__init__(directory)
        self.prepare()
        self._left, self._unnamed, self._path = at_file, unnamed, directory

    def write(self, archived: Sequence[ArchivedRun], at_least: int) -> int:
        self._left -= 1
        if self._left == 0 and self._unnamed:
            (self._path / "runs.part").write_bytes(b"half of a fi")
            raise Killed
        number = super().write(archived, at_least)
        if self._left == 0:
            raise Killed
        return number


def archive_in(directory: Path) -> GzipArchive:
    """The archive as a server that starts has it."""
    archive = GzipArchive(directory)
    archive.prepare()
    return archive


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


async def test_a_deleted_run_is_archived_completely(store: SqlStore, tmp_path: Path) -> None:
    """The archive has its alerts, steps and events; open and recent runs stay in the store."""
    old, opened, young = closed(1), run(2, gpu(2)), closed(100, gpu(3))
    await keep(store, old, opened, young)
    assert await store.prune(at(50), archive_in(tmp_path / "kept")) == 1
    [line] = documents(tmp_path / "kept")
    assert (line["run"]["id"], line["run"]["alert_labels"]) == (old.id, dict(old.alert_labels))
    assert line["run"]["created_at"] == "2026-03-01T12:01:00Z"
    assert [each["fingerprint"] for each in line["alerts"]] == ["f1"]
    assert [(each["action"], each["position"]) for each in line["steps"]] == [("gpu.power_limit", 0)]
    assert [(each["kind"], each["data"]) for each in line["events"]] == [("started", {"note": "now"})]
    assert await ids_of(store) == {opened.id, young.id}


def put_a_file(directory: Path) -> None:
    directory.touch()


def put_nothing(directory: Path) -> None:
    assert not directory.exists()


def put_another_directory(directory: Path) -> None:
    directory.mkdir()


STAND_INS = [put_nothing, put_a_file, put_another_directory]
"""What may be at the place of an archive that was moved or whose volume is away."""


@pytest.mark.parametrize("stand_in", STAND_INS)
@pytest.mark.parametrize("archived", [0, 1])
async def test_nothing_is_deleted_while_the_archive_is_unavailable(
    store: SqlStore, tmp_path: Path, stand_in: Callable[[Path], None], archived: int
) -> None:
    """Neither runs nor anything else, and nothing is written in its place, even if it has no runs yet. It continues
    when the archive is back."""
    directory = tmp_path / "volume" / "kept"
    archive = archive_in(directory)
    await keep(store, *(closed(number, gpu(number)) for number in range(archived)))
    assert await store.prune(at(50), archive) == archived
    await keep(store, closed(9, gpu(9)))
    await store.transact(lambda tx: tx.append([event("long ago", minute=1)]))
    directory.rename(tmp_path / "away")
    stand_in(directory)
    before = sorted((tmp_path / "volume").rglob("*"))
    with pytest.raises(errors.ArchiveUnavailable, match=str(directory)):
        await store.prune(at(50), archive)
    assert sorted((tmp_path / "volume").rglob("*")) == before
    assert len(await ids_of(store)) == 1
    assert [each.kind for each in await store.events_after(0, 9)] == ["started", "long ago"]
    for path in before:
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "away").rename(directory)
    assert await store.prune(at(50), archive) == 1
    assert len(documents(directory)) == archived + 1
    assert await store.events_after(0, 9) == []


async def test_a_server_that_starts_without_its_archive_volume_deletes_nothing(store: SqlStore, tmp_path: Path) -> None:
    """The store knows the archive's last file; the error says what to do. An archive elsewhere is another one."""
    directory = tmp_path / "kept"
    await keep(store, closed(1))
    assert await store.prune(at(50), archive_in(directory)) == 1
    await keep(store, closed(2, gpu(2)))
    directory.rename(tmp_path / "away")
    with pytest.raises(errors.ArchiveUnavailable, match=r"file number 1 is missing\. Is its volume mounted\?"):
        await store.prune(at(50), archive_in(directory))
    assert (len(await ids_of(store)), documents(directory)) == (1, [])
    assert await store.prune(at(50), archive_in(tmp_path / "elsewhere")) == 1


async def test_a_volume_that_vanishes_during_archiving_loses_no_run(
    store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The volume vanishes between two of the archive's files."""
    monkeypatch.setattr(old_runs, "RUNS_PER_FILE", 2)
    runs = [closed(number, gpu(number)) for number in range(5)]
    await keep(store, *runs)
    archive = archive_in(tmp_path / "kept")
    write = archive.write

    def last_write(archived: Sequence[ArchivedRun], at_least: int) -> int:
        number = write(archived, at_least)
        (tmp_path / "kept").rename(tmp_path / "away")
        (tmp_path / "kept").mkdir()
        return number

    monkeypatch.setattr(archive, "write", last_write)
    with pytest.raises(errors.ArchiveUnavailable):
        await store.prune(at(50), archive)
    there = {line["run"]["id"] for line in documents(tmp_path / "away")}
    assert there | await ids_of(store) == {each.id for each in runs}
    assert list((tmp_path / "kept").iterdir()) == []


def test_an_archive_starts_with_a_file_without_runs(tmp_path: Path) -> None:
    """This file identifies an archive without runs; an existing archive continues and loses nothing."""
    archive = archive_in(tmp_path / "deep" / "kept")
    assert [path.name for path in (tmp_path / "deep" / "kept").iterdir()] == ["runs-00000000.ndjson.gz"]
    assert archive.last(0) == (0, [])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "runs-00000007-2026-03-01.ndjson.gz").write_bytes(gzip.compress(b""))
    assert archive_in(tmp_path / "old").last(0) == (7, [])
    assert len(list((tmp_path / "old").iterdir())) == 1


def test_servers_that_share_an_archive_may_start_it_at_once(tmp_path: Path) -> None:
    """None mistakes another server's half-written file for its own."""
    with ThreadPoolExecutor(8) as pool:
        for number in range(25):
            directory = tmp_path / f"{number}"
            for each in [pool.submit(GzipArchive(directory).prepare) for _ in range(8)]:
                each.result()
            assert [path.name for path in directory.iterdir()] == ["runs-00000000.ndjson.gz"]
            assert GzipArchive(directory).last(0) == (0, [])


@pytest.mark.parametrize("place", ["file", "file/kept", "/proc/kept", "nul\0byte"])
def test_a_location_unusable_as_an_archive_is_rejected(tmp_path: Path, place: str) -> None:
    """The error has the name of the setting, the location and what to do."""
    (tmp_path / "file").touch()
    with pytest.raises(errors.ConfigurationError, match=r"^--archive: '.*(file|kept|byte)': .*; use a directory"):
        GzipArchive(tmp_path / place).prepare()


async def test_a_temporarily_unusable_archive_does_not_prevent_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full or the file system hangs: this is reported, and nothing is deleted during this time."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with capture_logs() as logs:
        archive = await opened_archive(tmp_path)
    assert [entry["error"] for entry in logs] == [f"the archive {tmp_path}: No space left on device"]
    assert archive is not None
    with pytest.raises(errors.ArchiveUnavailable):
        archive.last(0)
    monkeypatch.setattr(wiring_archive, "_ANSWERS_WITHIN", 0.05)
    monkeypatch.setattr(GzipArchive, "prepare", lambda _: time.sleep(0.2))
    with capture_logs() as logs:
        await opened_archive(tmp_path)
    assert [entry["error"] for entry in logs] == ["no answer within 0.05 s"]


LINE = json.dumps({"run": {"id": "r", "created_at": "2020-01-01T00:00:00+00:00"}, "events": []})
WHOLE = gzip.compress(f"{LINE}\n".encode() * 50)
DAMAGED = WHOLE[:20] + bytes(byte ^ 0x55 for byte in WHOLE[20:26]) + WHOLE[26:]
OTHER_LINES = [
    *(b"[]", b"{}", b"null", b"x", b"\xff", b"[" * 5000, b'{"run":null}', b'{"run":{"id":"r"}}'),
    b'{"run":{"id":"r","created_at":5},"events":[]}',
    b'{"run":{"id":[],"created_at":"2020-01-01T00:00:00+00:00"},"events":[]}',
    b'{"run":{"id":"r","created_at":"2020-01-01T00:00:00+00:00"},"events":[{}]}',
]


def archived(run_id: str) -> ArchivedRun:
    return ArchivedRun.of(run_id, json.loads(LINE), LINE.replace('"r"', json.dumps(run_id)))


DAMAGED_FILES = {
    "cut": WHOLE[:-10],
    "changed": DAMAGED,
    "no gzip": b"x",
    **{f"line {number}": gzip.compress(line) for number, line in enumerate(OTHER_LINES)},
}
"""By name, because pytest's own names hold the bytes: of a gzip file they tell the time at which it was made."""


@pytest.mark.parametrize("raw", DAMAGED_FILES.values(), ids=DAMAGED_FILES)
def test_a_damaged_or_replaced_newest_file_is_reported_as_such(tmp_path: Path, raw: bytes) -> None:
    """Nothing is deleted because of it, and no other error ends the pruning round."""
    archive = archive_in(tmp_path)
    (tmp_path / "runs-00000001-2020-01-01.ndjson.gz").write_bytes(raw)
    with pytest.raises(errors.ArchiveUnavailable, match=f"the archive {tmp_path}: "):
        archive.last(0)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_nothing_is_written_through_entries_in_the_archive(tmp_path: Path, kind: str) -> None:
    """A link leads to another user's file, and a pipe blocks whoever opens it."""
    victim, directory = tmp_path / "victim", tmp_path / "archive"
    victim.write_text("theirs")
    archive = archive_in(directory)
    part = directory / "runs.part"
    make = {"link": lambda: part.symlink_to(victim), "fifo": lambda: os.mkfifo(part), "directory": part.mkdir}
    make[kind]()
    assert archive.write([archived("r")], 0) == 1
    assert victim.read_text() == "theirs"
    assert [document["run"]["id"] for document in documents(directory)] == ["r"]


def test_concurrent_writers_do_not_replace_each_others_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced leader may not have noticed: the runs of both files are about to be deleted."""
    first, second = archive_in(tmp_path), GzipArchive(tmp_path)
    lines, others = gzip_archive._lines, iter(["second"])

    def reads_back_late(path: Path) -> list[str]:
        for run_id in others:
            assert second.write([archived(run_id)], 0) == 1
        return lines(path)

    monkeypatch.setattr(gzip_archive, "_lines", reads_back_late)
    with pytest.raises(errors.ArchiveUnavailable, match="File exists"):
        first.write([archived("first")], 0)
    assert [document["run"]["id"] for document in documents(tmp_path)] == ["second"]
    assert first.write([archived("first")], 0) == 2
    assert [document["run"]["id"] for document in documents(tmp_path)] == ["second", "first"]
    assert not [*tmp_path.glob("*.part")]


def test_no_file_is_replaced_without_hard_links_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some object-store and network file systems have no hard links."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    archive = archive_in(tmp_path)
    monkeypatch.setattr(os, "link", refuse)
    assert archive.write([archived("a")], 0) == 1
    assert [document["run"]["id"] for document in documents(tmp_path)] == ["a"]
    monkeypatch.setattr(GzipArchive, "_files", lambda _: [(0, tmp_path)])  # as one sees it that has just looked
    with pytest.raises(errors.ArchiveUnavailable, match="File exists"):
        archive.write([archived("b")], 0)


def test_a_start_removes_the_leftovers_of_a_killed_writer(tmp_path: Path) -> None:
    """Only after a day: another server may still be writing a younger file."""
    archive = archive_in(tmp_path)
    old, young = tmp_path / "old.part", tmp_path / "young.part"
    for part in (old, young):
        part.write_bytes(b"half of a fi")
    os.utime(old, (0, 0))
    archive.prepare()
    assert (old.exists(), young.exists()) == (False, True)


@pytest.mark.parametrize("unnamed", [False, True])
async def test_a_kill_at_any_point_leaves_each_run_once(
    store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    """The kill hits while a file is written, when it gets its name, or between the deletions of its runs."""
    monkeypatch.setattr(old_runs, "RUNS_PER_FILE", 4)
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
        await store.prune(at(50), archive_in(tmp_path))
    await store.prune(at(50), archive_in(tmp_path))
    assert [line["run"]["id"] for line in documents(tmp_path)] == [each.id for each in runs]
    assert await ids_of(store) == set()


async def test_a_run_changed_since_it_was_archived_stays(store: SqlStore, tmp_path: Path) -> None:
    """It is archived again in its new state; the later line counts."""
    await keep(store, closed(1))
    with pytest.raises(Killed):
        await store.prune(at(50), DyingArchive(tmp_path, at_file=1))
    [run_id] = await ids_of(store)
    await store.transact(lambda tx: tx.append([event("undo_ordered", run_id)]))
    assert await store.prune(at(50), archive_in(tmp_path)) == 1
    assert [[each["kind"] for each in line["events"]] for line in documents(tmp_path)] == [
        ["started"],
        ["started", "undo_ordered"],
    ]


DOOMED = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from tests.contract.run_store_values import at
from trainmedic_server.adapters import gzip_archive
from trainmedic_server.adapters.gzip_archive import GzipArchive
from trainmedic_server.adapters.sql_store import old_runs
from trainmedic_server.adapters.sql_store.store import SqlStore

async def main():
    store = SqlStore.open(sys.argv[1])
    print("open", flush=True)
    archive = GzipArchive(Path(sys.argv[2]))
    archive.prepare()
    await store.prune(at(50_000), archive)
    await store.close()

old_runs.RUNS_PER_FILE = 100
asyncio.run(main())
"""


async def test_sigkill_during_archiving_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    """The kill comes at a random moment, and a second round runs to the end."""
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
