"""The kernel's log by ``/dev/kmsg``, by the journal, and what a panic has left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.unit.agent.log_reading.journal import Journal
from tests.unit.agent.log_reading.reading import Reading, policy_of
from trainmedic_agent.log_reading import kernel_log, pstore
from trainmedic_agent.log_reading.kernel_log import JournalReader, KernelStream, KmsgReader
from trainmedic_agent.log_reading.log_policy import KernelLog, KernelReading
from trainmedic_logs.domain.finding import Origin, TimeSource

ORIGIN = Origin("kernel", "n1", stream="/dev/kmsg", generation="boot-1")


class Ring:
    """What ``/dev/kmsg`` gives: one record for a call, EAGAIN at the end, EPIPE where it was overwritten."""

    def __init__(self, *records: bytes | type[OSError]) -> None:
        self.records = list(records)

    def read(self, _: int, most: int) -> bytes:
        if not self.records:
            raise BlockingIOError
        record = self.records.pop(0)
        if isinstance(record, bytes):
            assert len(record) <= most, "a record that does not fit is refused with EINVAL"
            return record
        raise record


@pytest.fixture
def kmsg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    """A ring in the place of the device; the reader opens an empty file for it."""
    ring = Ring()
    (tmp_path / "kmsg").touch()
    monkeypatch.setattr(kernel_log.os, "read", ring.read)
    return ring


def record(number: int, text: str, seconds: float = 12.5) -> bytes:
    return f"4,{number},{round(seconds * 1e6)},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:18:00.0\n".encode()


def test_records_are_read_from_the_first_requested_one(tmp_path: Path, kmsg: Ring) -> None:
    """Member lines are omitted; records read before a restart are skipped."""
    kmsg.records = [record(0, "zero"), record(1, "one"), record(2, "two")]
    reader = KmsgReader(1, str(tmp_path / "kmsg"))
    assert reader.read() == [(1, b"4,1,12500000,-;one"), (2, b"4,2,12500000,-;two")]
    assert (reader.lost, reader.place_json()) == (0, {"by": "kmsg", "next": 3})
    reader.close()


def test_records_lost_by_the_ring_buffer_are_counted(tmp_path: Path, kmsg: Ring) -> None:
    """The lines were overwritten before the agent started, or while it read."""
    kmsg.records = [record(5, "five"), BrokenPipeError, record(9, "nine")]
    reader = KmsgReader(3, str(tmp_path / "kmsg"))
    assert [number for number, _ in reader.read()] == [5, 9]
    assert reader.lost == 2 + 3
    reader.close()


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[Reading]:
    reading = Reading(tmp_path / "state", policy_of())
    yield reading
    reading.kill()


def test_kernel_lines_have_the_time_at_which_they_were_logged(tmp_path: Path, kmsg: Ring, reading: Reading) -> None:
    """The time comes from the time since boot; excerpts have the usual format of the kernel log."""
    kmsg.records = [record(0, "before"), record(1, "MARK 1", 60.0), record(2, "after", 61.0)]
    booted_at = reading.began - timedelta(hours=2)
    stream = KernelStream(KmsgReader(0, str(tmp_path / "kmsg")), ORIGIN, booted_at, {})
    stream.poll(reading.runner, reading.counters, reading.now())
    reading.runner.store_due()
    (update,) = reading.updates()
    assert update.finding.first_at == booted_at + timedelta(minutes=1)
    assert update.finding.time_source is TimeSource.LINE
    reading.elapsed += 4
    stream.poll(reading.runner, reading.counters, reading.now())
    reading.runner.store_due()
    excerpt = reading.updates()[-1].excerpt
    assert excerpt is not None
    assert excerpt.lines == ("[   12.500000] before", "[   60.000000] MARK 1", "[   61.000000] after")
    assert reading.store.positions()["kernel"]["place"] == {"by": "kmsg", "next": 3, "boot": "boot-1"}
    stream.reader.close()


def test_a_new_kernel_line_has_the_current_time(tmp_path: Path, kmsg: Ring, reading: Reading) -> None:
    """The kernel log's clock is not corrected; older lines keep the time that they state."""
    booted_at = reading.began - timedelta(hours=2)
    stream = KernelStream(KmsgReader(0, str(tmp_path / "kmsg")), ORIGIN, booted_at, {})
    for mark, seconds in ((1, 7000.0), (2, 7100.0), (3, 7199.5)):
        kmsg.records = [record(mark, f"MARK {mark}", seconds)]
        stream.poll(reading.runner, reading.counters, reading.now())
        stream.poll(reading.runner, reading.counters, reading.now())
    reading.runner.store_due()
    at = {update.finding.fields["n"]: (update.finding.first_at - booted_at) for update in reading.updates()}
    assert at == {
        "1": timedelta(seconds=7000),
        "2": timedelta(hours=2),
        "3": timedelta(seconds=7199.5),
    }
    stream.reader.close()


def test_after_a_boot_reading_starts_at_its_first_line(tmp_path: Path, kmsg: Ring) -> None:
    """Numbers and cursors of another boot are invalid."""
    kept = {"by": "kmsg", "next": 700, "boot": "boot-1"}
    kmsg.records = [record(0, "zero")]
    reader = kernel_log.open_reader(KernelReading.KMSG, kept, "boot-2", str(tmp_path / "kmsg"))
    assert [number for number, _ in reader.read()] == [0]
    reader.close()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


def test_the_journal_is_read_like_kmsg(journal: Journal) -> None:
    """It has an increasing position, the kernel's own time, and bytes that are no text."""
    journal.add("c1", 1_000_000, "one\ntwo")
    journal.add("c2", 1_000_000, list(b"caf\xe9"))
    with journal.entries.open("a") as file:
        file.write("{not json\n")
    journal.add("c3", 2_000_000, "three")
    reader = JournalReader(0, "", str(journal.program))
    lines = journal.read(reader, 3)
    reader.close()
    assert lines == [
        b"3,16000000,1000000,-;one two",
        b"3,16000001,1000000,-;caf\xe9",
        b"3,32000000,2000000,-;three",
    ]
    assert reader.place_json() == {"by": "journal", "next": 32000001, "cursor": "c3"}
    assert "--dmesg --output=json" in journal.calls.read_text()


def test_lines_of_two_processors_are_all_read_in_journal_order(journal: Journal) -> None:
    """Each takes a line's time before it stores the line. Reading from the start gives the same positions."""
    journal.add("c1", 1_000_000, "NVRM: Xid of one")
    journal.add("c2", 999_999, "NVRM: Xid of another")
    expected = [b"3,16000000,1000000,-;NVRM: Xid of one", b"3,16000001,1000000,-;NVRM: Xid of another"]
    reader = JournalReader(0, "", str(journal.program))
    assert journal.read(reader, 2) == expected
    reader.close()
    journal.add("c3", 2_000_000, "new")
    reader = JournalReader(16_000_001, "", str(journal.program))
    assert journal.read(reader, 1) == [b"3,32000000,2000000,-;new"]
    reader.close()


def test_a_line_with_an_earlier_time_than_the_last_before_a_restart_is_read(journal: Journal) -> None:
    """The same holds for an equal time. The cursor shows that they were not read."""
    journal.add("c2", 999_999, "of another processor")
    journal.add("c3", 1_000_000, "of the same time")
    reader = JournalReader(16_000_000, "c1", str(journal.program))
    assert journal.read(reader, 2) == [
        b"3,16000001,1000000,-;of another processor",
        b"3,16000002,1000000,-;of the same time",
    ]
    reader.close()


def test_any_number_of_lines_after_another_processors_is_read(journal: Journal) -> None:
    """For example, all lines of a boot's first microsecond have the same time."""
    journal.add("c0", 1_000_000, "ahead")
    for number in range(100):
        journal.add(f"c{number + 1}", 999_900 + number, f"behind {number}")
    reader = JournalReader(0, "", str(journal.program))
    lines = journal.read(reader, 101)
    reader.close()
    assert [line.partition(b";")[2] for line in lines] == [b"ahead", *(b"behind %d" % each for each in range(100))]
    times = [int(line.split(b",")[2]) for line in lines]
    assert times == sorted(times)
    assert times[-1] - times[0] < 10


def test_a_cursor_lost_by_the_journal_loses_and_repeats_no_line(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was rotated away: reading starts at the boot's first line, and skips lines read before."""
    monkeypatch.setattr(kernel_log, "_RESTART_SECONDS", 0.05)
    journal.add("c2", 1_000_000, "old")
    journal.add("c3", 2_000_000, "new")
    reader = JournalReader(16_000_000, "gone", str(journal.program))
    lines = journal.read(reader, 1)
    reader.close()
    assert lines == [b"3,32000000,2000000,-;new"]
    assert [("after-cursor" in call) for call in journal.calls.read_text().splitlines()] == [True, False]


def test_the_first_working_source_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is device, journal, file; a source named by the policy is used unconditionally."""
    missing = str(tmp_path / "missing")
    monkeypatch.setattr(kernel_log.shutil, "which", lambda name: f"/bin/{name}")
    (tmp_path / "journal").mkdir()
    (tmp_path / "kmsg").touch()
    anyhow = KernelLog(KernelReading.ANY)
    assert kernel_log.choose_reading(anyhow, str(tmp_path / "kmsg"), [missing]) is KernelReading.KMSG
    assert kernel_log.choose_reading(anyhow, missing, [str(tmp_path / "journal")]) is KernelReading.JOURNAL
    assert kernel_log.choose_reading(anyhow, missing, [missing]) is KernelReading.FILE
    assert kernel_log.choose_reading(KernelLog(KernelReading.KMSG), missing, [missing]) is KernelReading.KMSG


PANIC = """Panic#1 Part1
<4>[  511.1] MARK 1
<0>[  512.345678] Kernel panic - not syncing: Fatal exception
"""


def test_the_record_of_a_panic_is_read_once(tmp_path: Path, reading: Reading) -> None:
    """It has the time of the record, which is before this boot, and the names that systemd gives."""
    path = tmp_path / "pstore" / "1767225600" / "dmesg-efi-1"
    path.parent.mkdir(parents=True)
    path.write_text(PANIC)
    (path.parent / "dmesg-efi-2.enc.z").write_bytes(b"packed")
    os.utime(path, (1767225600, 1767225600))
    tops = [str(tmp_path / "pstore"), str(tmp_path / "missing")]
    assert pstore.read_records(reading.runner, ORIGIN, {}, tops) == 1
    reading.runner.store_due()
    (update,) = reading.last_words().values()
    assert update.finding.first_at.timestamp() == 1767225600
    assert update.booted_at is not None
    assert update.finding.last_at < update.booted_at
    assert update.excerpt is not None
    assert update.excerpt.lines[1].endswith("MARK 1")
    kept = reading.store.positions()["pstore"]["place"]
    assert pstore.read_records(reading.runner, ORIGIN, kept, tops) == 0


def test_a_new_panic_is_read_next_to_many_old_ones(
    tmp_path: Path, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pstore, "_MOST_RECORDS", 3)
    for number in range(4):
        path = tmp_path / "pstore" / str(number) / "dmesg-efi-1"
        path.parent.mkdir(parents=True)
        path.write_text(PANIC)
        os.utime(path, (1767225600 + number, 1767225600 + number))
    tops = [str(tmp_path / "pstore")]
    assert pstore.read_records(reading.runner, ORIGIN, {}, tops) == 3
    reading.runner.store_due()
    kept = reading.store.positions()["pstore"]["place"]
    path = tmp_path / "pstore" / "9" / "dmesg-efi-1"
    path.parent.mkdir()
    path.write_text(PANIC)
    assert pstore.read_records(reading.runner, ORIGIN, kept, tops) == 1
