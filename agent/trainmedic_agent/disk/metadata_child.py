"""The process that parses metadata of checkpoints: ``python -m trainmedic_agent.disk.metadata_child``.

It gives up every right before it reads the first byte. Then it takes files from standard input, each as ``kind
length``, a newline and the bytes, and answers each with a line of JSON (`metadata_reader.MetadataAnswer`).
"""

from __future__ import annotations

import json
import re
import signal
import sys

from trainmedic_agent.disk.checkpoint_names import step_of
from trainmedic_core import confined_child

LATEST, TRAINER_STATE = "latest", "trainer_state"
"""Kinds of files: the name of the latest checkpoint, and the state of the Hugging Face trainer."""
SECONDS = 5
"""Seconds of processor time for one file. A busy node takes longer, which is no fault of the file."""
_MEMORY = 256 * 1024**2
_LONGEST_NAME = 255
_BEST = re.compile(rb'"best_model_checkpoint":\s*"((?:[^"\\]|\\.)*)"')


def main() -> None:
    """Answer the files that come on standard input, one after another."""
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
    """Return the step that the file states as the latest."""
    return step_of(raw.decode("utf-8", "replace"))


def best_name(raw: bytes) -> str | None:
    """Return the name of the best checkpoint that the beginning of a trainer's state records."""
    # The trainer sorts the keys, so this one stands before the long history.
    match = _BEST.search(raw)
    name = "" if match is None else match[1].decode("utf-8", "replace").rstrip("/").rpartition("/")[2]
    return name if 0 < len(name) <= _LONGEST_NAME else None


if __name__ == "__main__":
    main()
