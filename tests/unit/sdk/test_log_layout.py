"""The paths of a job's logs: what writes them and what reads them mean the same."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

import pytest

from trainmedic.wire import log_layout
from trainmedic.wire.log_layout import AttemptLogs, LogFile, decoded, encoded, file_at

ROOT = Path("/logs")


@pytest.mark.parametrize(
    ("job", "part"),
    [
        ("llm-1", "llm-1"),
        ("team/llm", "team%2Fllm"),
        ("..", "%2E."),
        (".hidden", "%2Ehidden"),
        ("50%", "50%25"),
        ("größe", "gr%C3%B6%C3%9Fe"),
        ("a:b*c", "a%3Ab%2Ac"),
        ("\udcff", "%FF"),
    ],
)
def test_a_job_of_any_name_is_one_path_component(job: str, part: str) -> None:
    """The name is read back from it."""
    assert encoded(job) == part
    assert decoded(part) == job


def test_a_name_too_long_for_a_file_is_cut_and_stays_distinct() -> None:
    """Two that differ only at the end have two directories, and the cut splits no encoded byte."""
    names = ["ö" * 253, "ö" * 252 + "o"]
    parts = [encoded(name) for name in names]
    assert len(set(parts)) == 2
    for part in parts:
        assert len(part) <= 180
        assert decoded(part) is None
        assert part.partition("%-")[0].count("%") * 3 == len(part.partition("%-")[0])


@pytest.mark.parametrize("part", ["", "a/b", "%2f", "%41", "..", "ä", "a b", "%"])
def test_a_text_that_no_name_encodes_to_is_no_job(part: str) -> None:
    """So no two directories stand for one job."""
    assert decoded(part) is None


_ODD_NAMES = (
    b"\xff\xfe\xe4",
    b"%ff\xff",
    b"new\nline",
    "\u00b2".encode(),
    "\u0663".encode(),
    b"9" * 255,
    b"rank-" + b"9" * 200,
)


@pytest.mark.parametrize("raw", _ODD_NAMES)
def test_any_valid_file_name_is_handled(raw: bytes) -> None:
    """A user who may write to a directory chooses names: no UTF-8, no number, or too large a number."""
    name = os.fsdecode(raw)
    assert decoded(name) in (None, name)
    for place in (f"{name}/attempt-1/launcher-n1.log", f"j/attempt-1/launcher-{name}.log", f"j/attempt-1/{name}"):
        file_at(PurePath(place))
    assert file_at(PurePath(f"j/attempt-1/ranks-n1/{name}/stdout.log")) is None


LOGS = AttemptLogs.of(ROOT, "team/llm", 3)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (LOGS.records(7), {"kind": log_layout.RECORDS, "rank": 7}),
        (LOGS.records(7).with_name("rank-7.jsonl.1"), {"kind": log_layout.RECORDS, "rank": 7, "is_rotated": True}),
        (LOGS.sources("gpu-07", 1), {"kind": log_layout.SOURCES, "node": "gpu-07", "local_rank": 1}),
        (LOGS.launcher("gpu:07"), {"kind": log_layout.LAUNCHER, "node": "gpu:07"}),
        (LOGS.error("gpu-07"), {"kind": log_layout.ERROR, "node": "gpu-07"}),
        (
            LOGS.ranks("gpu-07") / "none_x1/attempt_0/5/stderr.log",
            {"kind": log_layout.STDERR, "node": "gpu-07", "local_rank": 5},
        ),
        (
            LOGS.ranks("gpu-07") / "none_x1/attempt_0/5/error.json",
            {"kind": log_layout.ERROR, "node": "gpu-07", "local_rank": 5},
        ),
        (LOGS.dump(12), {"kind": log_layout.FLIGHT_RECORDER, "rank": 12}),
    ],
)
def test_each_path_states_its_owner(path: Path, expected: dict[str, object]) -> None:
    """Job and attempt are always stated, node and rank where they are in the name."""
    found = file_at(path.relative_to(ROOT))
    assert found == LogFile(job="team/llm", directory="team%2Fllm", attempt=3, **expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path",
    [
        "llm/rank-0.jsonl",
        "llm/attempt-0/rank-0.jsonl",
        "llm/attempt-x/rank-0.jsonl",
        "llm/attempt-1/rank-0.json",
        "llm/attempt-1/rank-.jsonl",
        "llm/attempt-1/ranks-n/0/notes.txt",
        "llm/attempt-1/ranks-n/x/stdout.log",
        "llm/attempt-1/flight-recorder/rank-1.jsonl",
        "llm/attempts.jsonl",
    ],
)
def test_other_files_are_not_part_of_the_layout(path: str) -> None:
    """They are a status file, a note and an attempt without a number."""
    assert file_at(PurePath(path)) is None
