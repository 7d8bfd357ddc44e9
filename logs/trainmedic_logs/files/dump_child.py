"""The process in which flight recorder dumps are read: ``python -m trainmedic_logs.files.dump_child``.

Its arguments are the address space that it may have and the longest answer, both in bytes. It gives up what it could do
harm with before it reads the first byte: other users' files, writing, opening, starting processes, more memory or time
than a dump needs. Then it takes dumps from standard input, each as ``rank length``, a newline and the bytes, and
answers each with a line of JSON. A dump that takes too long ends the process; who started it
(`trainmedic_logs.files.dump_reader`) sees at which dump that was.
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
"""Seconds of processor time. A busy node takes longer, which is no fault of the dump."""
MEMORY = 2 * 1024**3
"""Bytes of address space. A dump of 64 MiB takes up to 1 GiB as Python's values."""
LONGEST_ANSWER = 16 * 1024**2
"""Bytes. 512 ranks with 100 collectives under way each have 15 KiB a rank."""
TOO_MUCH = "it has too much under way"


def main(most_memory: int = MEMORY, longest_answer: int = LONGEST_ANSWER) -> None:
    """Answer the dumps that come on standard input, one after another."""
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
        # JSON writes only ASCII here, so characters are bytes.
        answer = json.dumps({"dump": dump.to_plain(dump.read(source.read(length), rank))})
    except DumpError as error:
        return json.dumps({"refused": str(error)})
    except MemoryError:
        return json.dumps({"refused": "it takes more memory than a dump may"})
    return answer if len(answer) <= longest else json.dumps({"refused": TOO_MUCH})


def run(arguments: Sequence[str]) -> None:
    """Run the program with its arguments."""
    main(*map(int, arguments))


if __name__ == "__main__":
    run(sys.argv[1:])
