"""Confined parser of flight recorder dumps: ``python -m trainmedic_logs.files.dump_child MEMORY LONGEST_ANSWER``.

Input: ``rank length``, a line feed, and the dump; output: a line of JSON.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from typing import BinaryIO

from trainmedic_core import confined_child
from trainmedic_logs.diagnosis.flight_recorder import dump
from trainmedic_logs.errors import DumpError

SECONDS_PER_DUMP = 5
"""CPU seconds."""
MEMORY = 2 * 1024**3
"""A dump of 64 MiB takes up to 1 GiB."""
LONGEST_ANSWER = 16 * 1024**2
"""Bytes; 512 ranks take 15 KiB each."""
TOO_MUCH = "it has too many open collectives"


def main(most_memory: int = MEMORY, longest_answer: int = LONGEST_ANSWER) -> None:
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    confined_child.give_up_everything(most_memory)
    while header := source.readline(64):
        rank, length = (int(part) for part in header.split())
        signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_DUMP)
        answers.write(_answer(source, rank, length, longest_answer).encode() + b"\n")
        answers.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(source: BinaryIO, rank: int, length: int, longest: int) -> str:
    try:
        # ASCII only, so characters are bytes.
        answer = json.dumps({"dump": dump.to_plain(dump.read(source.read(length), rank))})
    except DumpError as error:
        return json.dumps({"refused": str(error)})
    except MemoryError:
        return json.dumps({"refused": "it takes more memory than a dump may"})
    return answer if len(answer) <= longest else json.dumps({"refused": TOO_MUCH})


def run(arguments: Sequence[str]) -> None:
    main(*map(int, arguments))


if __name__ == "__main__":
    run(sys.argv[1:])
