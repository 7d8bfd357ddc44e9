"""Which code a hanging step may be interrupted in."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

import trainmedic
from trainmedic.job import interrupt

SDK = Path(trainmedic.__file__).parent
FILES = ["client.py", "job/queue.py", "ranks/share.py", "recovery/restarts.py", "torch/restore.py", "wire/writer.py"]


def frame_in(file: Path) -> FrameType:
    """A frame of code that says it is from `file`."""
    names: dict[str, FrameType] = {}
    exec(compile("frame = current()", str(file), "exec"), {"current": lambda: sys._getframe(1)}, names)
    return names["frame"]


@pytest.mark.parametrize("file", FILES)
def test_no_code_of_the_sdk_is_interrupted(file: str) -> None:
    """The loop may be anywhere in it: no checkpoint is left half written and no command half carried out."""
    assert (SDK / file).exists()
    assert interrupt._is_ours(frame_in(SDK / file))


def test_the_users_code_is_interrupted() -> None:
    """This holds also where it lies next to the SDK, under a name with the same prefix."""
    assert not interrupt._is_ours(frame_in(SDK.with_name("trainmedic_runs") / "train.py"))


def test_waiting_for_data_is_interrupted() -> None:
    """`fetch` is code of the SDK, and the only place where a loop waits for user code."""

    class Probe:
        def __next__(self) -> FrameType:
            return sys._getframe(1)

        def __iter__(self) -> Probe:
            return self

    frame = interrupt.fetch(Probe())
    assert frame.f_code.co_filename.startswith(str(SDK))
    assert not interrupt._is_ours(frame)
