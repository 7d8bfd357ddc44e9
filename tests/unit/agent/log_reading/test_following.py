"""Following files that grow, are renamed, truncated, deleted; and what is not read."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.unit.agent.log_reading.reading import Reading, policy_of
from trainmedic_agent.disk import removal
from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.log_opening.node_files import NamedBy
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading import files, followed_file, log_files, log_store, rule_runner
from trainmedic_agent.log_reading.log_files import FilePosition, GrowingFile
from trainmedic_agent.log_reading.streams import BYTES_AROUND


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    directory.mkdir()
    return directory


@pytest.fixture
def reading(tmp_path: Path, logs: Path) -> Iterator[Reading]:
    """An agent that has read here before, so that new files are read from their beginning."""
    reading = Reading(tmp_path / "state", policy_of(files=[f"{logs}/*.log"]))
    reading.step()
    yield reading
    reading.kill()


def write(path: Path, *marks: int, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("".join(f"MARK {mark}{end}" for mark in marks))


def test_added_content_is_read_once(reading: Reading, logs: Path) -> None:
    """This holds over many checks, also when nothing is added."""
    for mark in range(4):
        write(logs / "a.log", mark)
        reading.step()
        reading.step()
    assert (reading.marks(), reading.counted()) == (["0", "1", "2", "3"], 4)


def test_a_partial_line_waits_for_its_end(reading: Reading, logs: Path) -> None:
    """It is one line, whenever its parts arrive."""
    write(logs / "a.log", 12, end="")
    reading.step()
    assert reading.marks() == []
    write(logs / "a.log", 7)
    (logs / "a.log").write_text((logs / "a.log").read_text())
    reading.step()
    assert [update.finding.line for update in reading.updates()] == ["MARK 12MARK 7"]


def test_a_partial_line_that_never_ends_counts_after_a_while(reading: Reading, logs: Path) -> None:
    """It holds the last words of a killed program."""
    write(logs / "a.log", 1, end="")
    reading.step()
    reading.read(followed_file.HALF_LINE_SECONDS + 1)
    assert reading.marks() == ["1"]


def test_a_renamed_file_is_read_to_its_end_and_the_new_one_from_its_start(reading: Reading, logs: Path) -> None:
    """By default, logrotate renames; the program writes to the old file until it is notified."""
    write(logs / "a.log", 1)
    reading.step()
    write(logs / "a.log", 2)
    with (logs / "a.log").open("a") as program:
        (logs / "a.log").rename(logs / "a.log.1")
        program.write("MARK 3\n")
        program.flush()
        write(logs / "a.log", 4)
        reading.step()
        program.write("MARK 5\n")
    reading.step()
    assert (sorted(reading.marks()), reading.counted()) == (["1", "2", "3", "4", "5"], 5)


def test_a_file_rotated_during_downtime_is_read_to_its_end(reading: Reading, logs: Path) -> None:
    """The file is recognised by its inode under its present name."""
    write(logs / "a.log", 1)
    reading.step()
    reading.kill()
    write(logs / "a.log", 2)
    (logs / "a.log").rename(logs / "a.log.1")
    write(logs / "a.log", 3)
    reading.start()
    reading.step()
    assert (sorted(reading.marks()), reading.counted()) == (["1", "2", "3"], 3)


def test_a_copytruncated_file_is_read_again_and_its_copy_is_not(reading: Reading, logs: Path) -> None:
    """logrotate does this with copytruncate."""
    write(logs / "a.log", 1, 2)
    reading.step()
    shutil.copy(logs / "a.log", logs / "a.log.1")
    os.truncate(logs / "a.log", 0)
    write(logs / "a.log", 3)
    reading.step()
    assert (sorted(reading.marks()), reading.counted()) == (["1", "2", "3"], 3)
    assert reading.counters.truncations == 1


def test_a_file_that_outgrew_its_old_end_after_a_truncation_is_read_from_its_start(
    reading: Reading, logs: Path
) -> None:
    """Its size alone would not show the truncation."""
    write(logs / "a.log", 1)
    reading.step()
    os.truncate(logs / "a.log", 0)
    write(logs / "a.log", 2, 3, 4)
    reading.step()
    assert (sorted(reading.marks()), reading.counted()) == (["1", "2", "3", "4"], 4)


def test_the_hole_left_by_a_program_after_a_truncation_is_not_read(reading: Reading, logs: Path) -> None:
    """A writer that does not append leaves a terabyte of zeros before the next line."""
    with (logs / "a.log").open("w") as program:
        program.write("MARK 1\n")
        program.flush()
        reading.step()
        program.seek(1 << 40)
        program.write("MARK 2\n")
        program.flush()
        os.truncate(logs / "a.log", 0)
        program.write("MARK 3\n")
        program.flush()
        reading.step()
    assert sorted(reading.marks()) == ["1", "3"]
    assert reading.counters.bytes_left_out == 0


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_shrunk_log_is_read_further(is_killed: bool, reading: Reading, logs: Path) -> None:
    """A rule with ``do: shrink`` turns its start into a hole. The rest was read already."""
    log = logs / "a.log"
    log.write_text("MARK 1\n" + "padding\n" * 4000 + "MARK 2\n" + "padding\n" * 20)
    reading.step()
    assert reading.marks() == ["1", "2"]
    if is_killed:
        reading.kill()
        reading.start()
    with log.open("r+b") as file:
        removal._punch_hole(file.fileno(), 16384)
    write(log, 3)
    reading.step()
    reading.step()
    assert reading.marks() == ["1", "2", "3"]


def test_a_deleted_file_is_read_to_its_end_and_then_released(reading: Reading, logs: Path) -> None:
    """Its disk space and its memory are released a minute after its last line."""
    write(logs / "a.log", 1)
    reading.step()
    with (logs / "a.log").open("a") as program:
        (logs / "a.log").unlink()
        program.write("MARK 2\nMARK 3")
    reading.step()
    for _ in range(8):
        reading.step(10)
    assert sorted(reading.marks()) == ["1", "2", "3"]
    assert reading.store.positions() == {}
    assert not [link for link in os.listdir("/proc/self/fd") if "a.log" in _target(link)]  # noqa: PTH208


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    except OSError:
        return ""


def test_a_quiet_file_is_closed_and_reopened_when_it_grows(reading: Reading, logs: Path) -> None:
    """So no cleaning treats it as in use."""
    write(logs / "a.log", 1)
    reading.step()
    reading.read(files.CLOSED_AFTER + 1)
    reading.look()
    assert not [link for link in os.listdir("/proc/self/fd") if "a.log" in _target(link)]  # noqa: PTH208
    write(logs / "a.log", 2)
    reading.step()
    assert (reading.marks(), reading.counted()) == (["1", "2"], 2)


def test_a_new_file_with_a_reused_inode_number_is_a_new_file(reading: Reading, logs: Path) -> None:
    """File systems reuse numbers at once."""
    write(logs / "a.log", 1)
    reading.step()
    reading.read(files.CLOSED_AFTER + 1)
    (logs / "a.log").unlink()
    for name in ("b.log", "c.log", "d.log"):
        write(logs / name, 2)
    reading.step()
    found = {update.finding.origin.stream for update in reading.updates() if update.finding.fields["n"] == "2"}
    assert found == {f"{logs}/{name}" for name in ("b.log", "c.log", "d.log")}


def test_a_new_agent_on_a_node_reads_the_end_of_existing_files(tmp_path: Path, logs: Path) -> None:
    """It reads a megabyte of yesterday's files, and nothing of files not written since the day before."""
    (logs / "a.log").write_text("MARK 1\n" + f"{'x' * 1000}\n" * 2000 + "MARK 2\n")
    (logs / "old.log").write_text("MARK 3\n")
    os.utime(logs / "old.log", (1e9, 1e9))
    reading = Reading(tmp_path / "state", policy_of(files=[f"{logs}/*.log"]))
    reading.step()
    assert reading.marks() == ["2"]
    assert reading.counters.bytes_left_out > 500_000
    reading.kill()


def test_a_truncation_right_after_a_read_is_noticed(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is identified by what was read, not by what is in its place a moment later."""
    path = logs / "a.log"
    path.write_bytes(b"MARK 1\n")
    facts = path.stat()
    file = GrowingFile.open(str(path), FilePosition(str(path), facts.st_dev, facts.st_ino, since=0))
    assert file.look()
    real = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        raw = real(fd, size, offset)
        if size == log_files.LARGEST_READ:
            path.write_bytes(b"MARK 2\nMARK 3\n")
        return raw

    monkeypatch.setattr(log_files.os, "pread", pread)
    assert file.read() == [(0, b"MARK 1")]
    assert not file.look()
    file.close()


def test_a_reader_far_behind_continues_near_the_end(
    reading: Reading, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipped lines are counted."""
    monkeypatch.setattr(log_files, "FARTHEST_BEHIND", 10_000)
    monkeypatch.setattr(log_files, "_KEPT_BEHIND", 1000)
    (logs / "a.log").write_text("MARK 1\n" + "x\n" * 10_000 + "MARK 2\n")
    reading.step()
    assert reading.marks() == ["2"]
    assert reading.counters.bytes_left_out == pytest.approx(19_000, abs=100)


def test_a_flood_is_sampled_and_counted_and_other_files_have_their_turn(tmp_path: Path, logs: Path) -> None:
    """A hundred lines a second are read, with ten seconds saved up; of the rest, every hundredth."""
    reading = Reading(tmp_path / "state", policy_of(files=[f"{logs}/*.log"], max_lines=100))
    reading.step()
    (logs / "flood.log").write_text("x\n" * 100_000)
    write(logs / "quiet.log", 1)
    reading.step()
    assert reading.marks() == ["1"]
    assert reading.counters.lines.all() == {"training": 100_001}
    assert reading.counters.lines_left_out.all()["training"] == pytest.approx(99_000 * 0.99, abs=50)
    reading.kill()


def test_kernel_lines_are_never_sampled(tmp_path: Path, logs: Path) -> None:
    """The same holds for lines of processes that report for the kernel."""
    policy = policy_of(files=[{"path": f"{logs}/*.log", "source": "fabric-manager"}], max_lines=10)
    reading = Reading(tmp_path / "state", policy)
    reading.step()
    write(logs / "a.log", *range(1500))
    reading.step()
    assert reading.counted() == 1500
    reading.kill()


def test_symbolic_and_hard_links_pipes_and_sockets_are_not_read(reading: Reading, tmp_path: Path, logs: Path) -> None:
    """Links are not followed, and no process that waits at a pipe's other end is woken."""
    write(tmp_path / "secret", 1)
    (logs / "link.log").symlink_to(tmp_path / "secret")
    os.link(tmp_path / "secret", logs / "name.log")
    os.mkfifo(logs / "pipe.log")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(logs / "socket.log"))
        reading.step()
        reading.step()
    assert reading.marks() == []
    assert reading.counters.refused == {"link": 1, "special": 2, "second_name": 1}
    with pytest.raises(OSError, match="No such device or address"):  # nobody has it open for reading
        os.open(logs / "pipe.log", os.O_WRONLY | os.O_NONBLOCK)


def test_a_directory_that_is_a_link_is_not_entered(tmp_path: Path, logs: Path) -> None:
    """This holds on the way to the first directory and below it."""
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere" / "a.log", 1)
    (logs / "inner").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "way").symlink_to(logs)
    (logs / "real").mkdir()
    write(logs / "real" / "a.log", 2)
    paths = [f"{logs}/*/*.log", f"{tmp_path}/way/real/*.log"]
    reading = Reading(tmp_path / "state", policy_of(files=paths))
    reading.step()
    assert reading.marks() == ["2"]
    reading.kill()


def test_hostile_names_are_read_like_others(reading: Reading, logs: Path) -> None:
    """The names contain line feeds, invalid text and terminal controls."""
    names = [b"a\nb.log", b"\xff\xfe.log", b"\x1b[2J.log", b" .log"]
    for mark, name in enumerate(names):
        path = os.fsencode(logs) + b"/" + name
        with open(path, "w") as file:  # noqa: PTH123
            file.write(f"MARK {mark}\n")
    reading.step()
    reading.kill()
    reading.start()
    reading.step()
    assert (sorted(reading.marks()), reading.counted()) == (["0", "1", "2", "3"], 4)


def test_nul_bytes_and_very_long_lines_do_no_harm(reading: Reading, logs: Path) -> None:
    """The next line is read."""
    with (logs / "a.log").open("wb") as file:
        file.write(b"\0" * 100 + b"MARK 1\n" + b"y" * 3_000_000 + b"MARK 2\nMARK 3\n")
    reading.step()
    assert reading.marks() == ["1", "3"]
    assert reading.counters.bytes_left_out == pytest.approx(3_000_000, abs=10_000)


def test_a_file_that_vanishes_before_it_is_opened_does_no_harm(reading: Reading, logs: Path) -> None:
    """The same holds for its directory."""
    write(logs / "a.log", 1)
    reading.look()
    shutil.rmtree(logs)
    reading.read()
    logs.mkdir()
    write(logs / "b.log", 2)
    reading.step()
    assert reading.marks() == ["2"]


def test_the_most_recently_written_files_fill_the_policys_limit(tmp_path: Path, logs: Path) -> None:
    """Files beyond the limit are counted."""
    for number in range(5):
        write(logs / f"{number}.log", number)
        os.utime(logs / f"{number}.log", (2e9 + number, 2e9 + number))
    reading = Reading(tmp_path / "state", policy_of(files=[f"{logs}/*.log"], max_files=2))
    reading.step()
    assert reading.marks() == ["3", "4"]
    assert reading.counters.refused == {"too_many": 3}
    reading.kill()


def test_a_finding_is_followed_by_the_lines_around_it(reading: Reading, logs: Path) -> None:
    """Fifty lines on each side, masked, follow a few seconds after the finding, which is not delayed."""
    before = [f"step {number}" for number in range(70)]
    (logs / "a.log").write_text("\n".join([*before, "MARK 1", "password=hunter2-and-more"]) + "\n")
    reading.step()
    (first,) = reading.updates()
    assert first.excerpt is None
    with (logs / "a.log").open("a") as file:
        file.write("".join(f"after {number}\n" for number in range(60)))
    reading.read(4)
    second = reading.updates()[-1]
    assert second.finding.id == first.finding.id
    assert second.excerpt is not None
    assert second.excerpt.lines[second.excerpt.at] == "MARK 1"
    assert second.excerpt.lines[0] == "step 20"
    assert second.excerpt.lines[second.excerpt.at + 1] == "password=***"
    assert len(second.excerpt.lines) == 101


def test_lines_around_a_finding_are_also_sent_after_a_kill(reading: Reading, logs: Path) -> None:
    """They are read from the file again."""
    write(logs / "a.log", 1)
    reading.step()
    reading.kill()
    reading.start()
    reading.step()
    update = reading.updates()[-1]
    assert update.excerpt is not None
    assert update.excerpt.lines == ("MARK 1",)


@pytest.mark.parametrize("ending", ["kill", "error"])
def test_a_block_is_not_lost_if_reading_ends_before_it_was_read_again(
    reading: Reading, logs: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    def failing(_: GrowingFile) -> bool:
        raise OSError(errno.EIO, "failing")

    (logs / "a.log").write_text("Traceback (most recent call last):\n  MARK 1\n")
    reading.step()
    reading.kill()
    reading.start()
    with monkeypatch.context() as patch:
        patch.setattr(GrowingFile, "look", failing)
        reading.step()
    if ending == "kill":
        reading.kill()
        reading.start()
    with (logs / "a.log").open("a") as file:
        file.write("ValueError: bad\n")
    reading.step()
    reading.step(10)
    assert reading.marks() == ["1"]


def test_an_excerpt_starts_with_a_whole_line(reading: Reading, logs: Path) -> None:
    """Where lines are long, there are fewer of them."""
    (logs / "a.log").write_text(f"{'x' * BYTES_AROUND}\nshort\nMARK 1\n")
    reading.step()
    reading.read(4)
    excerpt = reading.updates()[-1].excerpt
    assert excerpt is not None
    assert excerpt.lines == ("short", "MARK 1")


def test_reading_waits_for_a_disk_that_cannot_be_written(
    reading: Reading, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings are kept until they can be written, and a bounded number is read during this time."""
    monkeypatch.setattr(rule_runner, "_MOST_UNWRITTEN", 3)
    commit = reading.store.commit

    def full(*_: object) -> None:
        raise JournalUnavailable("the disk is full")

    monkeypatch.setattr(reading.store, "commit", full)
    write(logs / "a.log", 1, 2, 3)
    reading.step()
    write(logs / "a.log", 4)
    reading.step()
    assert (reading.updates(), reading.counters.problem) == ([], "the disk is full")
    assert reading.counters.lines.all() == {"training": 3}
    monkeypatch.setattr(reading.store, "commit", commit)
    reading.runner.store_due()
    reading.step()
    assert (reading.marks(), reading.counters.problem) == (["1", "2", "3", "4"], "")


def test_old_content_does_not_count_as_just_printed(tmp_path: Path, logs: Path) -> None:
    """A line without a time has that of the file's last write; one that was waited for has its arrival time."""
    reading = Reading(tmp_path / "state", policy_of(files=[f"{logs}/*.log"]))
    write(logs / "a.log", 1)
    before = reading.began.timestamp() - 5 * 3600
    os.utime(logs / "a.log", (before, before))
    reading.step()
    write(logs / "a.log", 2)
    os.utime(logs / "a.log", (before, before + 1))  # the clock of the server that keeps it is hours behind
    reading.step()
    first, second = (update.finding.first_at for update in reading.last_words().values())
    assert first.timestamp() == pytest.approx(before)
    assert second == reading.now()
    reading.kill()


def test_waiting_findings_are_bounded(reading: Reading, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are dropped and counted, over a restart too. Numbered ones are no more than a batch."""
    monkeypatch.setattr(log_store, "MOST_WAITING_BYTES", 3000)
    for mark in range(20):
        write(logs / "a.log", mark)
        reading.step()
    waiting = reading.store.number_next(100)
    assert sum(len(body) for _, body in waiting) <= 3000
    assert "19" in reading.marks()
    lost = reading.counters.findings_lost
    assert lost >= 15
    reading.kill()
    reading.start()
    assert reading.counters.findings_lost == lost


def test_an_open_file_renamed_to_another_jobs_name_stays_with_its_job(tmp_path: Path, logs: Path) -> None:
    """In a directory shared by users, one of them can give a file any name."""
    reading = Reading(tmp_path / "state", policy_of(files=[f"{logs}/{{job}}.log"]))
    reading.step()
    write(logs / "own.log", 1)
    reading.step()
    (logs / "own.log").rename(logs / "victim.log")
    write(logs / "victim.log", 2)
    reading.step()
    write(logs / "victim.log", 3)
    reading.step()
    assert [(update.finding.origin.job, update.finding.line) for update in reading.updates()] == [
        ("own", f"MARK {mark}") for mark in (1, 2, 3)
    ]
    reading.kill()


def test_a_file_whose_origin_cannot_change_does_not_block_opening_others(
    reading: Reading, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file system fails at that moment."""
    write(logs / "a.log", 1)
    reading.step()
    failing = Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
    monkeypatch.setattr(followed_file.FollowedFile, "has_origin", lambda *_: False)
    monkeypatch.setattr(followed_file.FollowedFile, "change_origin", failing)
    write(logs / "b.log", 2)
    reading.step()
    assert failing.called
    assert reading.marks() == ["1", "2"]


@pytest.mark.parametrize("limit", [errno.EMFILE, errno.ENFILE])
def test_files_beyond_the_limit_of_open_files_are_counted(limit: int, tmp_path: Path, logs: Path) -> None:
    """They do not count as gone, whether the limit is the process's or the node's."""

    class Full(OwnFiles):
        def open(self, path: str, named_by: NamedBy | None = None) -> int:
            raise OSError(limit, "Too many open files", path)

    reading = Reading(tmp_path / "state", policy_of(files=[f"{logs}/*.log"]), opened_by=Full())
    write(logs / "a.log", 1)
    reading.step()
    assert reading.counters.refused == {"too_many": 1}
    reading.kill()
