"""Programs that a forked process starts, for one that can execute none any more."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainmedic_core import program_source
from trainmedic_core.program_source import ProgramSource

_SCRIPT = """
import json, os, pickle, signal, sys, threading, time
from pathlib import Path
from trainmedic_core import confined_child
from trainmedic_logs.files import dump_child, dump_reader
from trainmedic_core.confined_process import ConfinedProcess
from trainmedic_core.program_source import ProgramSource

def descriptors(arguments):
    listed = [number for number in range(200) if is_open(number)]
    for _ in sys.stdin.buffer:
        print(json.dumps([listed, arguments]), flush=True)

def is_open(number):
    try:
        os.fstat(number)
        return True
    except OSError:
        return False

def endless(arguments):
    while True:
        pass

secret = os.open("/dev/null", os.O_RDONLY)
programs = {dump_child.__name__: dump_child.run, "descriptors": descriptors, "endless": endless}
source = ProgramSource.forked(programs, lambda: None)
sys.executable, sys.path[:] = "/nowhere/python", []
dump = pickle.dumps({"version": "2.9", "pg_config": {}, "entries": [], "pg_status": {}})
(read, again) = dump_reader.read_raw([(3, dump), (4, b"no pickle")], 2**27, 2**16, start=source.start)
said = {"rank": read.rank, "refused": again}
said["descriptors"] = json.loads(ConfinedProcess("descriptors", ("a", "b"), 1000, source.start).ask(b"x\\n", 60))
hanging = ConfinedProcess("endless", (), 1000, source.start)
said["endless"] = hanging.ask(b"x\\n", 0.1).decode()
hanging.end()
for _ in range(20):
    ConfinedProcess("endless", (), 1000, source.start).ask(b"x\\n", 0.01)
def running():
    return len(Path(f"/proc/{source._pid}/task/{source._pid}/children").read_text().split())

until = time.monotonic() + 60
while running() > 1 and time.monotonic() < until:  # the end of the last one is under way
    time.sleep(0.01)
said["children"] = running()
said["has_ended"] = [source.has_ended]
os.kill(source._pid, signal.SIGKILL)
until = time.monotonic() + 60
while not source.has_ended and time.monotonic() < until:
    time.sleep(0.01)
said["has_ended"].append(source.has_ended)
try:
    source.start("endless", ())
except OSError as error:
    said["then"] = "refused"
print(json.dumps(said))
"""


def test_nothing_is_executed_or_imported_and_programs_end() -> None:
    """Programs have their pipes alone, are ended when they take too long, and none is left. The end of the process
    that starts them is seen."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    said: Mapping[str, Any] = json.loads(done.stdout)
    assert said["rank"] == 3
    assert "pickle" in said["refused"]
    assert said["descriptors"] == [[0, 1, 2], ["a", "b"]]
    assert said["endless"] == ""
    assert said["children"] <= 1
    assert said["has_ended"] == [False, True]
    assert said["then"] == "refused"


@pytest.mark.parametrize("pipes", [0, 1, 2])
def test_a_program_that_cannot_start_keeps_nothing_open(monkeypatch: pytest.MonkeyPatch, pipes: int) -> None:
    """There are too many open files after some pipes, or the process that starts programs has ended."""
    connection, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.close()
    source, make = ProgramSource(0, connection), os.pipe
    ends = [make() for _ in range(pipes)]

    def pipe() -> tuple[int, int]:
        if not left:
            raise OSError(errno.EMFILE, "too many open files")
        return left.pop()

    left = list(ends)
    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(OSError, match="too many open files" if pipes < 2 else "Broken pipe"):
        source.start("any", ())
    connection.close()
    opened = {link.name for link in Path("/proc/self/fd").iterdir()}
    assert not opened & {str(number) for each in ends for number in each}


def test_the_oldest_program_makes_room_also_after_process_ids_began_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ID is then the largest."""
    ended: list[int] = []
    started = iter([4_194_303, *range(300, 310)])
    monkeypatch.setattr(os, "fork", lambda: next(started))
    monkeypatch.setattr(os, "kill", lambda pid, _: ended.append(pid))
    monkeypatch.setattr(os, "waitpid", lambda pid, _: (pid, 0))
    running: list[int] = []
    for _ in range(program_source._MOST_RUNNING + 1):
        program_source._start_program(lambda _: None, (), (), running, 0)
    assert ended == [4_194_303]
