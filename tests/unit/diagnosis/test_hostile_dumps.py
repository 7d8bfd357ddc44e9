"""What a job can put where its dump should be: refused, with nothing run, and the dumps beside it are read."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainmedic_logs.diagnosis.flight_recorder import dump, plain_pickle
from trainmedic_logs.errors import DumpError
from trainmedic_logs.files import dump_reader

REAL = Path(__file__).with_name("nvidia_dumps") / "lock_gil_1st" / "_dump_0"


class _Runs:
    """Its pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _dump_with(**members: Any) -> bytes:
    return pickle.dumps({"version": "2.9", "pg_config": {}, "entries": [], **members})


_SHARED_BOMB = b"(lp0\n" + b"".join(b"(lp%d\n%s" % (n + 1, b"g%d\na" % n * 10) for n in range(40)) + b"."
"""Forty lists, each of ten times the one before: 160 lists in memory, 10^40 for who copies them out."""

HOSTILE = {
    "os.system": pickle.dumps({"entries": [_Runs(os.system, "touch /tmp/trainmedic-was-run")]}),
    "eval, named as in protocol 0": b"cbuiltins\neval\n(S'1'\ntR.",
    "a class of ours": pickle.dumps({"entries": [io.BytesIO(b"1")]}),
    "a registered extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"Pabc\n.",
    "nothing": b"",
    "text": b"NCCL WARN Timeout\n" * 100,
    "half a dump": REAL.read_bytes()[:2000],
    "a million opening marks": b"\x80\x02" + b"(" * 1_000_000,
    "a list in a list, a million deep": b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "a text of 2^62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "a frame of 2^62 bytes": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"x.",
    "a memo of 2^31 places": b"\x80\x02Nr" + struct.pack("<I", 2**31 - 1) + b".",
    "a text where the entries should be": _dump_with(entries="x" * 1000),
    "too many entries": _dump_with(entries=[None] * 200_001),
    "entries that are none": _dump_with(entries=[1, "2", [3]]),
    "lists that share each other": pickle.dumps([1])[:-1] + b"0" + _SHARED_BOMB,
    "a number instead of all": pickle.dumps(7),
    "JSON, nested": b'{"entries":' + b"[" * 200_000,
    "JSON with a number of a million digits": b'{"entries": [' + b"9" * 1_000_000 + b"]}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_dump_is_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    """The real dump that is read after it in the same process is read as usual."""
    hostile, real = tmp_path / "_dump_1", tmp_path / "_dump_2"
    hostile.write_bytes(HOSTILE[name])
    real.write_bytes(REAL.read_bytes())
    dumps, refused = dump_reader.read_files([hostile, real])
    assert list(refused) == [hostile], refused
    assert 0 < len(refused[hostile]) < 400
    assert [(read.rank, len(read.entries)) for read in dumps] == [(2, 8)]
    assert not Path("/tmp/trainmedic-was-run").exists()


def test_a_dump_that_takes_all_memory_ends_only_its_own_process(tmp_path: Path) -> None:
    """Sixty million empty lists: 60 MiB of pickle take 4 GiB. The dumps before and after are read."""
    paths = [tmp_path / f"_dump_{rank}" for rank in range(3)]
    paths[0].write_bytes(REAL.read_bytes())
    paths[1].write_bytes(b"\x80\x04" + b"]" * (60 * 2**20) + b".")
    paths[2].write_bytes(REAL.read_bytes())
    dumps, refused = dump_reader.read_files(paths)
    assert ([read.rank for read in dumps], list(refused)) == ([0, 2], [paths[1]])


def test_an_endless_load_is_terminated(tmp_path: Path) -> None:
    """A dictionary of 300,000 numbers with the same hash takes hours; it gets its seconds, and no more."""
    same_hash = [str(number * (2**61 - 1)).encode() for number in range(300_000)]
    endless = b"}(" + b"".join(b"I%s\nN" % number for number in same_hash) + b"u."
    paths = [tmp_path / "_dump_0", tmp_path / "_dump_1"]
    paths[0].write_bytes(endless)
    paths[1].write_bytes(REAL.read_bytes())
    dumps, refused = dump_reader.read_files(paths)
    assert ([read.rank for read in dumps], list(refused)) == ([1], [paths[0]])


def test_a_busy_node_is_not_attributed_to_a_dump() -> None:
    """Time in which the reader of dumps does not run is not counted."""
    script = "from trainmedic_logs.files import dump_child as child; child.SECONDS_PER_DUMP = 1; child.main()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        raw = REAL.read_bytes()
        process.stdin.write(b"0 %d\n%s" % (len(raw), raw[:100]))
        process.stdin.flush()
        time.sleep(2.0)  # longer than a limit of the clock would be
        process.stdin.write(raw[100:])
        process.stdin.close()
        assert b'"dump"' in process.stdout.readline()


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A pipe never ends, a link leads elsewhere, a large file fills memory; a name states whose dump it is."""
    pipe, link, large, nameless = (tmp_path / name for name in ("_dump_1", "_dump_2", "_dump_3", "dump"))
    os.mkfifo(pipe)
    link.symlink_to(REAL)
    with large.open("wb") as file:
        file.truncate(dump.MOST_BYTES + 1)
    nameless.write_bytes(REAL.read_bytes())
    dumps, refused = dump_reader.read_files([pipe, link, large, nameless, tmp_path / "_dump_9"])
    assert (dumps, len(refused)) == ([], 5)


def test_only_needed_data_are_taken_from_a_dump() -> None:
    """Texts are cut, numbers are bounded, and further members of an entry are ignored."""
    entry = {
        "collective_seq_id": 3,
        "process_group": ("0", "d" * 10_000),
        "profiling_name": "x" * 10_000,
        "time_created_ns": 10**40,
        "input_sizes": [[10**40]],
        "frames": [{"name": "y" * 10_000}] * 1000,
        "is_p2p": False,
    }
    read = dump.from_plain({"entries": [entry, {**entry, "collective_seq_id": 10**30}]}, 0)
    assert len(read.entries) == 1
    assert read.entries[0].created_ns == 0
    assert len(json.dumps(dump.to_plain(read))) < 1000
    assert dump.from_taken(json.loads(json.dumps(dump.to_plain(read)))) == read


def test_the_child_process_can_do_nothing_else() -> None:
    """It has no file, process or signal, and no more memory than a dump needs; a child tries each of them."""
    program = (
        "from trainmedic_core import confined_child; import os, socket\n"
        "confined_child.give_up_everything(2 * 2**30)\n"
        "tried = [lambda: open('/etc/hostname'), os.fork, lambda: socket.socket(), lambda: bytearray(3 * 2**30)]\n"
        "tried.append(lambda: os.kill(os.getpid(), 0))\n"
        "for what in tried:\n"
        "    try:\n"
        "        what()\n"
        "    except (OSError, MemoryError) as error: print(type(error).__name__)\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["OSError", "BlockingIOError", "OSError", "MemoryError", "PermissionError"], (
        done.stderr
    )


def test_the_unpickler_raises_one_error_for_any_bytes() -> None:
    """Each real dump is cut at any place, with any byte changed."""
    raw = REAL.read_bytes()
    for place in range(0, len(raw), 37):
        for changed in (raw[:place], raw[:place] + bytes([raw[place] ^ 0x55]) + raw[place + 1 :]):
            try:
                dump.from_plain(plain_pickle.load(changed), 0)
            except DumpError:
                continue
