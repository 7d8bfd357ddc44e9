"""The progress of a training, whichever trainer prints it, and lines that grow and are no progress."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.unit.logs.reading import lines
from trainmedic_logs.lines.progress import ProgressReader

TRAINERS: list[Mapping[str, str]] = yaml.load(Path(__file__).with_name("trainers.yaml").read_bytes(), yaml.CSafeLoader)
NAMES = [trainer["name"] for trainer in TRAINERS]


def step_line(form: str, number: int) -> str:
    """Step `number` in that form."""
    text = form.replace("<h>", f"{number // 60}:{number % 60:02d}").replace("<x>", f"{(number * 7) % 10}")
    return text.replace("<n>", str(number))


def test_there_are_enough_of_them() -> None:
    """More than twenty-five trainers, each with its source."""
    assert len(set(NAMES)) == len(NAMES) > 25
    assert all(trainer["from"] for trainer in TRAINERS)


@pytest.mark.parametrize("trainer", TRAINERS, ids=NAMES)
def test_a_trainers_steps_are_seen(trainer: Mapping[str, str]) -> None:
    """From the fourth line on, where no record of it is known."""
    reader, steps = ProgressReader(), []
    for number in range(11, 31):
        (line,) = lines(step_line(trainer["line"], number))
        is_record = line.record is not None and line.record["event"] == "step"
        steps.append(is_record or reader.step_of(line.text) is not None)
    assert all(steps[3:]), [number for number, is_step in enumerate(steps) if not is_step]


@pytest.mark.parametrize(
    "form",
    [
        "Retrying in <n> s (attempt <n>/10)",
        "[W socket.cpp:697] [c10d] The client socket has failed to connect to node-1:29500 (errno: 111), try <n>",
        "still waiting for rank 3 after <n> seconds",
        "ERROR request <n> failed: the store does not answer",
        "[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: SeqNum=<n>",
        "heartbeat <n>",
        "frame #<n>: c10::Error::Error + 0x45 (0x2aaad1d302b5 in libc10.so)",
        "loss 2.31, time 240.<n>ms",
        "Loading checkpoint shards:  <n>%|█  | <n>/30 [00:04<00:12,  1.3s/it]",
        "Downloading data: <n>%|█  | <n>/30 [00:04<00:12,  1.3s/it]",
    ],
)
def test_what_counts_something_else_is_no_progress(form: str) -> None:
    """Attempts, seconds of waiting, errors, frames; and numbers that are no whole ones."""
    reader = ProgressReader()
    assert [reader.step_of(step_line(form, number)) for number in range(11, 31)] == [None] * 20


def test_a_number_that_stands_still_is_no_progress() -> None:
    """A line that repeats with the same step, as a bar that is drawn again."""
    reader = ProgressReader()
    assert [reader.step_of("step 12, loss 2.<x>") for _ in range(9)] == [None] * 9


def test_a_new_epoch_goes_on_with_the_same_form() -> None:
    """The number of the batch begins anew; that of the epoch has grown."""
    reader = ProgressReader()
    steps = [reader.step_of(f"Epoch: [{at // 10}][{at % 10}/10] Loss 1.2") for at in range(40)]
    assert all(step is not None for step in steps[4:])
