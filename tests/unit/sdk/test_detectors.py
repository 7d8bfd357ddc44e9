"""Detectors of other packages find things in a rank's records, and cannot hurt the training."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sdk.test_record_log import Rank, of_event
from trainmedic.job import detectors


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


def test_what_a_detector_finds_becomes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its name and what it says, but whose record it is says the rank."""
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


def test_one_that_fails_is_left_out_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The job's log says which, once."""
    install(monkeypatch, broken=Broken, high=High, unmade=Unmade)
    rank = Rank(tmp_path, interval=1)
    for step in range(3):
        rank.reports.report(step, loss=50.0)
    records = rank.written()
    assert len(of_event(records, "detected")) == 6
    assert len(of_event(records, "step")) == 3
    assert Broken.fed == 1
    told = [record.getMessage() for record in caplog.records if "detector" in record.getMessage()]
    assert told == [
        "llm-1: the detector unmade cannot be made and is left out",
        "llm-1: the detector broken failed and is left out",
    ]


def test_one_that_is_stuck_holds_up_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the end of the job for long."""
    install(monkeypatch, stuck=Stuck)
    rank = Rank(tmp_path, interval=1)
    for step in range(50):
        rank.reports.report(step, loss=1.0)
    rank.records.close(None, 2.0)
    assert len(of_event(rank.lines(), "step")) == 50
    assert of_event(rank.lines(), "end")


def test_one_that_finds_too_much_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No detector can flood the log of its job."""
    install(monkeypatch, high=High)
    rank = Rank(tmp_path, interval=1)
    for step in range(50):
        rank.reports.report(step, loss=50.0)
    assert len(of_event(rank.written(), "detected")) == 20


def test_without_detectors_there_is_no_thread(tmp_path: Path) -> None:
    """Nearly every job has none."""
    before = threading.active_count()
    rank = Rank(tmp_path)
    assert threading.active_count() == before + 1
    rank.written()
