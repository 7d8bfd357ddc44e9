"""Unprivileged parser of checkpoint metadata.

Input: ``kind length``, a newline and the file's beginning; output: a line of JSON.
"""

from __future__ import annotations

import json
import re
import signal
import sys

from trainmedic_agent.disk.checkpoint_names import step_of
from trainmedic_core import confined_child

LATEST, TRAINER_STATE = "latest", "trainer_state"
SECONDS = 5  # CPU seconds per file
_MEMORY = 256 * 1024**2  # bytes
_LONGEST_NAME = 255  # characters
_BEST = re.compile(rb'"best_model_checkpoint":\s*"((?:[^"\\]|\\.)*)"')


def main() -> None:
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    confined_child.give_up_everything(_MEMORY)
    while header := source.readline(64):
        kind, length = header.split()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        raw = source.read(int(length))
        answer = {"step": latest_step(raw)} if kind.decode() == LATEST else {"best": best_name(raw)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def latest_step(raw: bytes) -> int | None:
    return step_of(raw.decode("utf-8", "replace"))


def best_name(raw: bytes) -> str | None:
    # The trainer sorts keys, so this one precedes the long history.
    match = _BEST.search(raw)
    name = "" if match is None else match[1].decode("utf-8", "replace").rstrip("/").rpartition("/")[2]
    return name if 0 < len(name) <= _LONGEST_NAME else None


if __name__ == "__main__":
    main()
