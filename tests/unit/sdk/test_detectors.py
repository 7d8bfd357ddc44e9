"""Detectors of other packages find things in a rank's records, and cannot hurt the training."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sdk.test_record_log import Rank, of_event
from trainmedic.errors import ConfigurationError
from trainmedic.job import detectors
from trainmedic.job.progress import Progress
from trainmedic.job.reports import JobReports


class High:
    """Finds losses over 10."""

    def feed(self, record: Mapping[str, Any]) -> Iterator[Any]:
        if record["event"] == "step" and record["loss"] > 10:
            yield "the loss is high"
            yield {"message": "again", "loss": record["loss"], "rank": 99, "event": "step"}


class Broken:
    """Fails at its first record."""

    fed = 0

    def feed(self, record: Mapping[str, Any]) -> list[Any]:
        Broken.fed += 1
        raise ValueError("no")


class Unmade:
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no")


class Stuck:
    """Never comes back."""

    def feed(self, record: Mapping[str, Any]) -> list[Any]:
        threading.Event().wait()
        return []


def install(monkeypatch: pytest.MonkeyPatch, **classes: type) -> None:
    points = [
        metadata.EntryPoint(name, f"{kind.__module__}:{kind.__qualname__}", detectors.GROUP)
        for name, kind in classes.items()
    ]
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda point: classes[point.name])
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == detectors.GROUP else [])


def test_a_detectors_finding_becomes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the detector's name and message, but the rank states whose record it is."""
    install(monkeypatch, high=High)
    rank = Rank(tmp_path, interval=1)
    for step, loss in enumerate([1.0, 50.0, 2.0]):
        rank.reports.report(step, loss=loss)
    first, second = of_event(rank.written(), "detected")
    assert (first["message"], first["detector"], first["level"], first["rank"]) == (
        "the loss is high",
        "high",
        "warning",
        7,
    )
    assert (second["message"], second["loss"], second["event"]) == ("again", 50.0, "detected")


def test_a_detector_that_fails_repeatedly_is_dropped_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The job's log names it once and says that it was dropped; the last record counts the errors."""
    Broken.fed = 0
    install(monkeypatch, broken=Broken, high=High, unmade=Unmade)
    rank = Rank(tmp_path, interval=1)
    for step in range(9):
        rank.reports.report(step, loss=50.0)
    deadline = time.monotonic() + 60
    while rank.records.detectors.error_count < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    records = rank.written()
    assert len(of_event(records, "detected")) == 18
    assert len(of_event(records, "step")) == 9
    assert Broken.fed == 5
    assert of_event(records, "end")[0]["detector_errors"] == 5
    told = [record.getMessage() for record in caplog.records if "detector" in record.getMessage()]
    assert told == [
        "llm-1: cannot create detector unmade; skipping it",
        "llm-1: detector broken failed; trying it again",
        "llm-1: detector broken failed 5 times in a row; disabling it",
    ]


def test_the_script_registers_a_function_a_class_and_an_object(tmp_path: Path) -> None:
    """It uses a decorator or a call; each reports what it finds as a detector from a package does."""
    rank = Rank(tmp_path, interval=1)

    @rank.reports.detector
    def spike(record: Mapping[str, Any]) -> str | None:
        return f"a spike at step {record['step']}" if record["event"] == "step" and record["loss"] > 10 else None

    @rank.reports.detector(name="high-again")
    class Again(High):
        """The decorator returns it as it is."""

    class Limit:
        def __init__(self, most: float) -> None:
            self.most = most

        def feed(self, record: Mapping[str, Any]) -> Mapping[str, Any] | None:
            is_over = record["event"] == "step" and record["loss"] > self.most
            return {"message": "over", "limit": self.most} if is_over else None

    assert isinstance(rank.reports.detector(Limit(5.0), name="limit"), Limit)
    assert issubclass(Again, High)
    assert spike({"event": "step", "step": 1, "loss": 11.0}) == "a spike at step 1"
    for step, loss in enumerate([1.0, 50.0, 2.0]):
        rank.reports.report(step, loss=loss)
    found = of_event(rank.written(), "detected")
    assert [(each["detector"], each["message"], each["rank"]) for each in found] == [
        ("spike", "a spike at step 1", 7),
        ("high-again", "the loss is high", 7),
        ("high-again", "again", 7),
        ("limit", "over", 7),
    ]
    assert found[3]["limit"] == 5.0


def test_occasional_errors_drop_no_detector(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only consecutive errors count."""
    rank = Rank(tmp_path, interval=1)

    @rank.reports.detector
    def moody(record: Mapping[str, Any]) -> str:
        if record["event"] != "step" or record["step"] % 2:
            raise KeyError("no")
        return "even"

    for step in range(20):
        rank.reports.report(step, loss=1.0)
    assert len(of_event(rank.written(), "detected")) == 10
    assert "left out" not in caplog.text


@pytest.mark.parametrize(
    ("detector", "name"),
    [
        (lambda record: None, None),
        (lambda record: None, "a b"),
        (High, 5),
        (5, "five"),
        (object, "empty"),
        (High, "taken"),
    ],
)
def test_an_invalid_detector_is_rejected_at_once(tmp_path: Path, detector: Any, name: Any) -> None:
    """The script is wrong, and its author is there to see it."""
    rank = Rank(tmp_path)
    rank.reports.detector(High, name="taken")
    with pytest.raises(ConfigurationError):
        rank.reports.detector(detector, name=name)
    with pytest.raises(ConfigurationError, match=r"'2nd' cannot name a detector; .* begin with a letter or _"):
        rank.reports.detector(High, name="2nd")
    rank.written()


def test_a_detectors_finding_is_bounded(tmp_path: Path) -> None:
    """The number of members and the length of each are limited."""
    rank = Rank(tmp_path, interval=1)
    rank.reports.detector(
        lambda record: {"message": "x" * 5000} | {f"m{at}": at for at in range(500)}, name="talkative"
    )
    rank.reports.report(1, loss=1.0)
    found = of_event(rank.written(), "detected")[0]
    assert len(found["message"]) == 1000
    assert len(found) < 50


def test_without_records_a_detector_sees_nothing_and_the_log_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    """A script is the same with and without a directory for records."""
    reports = JobReports(Progress())
    reports.detector(High)
    logging.getLogger("acme").addHandler(handler := reports.line_handler())
    logging.getLogger("acme").warning("hello")
    logging.getLogger("acme").removeHandler(handler)
    assert "detector High gets no records" in caplog.text


def test_detectors_see_the_programs_log_lines_where_its_handler_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are separate records that are never written; Trainmedic's own log lines are not among them."""
    rank, logger = Rank(tmp_path, interval=1), logging.getLogger("acme.loader")

    @rank.reports.detector
    def slow_shard(record: Mapping[str, Any]) -> str | None:
        return record["message"] if record["event"] == "log" and record["level"] == "warning" else None

    handler = rank.reports.line_handler()
    for each in (logger, logging.getLogger("trainmedic")):
        each.addHandler(handler)
    try:
        logger.warning("shard %d took %s", 7, "9 s")
        handler.handle(logging.LogRecord("acme", logging.WARNING, "", 1, "%d does not fit", ("text",), None))
        logging.getLogger("trainmedic").warning("ours")
    finally:
        for each in (logger, logging.getLogger("trainmedic")):
            each.removeHandler(handler)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        handler.handle(logging.LogRecord("acme", logging.WARNING, "", 1, "of a forked child", (), None))
    records = rank.written()
    assert [each["message"] for each in of_event(records, "detected")] == ["shard 7 took 9 s"]
    assert of_event(records, "log") == []


def test_a_stuck_detector_delays_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not delay the end of the job for long either."""
    install(monkeypatch, stuck=Stuck)
    rank = Rank(tmp_path, interval=1)
    for step in range(50):
        rank.reports.report(step, loss=1.0)
    rank.records.close(None, 2.0)
    assert len(of_event(rank.lines(), "step")) == 50
    assert of_event(rank.lines(), "end")


def test_a_detector_that_finds_too_much_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No detector can flood the log of its job."""
    install(monkeypatch, high=High)
    rank = Rank(tmp_path, interval=1)
    for step in range(50):
        rank.reports.report(step, loss=50.0)
    assert len(of_event(rank.written(), "detected")) == 20


def test_without_detectors_there_is_no_thread(tmp_path: Path) -> None:
    """Nearly every job has no detectors."""
    before = threading.active_count()
    rank = Rank(tmp_path)
    assert threading.active_count() == before + 1
    rank.written()


def test_findings_that_are_too_frequent_are_not_remembered() -> None:
    """The times of suppressed findings would fill the memory of the rank."""
    found = detectors.Detectors(lambda name, fields: None, "llm-1")
    found.add("always", lambda record: "again")
    for _ in range(500):
        found.feed({"event": "step"})
    found.close(10.0)
    assert len(found._times["always"]) == 20
