"""Files that are written and rotated at random, read by an agent that is killed at random: every line once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.support.examples import examples
from tests.unit.agent.log_reading.reading import Reading, policy_of
from trainmedic_agent.log_reading.line_cutter import MOST_KEPT

FILLING = st.sampled_from([0, 0, 0, 10, 300, MOST_KEPT + 7, 300_000])


class RotatedFiles(RuleBasedStateMachine):
    """Two programs with a log each, which is rotated under them."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        top = Path(self._directory.name)
        self.logs = top / "logs"
        self.logs.mkdir()
        self.reading = Reading(top / "state", policy_of(files=[f"{self.logs}/*.log"], max_lines=1_000_000))
        self.reading.step()
        self.programs: dict[str, IO[bytes]] = {}
        self.mark = 0
        self.half: dict[str, bytes] = {}
        """By program, the rest of a line that it has begun."""
        self.rotations = 0

    def _program(self, name: str) -> IO[bytes]:
        """The program's log; a new one is looked at before it can be renamed, for who comes later than that finds
        a name that nobody has named."""
        if name not in self.programs:
            self.programs[name] = (self.logs / name).open("ab", buffering=0)
            self.reading.step()
        return self.programs[name]

    @rule(name=st.sampled_from(["a.log", "b.log"]), count=st.integers(1, 4), filling=FILLING)
    def write(self, name: str, count: int, filling: int) -> None:
        """Whole lines; some are too long, and have their mark at the beginning."""
        raw = self.half.pop(name, b"")
        for _ in range(count):
            self.mark += 1
            raw += b"MARK %d " % self.mark + b"x" * filling + b"\n"
        self._program(name).write(raw)

    @rule(name=st.sampled_from(["a.log", "b.log"]), filling=FILLING)
    def write_half(self, name: str, filling: int) -> None:
        """The beginning of a line; its rest comes with the next write."""
        if name in self.half:
            return
        self.mark += 1
        self._program(name).write(b"MARK %d " % self.mark + b"y" * filling)
        self.half[name] = b"z\n"

    @rule(name=st.sampled_from(["a.log", "b.log"]), reopens=st.booleans())
    def rename(self, name: str, reopens: bool) -> None:
        """As logrotate does; the program opens the new file at once, or writes on into the old one."""
        if not (self.logs / name).exists():
            return
        self.rotations += 1
        (self.logs / name).rename(self.logs / f"{name}.{self.rotations % 900}")
        if reopens:
            self._close(name)

    @rule(name=st.sampled_from(["a.log", "b.log"]))
    def truncate(self, name: str) -> None:
        """When everything was read: what was not is lost with the file's content, and nobody can help it."""
        if name not in self.programs:
            return
        self._close(name)
        self.reading.step()
        for path in self.logs.glob(f"{name}*"):
            os.truncate(path, 0)

    @rule(name=st.sampled_from(["a.log", "b.log"]))
    def delete(self, name: str) -> None:
        """When the agent has it open, and reads the rest before it is killed: else the file is gone."""
        self.reading.step()
        self._close(name)
        (self.logs / name).unlink(missing_ok=True)
        self.reading.read()

    @rule(seconds=st.sampled_from([0.3, 1.1, 5.0]))
    def read(self, seconds: float) -> None:
        self.reading.read(seconds)

    @rule()
    def look(self) -> None:
        self.reading.look()

    @rule()
    def close_quiet_files(self) -> None:
        """An hour without a line."""
        if not self.half:
            self.reading.step(3700)

    @rule(commits=st.booleans())
    def kill(self, commits: bool) -> None:
        """At any moment: what is read and not written down is read again."""
        if commits:
            self.reading.runner.store_due(is_last=True)
        self.reading.kill()
        self.reading.start()

    @invariant()
    def no_line_counts_twice(self) -> None:
        marks = [update.finding.fields["n"] for update in self.reading.last_words().values()]
        assert len(marks) == len(set(marks)) == self.reading.counted()

    def teardown(self) -> None:
        """In the end every line was read."""
        for name, raw in list(self.half.items()):
            self._program(name).write(raw)
        self.half.clear()
        for _ in range(4):
            self.reading.step()
        self.reading.runner.store_due(is_last=True)
        found = sorted(int(mark) for mark in self.reading.marks())
        counted = self.reading.counted()
        for program in self.programs.values():
            program.close()
        self.reading.kill()
        self._directory.cleanup()
        assert found == list(range(1, self.mark + 1))
        assert counted == self.mark

    def _close(self, name: str) -> None:
        """The program ends its line, and closes its file."""
        if name in self.programs:
            with self.programs.pop(name) as program:
                program.write(self.half.pop(name, b""))


def test_every_line_counts_once_whatever_happens_to_its_file() -> None:
    """The file is renamed, deleted or truncated during writing, with kills of the agent at any point."""
    run_state_machine_as_test(
        RotatedFiles,
        settings=settings(
            max_examples=examples(40),
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
