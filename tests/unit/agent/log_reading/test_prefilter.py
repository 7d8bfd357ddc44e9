"""Lines that are passed over before they are decoded: what is found is what is found without that."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.logs.reading import NOW, origin
from tests.unit.logs.test_shipped_rules import CORPUS, RULES
from trainmedic_agent.log_reading.line_cutter import LineCutter
from trainmedic_agent.log_reading.streams import LineStream
from trainmedic_logs.lines.blocks import kind_of
from trainmedic_logs.lines.matcher import LineMatcher
from trainmedic_logs.lines.prefilter import Prefilter
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.lines.tracker import FindingTracker

SCENES: dict[str, str] = yaml.load(
    (Path(__file__).parents[2] / "diagnosis" / "scenes.yaml").read_bytes(), yaml.CSafeLoader
)["texts"]
QUIET = (
    "[INFO] [logging.py:96:log_dist] [Rank 0] step=400, skipped=0, lr=[1e-05]",
    "node-1:533:1765 [2] NCCL INFO Channel 04/0 : 0[0] -> 32[0] [receive] via NET/IBext_v8/7",
    "saving checkpoint at iteration 400 to /checkpoints/gpt, no error and no timeout",
    " 22%|██▏       | 11000/50000 [1:56:21<6:51:20,  6.83s/it]",
    "",
)
REPORTED = (
    " iteration 12/ 500000 | consumed samples: 2048 | lm loss: nan | grad norm: 0.25 | nan iterations: 1 |",
    "step: 7  loss: nan  grad_norm: 0.2  memory: 4.1",
    "{'loss': nan, 'grad_norm': 0.4, 'learning_rate': 1e-05, 'epoch': 0.1}",
    '{"event": "step", "step": 1, "loss": 5000.0}',
    '{"event": "exception", "message": "CUDA out of mem\\u006fry. Tried to allocate 2.00 GiB"}',
    "[rank1]: Traceback (most recent call last):",
    '[rank1]:   File "train.py", line 1, in <module>',
    "[rank1]: ValueError: bad",
    "Exception in thread Thread-4 (_pin_memory_loop):",
    "gpu-07: Traceback (most recent call last):",
    "gpu-07: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
    "====================================================",
    "  rank      : 3 (local_rank: 3)",
    "  exitcode  : -9 (pid: 100)",
    "Root Cause (first observed failure):",
)
TEXTS = sorted({*QUIET, *REPORTED, *SCENES.values(), *(each["text"] for each in CORPUS)})
FORMS = ("as it is", "cut", "colours", "bar", "not UTF-8", "UTF-16", "docker", "CRI", "divided", "BOM", "CRLF", "NUL")


@cache
def matcher() -> LineMatcher:
    return LineMatcher(RULES)


def written(text: str, form: str, at: int) -> bytes:
    """A line in one of the forms in which programs and those who pass lines on write it."""
    at %= len(text) + 1
    match form:
        case "cut":
            return text[:at].encode() + b"\n"
        case "colours":
            return f"{text[:at]}\x1b[31m{text[at:]}\x1b[0m\n".encode()
        case "bar":
            return f"\r 21%|##  | 3/14\r{text}\r\n".encode()
        case "not UTF-8":
            return text[:at].encode() + b"\xff\xc3" + text[at:].encode() + b"\n"
        case "UTF-16":
            return text.encode("utf-16-le") + b"\n\0"
        case "docker":
            return json.dumps({"log": f"{text}\n", "stream": "stderr", "time": "2026-05-04T11:59:00Z"}).encode() + b"\n"
        case "CRI" | "divided" if "\n" not in text:
            head = "2026-05-04T11:59:00.5Z stderr"
            first = f"{head} P {text[:at]}\n" if form == "divided" else ""
            return f"{first}{head} F {text[at:] if first else text}\n".encode()
        case "BOM":
            return b"\xef\xbb\xbf" + text.encode() + b"\n"
        case "CRLF":
            return text.encode() + b"\r\n"
        case "NUL":
            return f"{text[:at]}\0{text[at:]}\n".encode()
    return f"{text}\n".encode()


FILES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(QUIET), st.just("as it is"), st.just(0)),
        st.tuples(st.sampled_from(REPORTED), st.sampled_from(FORMS[:3]), st.integers(0, 200)),
        st.tuples(st.sampled_from(TEXTS), st.sampled_from(FORMS), st.integers(0, 200)),
    ),
    max_size=40,
)
STEPS = st.lists(st.tuples(st.integers(1, 900), st.sampled_from([0.0, 0.4, 6.0]), st.integers(0, 9)), max_size=12)


def found(data: bytes, source: str, steps: list[tuple[int, float, int]], *, has_prefilter: bool) -> list[Any]:
    """What comes of a file that is read in pieces of these sizes, so many seconds after each other; at a step with a
    0 the agent is killed, and at one with a 1 the file is rotated."""
    prefilter = matcher().prefilter((source,)) if has_prefilter else None
    tracker, told, now, generation = FindingTracker(RuleSet()), [], NOW, 0  # the matcher is made once
    stream, cutter = LineStream(origin(source, generation="0"), None, {}), LineCutter()

    def take(lines: list[Any]) -> None:
        for line in lines:
            told.extend([*tracker.take(line, matcher().match(line)), *tracker.begun])
        told.extend(tracker.tick(now))

    for size, seconds, happens in [*steps, (len(data), 9.0, 5)]:
        now += timedelta(seconds=seconds)
        if happens == 0:
            oldest = stream.oldest_place
            is_skipping = oldest is None and cutter.is_skipping
            cutter = LineCutter(cutter.resume_at if oldest is None else oldest, is_skipping)
            stream = LineStream(stream.origin, None, json.loads(json.dumps(stream.to_json())))
        if happens == 1:
            take([*stream.feed(cutter.take_unfinished_line(), now, prefilter), *stream.flush(None)])
            data, generation = data[cutter.offset :], generation + 1
            stream, cutter = LineStream(origin(source, generation=str(generation)), None, {}), LineCutter()
        placed = cutter.feed(data[cutter.offset : cutter.offset + size])
        take([*stream.feed(placed, now, prefilter), *stream.flush(now)])
    take(stream.flush(None))
    return [told, tracker.changed(), dict(tracker.lines_taken), dict(tracker.lines_near), tracker.changes().written]


@settings(max_examples=100, deadline=None)
@given(FILES, STEPS, st.sampled_from(["training", "training", "launcher", "slurm", "kernel", "fabric-manager"]))
def test_findings_are_the_same_with_and_without_the_prefilter(
    said: list[tuple[str, str, int]], steps: list[tuple[int, float, int]], source: str
) -> None:
    """Real lines and quiet ones in any form and order, read in pieces of any size, with kills and rotations: the same
    findings in the same order, the same lines counted as taken and as near, and the same state kept."""
    data = b"".join(written(*each) for each in said)
    assert found(data, source, steps, has_prefilter=True) == found(data, source, steps, has_prefilter=False)


def test_each_corpus_line_passes_the_prefilter() -> None:
    """A line that a rule matches is also found between quiet lines, unchanged and in one of the other forms."""
    quiet = "".join(f"{text}\n" for text in QUIET).encode()
    for number, entry in enumerate(CORPUS):
        for form in ("as it is", FORMS[number % len(FORMS)]):
            data = quiet + written(entry["text"], form, len(entry["text"]) // 2) + quiet
            with_it, without = (found(data, entry["source"], [], has_prefilter=has) for has in (True, False))
            assert with_it == without, (entry["id"], form)


BEGINNINGS = (
    "Traceback (most recent call last):",
    "gpu-07: Traceback (most recent call last):",
    "  + Exception Group Traceback (most recent call last):",
    "Exception ignored in: <function Loader.__del__ at 0x7f>",
    "Exception in thread Thread-4 (_pin_memory_loop):",
    "Root Cause (first observed failure):",
    "=" * 20,
    "*" * 40,
    "  rank      : 3 (local_rank: 3)",
    "Kill process 100 (python) score 901 or sacrifice child",
    '  File "/app/train.py", line 12, in main',
    '  File "/app/train.py", line 12',
)


@pytest.mark.parametrize("text", BEGINNINGS)
def test_a_line_that_starts_a_block_is_not_skipped(text: str) -> None:
    """This holds for all rules: the lines after it are read as part of its block."""
    assert kind_of(text) is not None
    assert Prefilter([]).suspects([b"x", text.encode()]) == [1]


def test_a_quiet_line_is_skipped() -> None:
    """It is not decoded, which is the purpose of the prefilter."""
    prefilter = matcher().prefilter(("training",))
    lines = [text.encode() for text in (*QUIET, REPORTED[0], *QUIET, "CUDA out of memory. Tried to allocate", *QUIET)]
    assert prefilter.suspects(lines) == [len(QUIET), 2 * len(QUIET) + 1]
    assert prefilter.suspects([]) == []


@pytest.mark.parametrize("form", ["colours", "bar", "BOM", "CRLF", "NUL", "UTF-16"])
def test_a_quiet_line_is_skipped_in_each_form_that_programs_write(form: str) -> None:
    """A coloured log costs little more than a plain one."""
    prefilter = matcher().prefilter(("training",))
    lines = [
        written(text, form, 12).rstrip(b"\n") for text in (*QUIET, "CUDA out of memory. Tried to allocate", *QUIET)
    ]
    assert prefilter.suspects(lines) == [len(QUIET)]


def test_a_literal_with_replacements_for_invalid_utf_8_is_prefiltered() -> None:
    """The rest of the literal identifies the line, as such bytes can be any; without a rest, every line counts."""
    assert Prefilter(["abc\N{REPLACEMENT CHARACTER}d"]).suspects([b"x", b"abc\xffd", b"abd"]) == [1]
    assert Prefilter(["\N{REPLACEMENT CHARACTER}" * 3]).suspects([b"x", b"y"]) == [0, 1]
