"""`trainmedic diagnose --dir` on folders that would take any time or memory."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.hostile.exhausting import expanding_dump
from tests.support.programs import ROOT
from tests.unit.diagnosis.test_scenes import shipped_rules
from trainmedic.errors import ConfigurationError
from trainmedic_core.command import main
from trainmedic_logs.diagnosis.flight_recorder.dump import MOST_MEMBERS
from trainmedic_logs.files import dump_reader
from trainmedic_logs.files.reading_limits import LimitKind, LimitReached, ReadingLimits
from trainmedic_logs.folder_diagnosis import diagnose_folder

OOM = b"[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB.\n"
MIB = 2**20


class Machine:
    """Its clock goes on by `step` seconds, and its memory grows by `grows` bytes, at each question."""

    def __init__(self, step: float = 0.0, grows: int = 0) -> None:
        self.now, self.resident, self._step, self._grows = 0.0, 0, step, grows

    def monotonic(self) -> float:
        self.now += self._step
        return self.now

    def used(self) -> int:
        self.resident += self._grows
        return self.resident

    def limits(self, seconds: float = 100.0, memory: int = 1024 * MIB) -> ReadingLimits:
        return ReadingLimits(seconds, memory, monotonic=self.monotonic, resident=self.used)


def bombs(directory: Path, first: int, count: int, members: int = 16) -> None:
    """Packed files of so many MiB each, of equal members, so that making them costs little."""
    member = gzip.compress(b"\0" * 1023 * 1024 + b"x\n" * 512, compresslevel=1)
    for number in range(first, first + count):
        (directory / f"rank{number}.log.gz").write_bytes(member * members)


@pytest.mark.parametrize(
    ("machine", "kind"),
    [(Machine(step=2.0), LimitKind.SECONDS), (Machine(grows=20 * MIB), LimitKind.MEMORY)],
    ids=["seconds", "memory"],
)
def test_packed_files_are_unpacked_within_the_limits(tmp_path: Path, machine: Machine, kind: LimitKind) -> None:
    """What was read before counts, and what was not read is named with the limit."""
    (tmp_path / "rank2.log").write_bytes(OOM)
    bombs(tmp_path, 3, 6)
    found = diagnose_folder(tmp_path, shipped_rules(), limits=machine.limits())
    assert found.limit_reached is kind
    assert "rank8.log.gz" in found.left_out
    assert "limit" in found.left_out["rank8.log.gz"]


def test_a_limit_reached_before_the_first_file_is_the_error(tmp_path: Path) -> None:
    """The folder is not reported as empty."""
    (tmp_path / "rank2.log").write_bytes(OOM)
    with pytest.raises(ConfigurationError, match="the limit of 0 s was reached before a file was read"):
        diagnose_folder(tmp_path, shipped_rules(), limits=ReadingLimits(0))


def test_a_reached_limit_stays_reached() -> None:
    """So everything that is left out has the same reason."""
    machine = Machine(step=60.0)
    limits = machine.limits()
    limits.check()
    with pytest.raises(LimitReached, match="100 s"):
        limits.check()
    machine.now = 0.0
    with pytest.raises(LimitReached):
        limits.check()
    assert limits.seconds_left == 0.0


def test_the_command_states_the_limit_that_was_reached(tmp_path: Path) -> None:
    """It does so in text and in JSON, with the option that sets the limit."""
    bombs(tmp_path, 0, 40, 128)
    (tmp_path / "a.log").write_bytes(OOM)
    base = ["diagnose", "--dir", str(tmp_path), "--limit-seconds", "3"]
    text = CliRunner().invoke(main, base)
    assert "the limit of 3 s was reached" in text.output
    found = json.loads(CliRunner().invoke(main, [*base, "--output", "json"]).output)
    assert found["limit_reached"] == "seconds"
    assert found["left_out"]


def test_endless_files_are_not_opened(tmp_path: Path) -> None:
    """They are a pipe, a link to a device and a socket; the logs next to them are read."""
    (tmp_path / "rank2.log").write_bytes(OOM)
    os.mkfifo(tmp_path / "rank3.log")
    (tmp_path / "rank4.log").symlink_to("/dev/zero")
    (tmp_path / "zeros").symlink_to("/dev")
    found = diagnose_folder(tmp_path, shipped_rules())
    assert (found.files_read, found.left_out) == (1, {"rank3.log": "it is not a regular file"})


def test_a_dump_whose_groups_share_one_list_is_refused_by_its_total(tmp_path: Path) -> None:
    """90 KB unpack to four million members; the dump next to it is read."""
    raw = expanding_dump()
    assert len(raw) < 200_000
    (answer,) = dump_reader.read_raw([(0, raw)])
    assert answer == f"its process groups have over {MOST_MEMBERS:,} ranks together, which is the limit"


def test_the_reader_output_is_bounded_by_its_receiver() -> None:
    """A dump whose output exceeds what the agent accepts is refused, and the next one is read."""
    large, small = expanding_dump(900), expanding_dump(1)
    answers = dump_reader.read_raw([(0, large), (1, small)], longest_answer=MIB)
    assert answers[0] == "it has too many open collectives"
    assert not isinstance(answers[1], str)
    assert answers[1].rank == 1


_PEAK = """
import resource, sys
from pathlib import Path
from trainmedic_logs.files import dump_reader
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
dumps, refused = dump_reader.read_files(sorted(Path(sys.argv[1]).iterdir()))
print(len(dumps), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_many_expanding_dumps_take_bounded_memory(tmp_path: Path) -> None:
    """Groups that dumps have in common are stored once. Stored separately, these eight take 220 MiB."""
    for rank in range(8):
        (tmp_path / f"_dump_{rank}").write_bytes(expanding_dump(700))
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    count, grown = map(int, done.stdout.split())
    assert count == 8
    assert grown < 150 * 1024


def test_texts_of_a_dump_are_stored_once() -> None:
    """Operations repeat in each rank and each entry."""
    entry = {"collective_seq_id": 1, "process_group": ("0", "default_pg"), "profiling_name": "nccl:all_reduce"}
    raw = pickle.dumps({"entries": [{**entry, "collective_seq_id": number} for number in range(5)], "pg_config": {}})
    (answer,) = dump_reader.read_raw([(0, raw)])
    assert not isinstance(answer, str)
    shared = dump_reader.SharedParts().of(answer)
    assert shared == answer
    assert len({id(each.operation) for each in shared.entries}) == 1
