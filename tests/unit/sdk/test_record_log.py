"""What a rank writes of its steps and events, line by line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs import eventually
from trainmedic.errors import ConfigurationError
from trainmedic.job import record_log, rotating_file
from trainmedic.job.progress import Progress
from trainmedic.job.record_log import Note, RecordLog, readable
from trainmedic.job.reports import JobReports
from trainmedic.job.rotating_file import RotatingFile
from trainmedic.settings import LogSettings, Settings, resolve_logs


class Rank:
    """Rank 7 of a job, with its records."""

    def __init__(self, log_dir: Path, interval: int = 10, attempt: int = 1) -> None:
        settings = Settings("llm-1", 7, 16, None, None, log_dir)
        logs = LogSettings(log_dir, attempt, 3, 0, interval)
        self.progress = Progress()
        self.records = RecordLog(settings, logs, "gpu-07", self.progress)
        self.reports = JobReports(self.progress, self.records)
        self.directory = log_dir / "llm-1" / f"attempt-{attempt}"
        self._file = self.directory / "rank-7.jsonl"

    def written(self) -> list[dict[str, Any]]:
        self.records.close(None, 10.0)
        assert not self._file.exists() or self._file.read_bytes().endswith(b"\n")
        return self.lines()

    def lines(self) -> list[dict[str, Any]]:
        """All whole ones: the last may be half there while it is written."""
        if not self._file.exists():
            return []
        return [json.loads(line, parse_constant=pytest.fail) for line in self._file.read_text().split("\n")[:-1]]


def of_event(records: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [record for record in records if record["event"] == event]


def test_every_tenth_step_makes_a_record_that_says_whose_it_is(tmp_path: Path) -> None:
    """From the first one on, whatever the steps' numbers are."""
    rank = Rank(tmp_path)
    for step in range(101, 132):
        rank.reports.report(step, loss=step / 100, grad_norm=0.5, learning_rate=1e-4, samples=8, epoch=0.4)
    steps = of_event(rank.written(), "step")
    assert [record["step"] for record in steps] == [101, 111, 121, 131]
    who = {"job": "llm-1", "attempt": 1, "rank": 7, "local_rank": 3, "node_rank": 0, "node": "gpu-07"}
    last = steps[-1]
    assert {**last, **who, "level": "info", "loss": 1.31, "grad_norm": 0.5, "learning_rate": 1e-4} == last
    assert last["samples_per_s"] > 0
    assert last["ts"].endswith("Z")
    assert (rank.directory / "rank-7.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_tensor_is_read_by_the_thread_and_as_it_was(tmp_path: Path) -> None:
    """Scripts reuse theirs: what comes later must not be written for what was."""
    rank = Rank(tmp_path)
    loss = torch.tensor(2.5)
    rank.reports.report(1, loss=loss)
    loss.fill_(9.0)
    (step,) = of_event(rank.written(), "step")
    assert step["loss"] == 2.5


def test_a_loss_is_written_once(tmp_path: Path) -> None:
    """A framework that says it every fifty steps has not seen it again in between."""
    rank = Rank(tmp_path)
    for step in range(1, 42):
        rank.progress.tensors_due_at = 0.0
        rank.reports.report(step, loss=2.0 if step == 5 else None)
    steps = of_event(rank.written(), "step")
    assert [(record["step"], record.get("loss")) for record in steps] == [
        (1, None),
        (11, 2.0),
        (21, None),
        (31, None),
        (41, None),
    ]


def test_after_a_rollback_the_steps_are_written_again(tmp_path: Path) -> None:
    """With their own loss."""
    rank = Rank(tmp_path, interval=1)
    for step, loss in ((50, 1.0), (51, 9.0), (31, 1.5), (32, 1.4)):
        rank.reports.report(step, loss=loss)
    steps = of_event(rank.written(), "step")
    assert [(record["step"], record["loss"]) for record in steps] == [(50, 1.0), (51, 9.0), (31, 1.5), (32, 1.4)]


def test_a_number_that_is_not_finite_is_text(tmp_path: Path) -> None:
    """So that the line stays JSON."""
    rank = Rank(tmp_path)
    rank.reports.report(1, loss=float("nan"), grad_norm=float("inf"), learning_rate=float("-inf"))
    (step,) = of_event(rank.written(), "step")
    assert (step["loss"], step["grad_norm"], step["learning_rate"]) == ("NaN", "Infinity", "-Infinity")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (3, 3),
        (0.1234567891, 0.1234568),
        (object(), "NaN"),
        ("\udcff", "?"),
        ([1, (2.5, None)], [1, [2.5, None]]),
    ],
)
def test_whatever_is_reported_can_be_written(value: Any, expected: Any) -> None:
    """A number of seven digits, text that is UTF-8, lists of these, and NaN for what is neither."""
    assert readable(value) == expected


@pytest.mark.parametrize("epoch", [float("nan"), float("inf"), "2"])
def test_an_epoch_that_is_no_finite_number_is_left_out(tmp_path: Path, epoch: Any) -> None:
    """And raises nothing into the training."""
    rank = Rank(tmp_path)
    rank.reports.report(1, loss=1.0, epoch=epoch)
    (step,) = of_event(rank.written(), "step")
    assert (step["loss"], "epoch" in step) == (1.0, False)


def test_a_record_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    """Python writes no whole number of more than 4,300 digits; the rest is written, and the lost one counted."""
    rank = Rank(tmp_path, interval=1)
    for step, rate in enumerate([0.1, 10**5000, 0.1], 1):
        rank.reports.report(step, learning_rate=rate)
    eventually(lambda: len(rank.lines()) == 2, 60, "two records")
    rank.reports.report(4, learning_rate=0.1)
    steps = of_event(rank.written(), "step")
    assert [each["step"] for each in steps] == [1, 3, 4]
    assert sum(each.get("dropped", 0) for each in steps) == 1


def test_records_that_cannot_be_written_are_logged_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A value that each record has would fill the job's log with tracebacks."""
    rank = Rank(tmp_path)
    rank.records._notes.extend([Note(time.time(), "step", "info", {"learning_rate": 10**5000})] * 20)
    eventually(lambda: "cannot write a record" in caplog.text, 60, "the error")
    rank.written()
    assert caplog.text.count("cannot write a record") == 1


def test_events_are_written_at_once(tmp_path: Path) -> None:
    """Each with its own fields, in order; the end says how it came to that."""
    rank = Rank(tmp_path, attempt=2)
    rank.reports.report(200, epoch=1.5)
    rank.reports.report_evaluation(loss=1.5, perplexity=4.5, accuracy=torch.tensor(0.25), bleu=float("inf"))
    rank.reports.saved(200)
    rank.reports.save_failed(300, "OSError: [Errno 28] No space left on device")
    eventually(lambda: of_event(rank.lines(), "checkpoint_failed"), 60, "the record")
    error = ValueError("a bad batch")
    rank.records.note_error(error)
    rank.records.close(error, 10.0)
    records = rank.lines()
    assert [record["event"] for record in records] == [
        "restart",
        "epoch",
        "step",
        "evaluation",
        "checkpoint",
        "checkpoint_failed",
        "exception",
        "end",
    ]
    told = {record["event"]: record for record in records}
    assert told["epoch"]["epoch"] == 1
    assert (told["evaluation"]["step"], told["evaluation"]["loss"]) == (200, 1.5)
    assert told["evaluation"]["metrics"] == {"accuracy": 0.25, "bleu": "Infinity"}
    assert (told["checkpoint_failed"]["step"], told["checkpoint_failed"]["level"]) == (300, "error")
    assert (told["exception"]["error"], told["exception"]["message"]) == ("ValueError", "a bad batch")
    assert (told["end"]["level"], told["end"]["reason"]) == ("error", "its process ended by ValueError")


class StuckDevice:
    """A tensor whose device does not answer until it is let."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.has_answered = False

    def __float__(self) -> float:
        self.answers.wait(120)
        self.has_answered = True
        return 1.0


def test_where_a_device_hangs_the_training_does_not_wait(tmp_path: Path) -> None:
    """What comes then is dropped beyond a bound, and the next record says how many."""
    rank, stuck = Rank(tmp_path, interval=1), StuckDevice()
    rank.reports.report(0, learning_rate=stuck)
    rank.records.note("restart")
    time.sleep(0.1)
    for step in range(1, 2001):
        rank.reports.report(step)
    assert not stuck.has_answered
    stuck.answers.set()
    eventually(lambda: len(rank.lines()) > 900, 60, "what was put down")
    rank.reports.report(5000)
    records = rank.written()
    assert [record["dropped"] for record in records if "dropped" in record] == [2000 + 4 - len(records)]


def test_where_nothing_can_be_written_training_goes_on(tmp_path: Path) -> None:
    """And what is put down while the disk is full is counted."""
    (tmp_path / "llm-1").write_text("a file in the way")
    rank = Rank(tmp_path, interval=1)
    rank.reports.report(1, loss=1.0)
    rank.records.close(None, 10.0)


def test_a_file_that_is_full_is_kept_once_and_begun_anew(tmp_path: Path) -> None:
    """By its name, so that whoever follows it reads on; whole lines alone; never more than the bound."""
    file = tmp_path / "rank-0.jsonl"
    kept = RotatingFile(file, 1000)
    for number in range(100):
        assert kept.add(b"%099d\n" % number)
    kept.close()
    halves = [file.with_name("rank-0.jsonl.1"), file]
    assert sum(half.stat().st_size for half in halves) <= 1000
    lines = [int(line) for half in halves for line in half.read_text().splitlines()]
    assert lines == list(range(100 - len(lines), 100))


def test_a_second_process_of_an_attempt_adds_to_the_file(tmp_path: Path) -> None:
    """As where torchrun starts the ranks anew."""
    file = tmp_path / "rank-0.jsonl"
    for _ in range(2):
        kept = RotatingFile(file, 1000)
        kept.add(b"line\n")
        kept.close()
    assert file.read_text() == "line\nline\n"


def test_a_disk_that_is_full_for_a_while_costs_the_lines_of_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a line that was written stays apart from the next one."""
    kept = RotatingFile(tmp_path / "file", 1000)
    real, calls = rotating_file.os.write, iter([5, OSError(28, "No space left on device")])

    def write(file: int, chunk: bytes) -> int:
        outcome = next(calls, None)
        if isinstance(outcome, OSError):
            raise outcome
        return real(file, chunk[:outcome])

    monkeypatch.setattr(rotating_file.os, "write", write)
    assert not kept.add(b"the first\n")
    assert kept.add(b"the second\n")
    kept.close()
    assert (tmp_path / "file").read_text() == "the f\nthe second\n"


def test_a_sources_file_that_was_not_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace, is_written = record_log._replace_file, threading.Event()
    attempts: list[Path] = []

    def refused_twice(path: Path, content: bytes) -> None:
        attempts.append(path)
        if len(attempts) <= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(path, content)
        is_written.set()

    monkeypatch.setattr(record_log, "_replace_file", refused_twice)
    monkeypatch.setattr(record_log, "_WRITE_INTERVAL_S", 0.01)
    rank = Rank(tmp_path)
    assert is_written.wait(60)
    rank.records.close(None, 10.0)
    assert json.loads((rank.directory / "sources-gpu-07-3.json").read_text())["rank"] == 7
    assert len(attempts) == 3
    assert [each.message for each in caplog.records] == [
        "llm-1: cannot write the sources file: No space left on device"
    ]


def test_a_file_is_replaced_by_all_of_its_content(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from trainmedic.job.record_log import _replace_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "_replace_file(Path(sys.argv[1]), b'x' * 1500)\n"
    )
    file = tmp_path / "sources.json"
    file.write_text("{}")
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert file.read_text() == "{}"


def test_the_sources_file_says_whose_the_files_are(tmp_path: Path) -> None:
    """And what else the rank writes, as soon as it says so."""
    rank = Rank(tmp_path)
    rank.reports.log_file("/out/trainer_log.jsonl")
    rank.written()
    file = rank.directory / "sources-gpu-07-3.json"
    sources = json.loads(file.read_text())
    assert sources.pop("pid") > 0
    assert sources.pop("started_at").endswith("Z")
    assert sources == {
        "version": 1,
        "job": "llm-1",
        "attempt": 1,
        "rank": 7,
        "local_rank": 3,
        "node_rank": 0,
        "node": "gpu-07",
        "world_size": 16,
        "gpus": [],
        "files": [{"path": "/out/trainer_log.jsonl", "source": "training"}],
    }
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_gpus_are_told_once_they_are_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel's log names them; a job begins to use them long after it has connected."""
    monkeypatch.setattr(record_log, "_DEVICES_INTERVAL_S", 0.0)
    monkeypatch.setattr(record_log.devices, "pci_addresses", lambda: ["0000:9b:00"])
    rank = Rank(tmp_path)
    rank.written()
    assert json.loads((rank.directory / "sources-gpu-07-3.json").read_text())["gpus"] == ["0000:9b:00"]


@pytest.mark.parametrize(
    ("environment", "attempt", "place"),
    [
        ({}, 1, (None, None)),
        ({"TRAINMEDIC_ATTEMPT": "4", "TORCHELASTIC_RESTART_COUNT": "1"}, 4, (None, None)),
        ({"TORCHELASTIC_RESTART_COUNT": "1", "LOCAL_RANK": "3", "GROUP_RANK": "2"}, 2, (3, 2)),
        ({"SLURM_RESTART_COUNT": "2", "SLURM_LOCALID": "5", "SLURM_NODEID": "1"}, 3, (5, 1)),
        ({"TRAINMEDIC_ATTEMPT": "x", "LOCAL_RANK": "-1"}, 1, (None, None)),
    ],
)
def test_who_has_started_the_rank_says_its_attempt_and_place(
    environment: dict[str, str], attempt: int, place: tuple[int | None, int | None]
) -> None:
    """trainmedic-run first of all; nothing is guessed."""
    logs = resolve_logs("/logs", 10, environment)
    assert logs is not None
    assert (logs.attempt, (logs.local_rank, logs.node_rank)) == (attempt, place)


def test_without_a_directory_nothing_is_written() -> None:
    """Given as an argument or by the variable, of which an empty one is none."""
    assert resolve_logs(None, 10, {}) is None
    assert resolve_logs(None, 10, {"TRAINMEDIC_LOG_DIR": ""}) is None
    logs = resolve_logs(None, 10, {"TRAINMEDIC_LOG_DIR": "/logs"})
    assert logs is not None
    assert logs.log_dir == Path("/logs")


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, "10"])
def test_an_interval_is_a_number_of_steps(interval: Any) -> None:
    """Anything else is said when the job is connected."""
    with pytest.raises(ConfigurationError, match="log_interval is"):
        resolve_logs("/logs", interval, {})
