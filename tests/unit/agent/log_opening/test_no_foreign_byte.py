"""No byte of a file that a user keeps to himself is in a finding, an answer of the search, a digest or a store.

Ann knows the source. Her job names Bob's files, and she puts them, links to them, and directories of his where logs
are read. The agent may read everything. Where this process cannot make files of two users, all directories are open
to everybody instead, so a file that not everybody may read is as foreign there.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.search_in_process import searcher_of
from tests.support.two_users import ANN, BOB, MAY_GIVE, WAYS, directory, file, open_place, switch_of
from tests.unit.agent.log_reading.reading import NODE, Reading, policy_of
from tests.unit.agent.log_shipping.shipping import Agent
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_agent.log_opening.guarded_files import GuardedFiles
from trainmedic_agent.log_opening.node_files import LogRefused
from trainmedic_agent.log_reading.budgets import BudgetOwner
from trainmedic_agent.log_reading.discovery import Discovery
from trainmedic_agent.log_reading.dumps import DumpReading
from trainmedic_agent.wiring.agent_files import node_files
from trainmedic_logs.diagnosis.flight_recorder.dump import Dump
from trainmedic_logs.domain.finding import Excerpt, Finding
from trainmedic_logs.domain.log_search import LogQuery

SECRET = "MARK 666 the-secret-of-bob"
ANN_MODE, ANN_IS, BOB_IS = (0o700, ANN, BOB) if MAY_GIVE else (0o777, None, None)


class Scene:
    """A node's logs: Ann's own, and all ways by which she has tried to show Bob's as hers."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.attempt = AttemptLogs.of(place / "logs", "ann-job", 1)
        directory(place / "logs", mode=0o1777)
        for path in (place / "logs" / "ann-job", self.attempt.path, self.attempt.dump(0).parent):
            directory(path, ANN_IS, ANN_MODE)
        self.private = self.of_bob(directory(place / "bob", BOB_IS, 0o700) / "private.log")
        self._ann()
        self._moved()
        self._linked()

    def of_bob(self, path: Path) -> Path:
        return file(path, f"{SECRET}\n", BOB_IS)

    def _ann(self) -> None:
        mode = 0o600 if MAY_GIVE else 0o644
        said = {"version": 1, "job": "ann-job", "attempt": 1, "rank": 0, "local_rank": 0, "node_rank": 0, "node": NODE}
        named = [{"path": str(path), "source": "training"} for path in (self.private, self.place / "ann" / "own.log")]
        file(self.attempt.sources(NODE, 0), json.dumps({**said, "files": named}), ANN_IS, mode)
        file(self.attempt.launcher(NODE), "MARK 1 of ann\n", ANN_IS, mode)
        file(directory(self.place / "ann", ANN_IS, ANN_MODE) / "own.log", "MARK 2 of ann\n", ANN_IS, mode)

    def _moved(self) -> None:
        """Files of Bob, as Ann can move them where he shares a directory with her."""
        for path in (self.attempt.records(0), self.attempt.dump(0), self.attempt.path / "rank-0.jsonl.1"):
            self.of_bob(path)
        older = self.of_bob(self.place / "ann" / "own.log.1")
        packed = older.with_name("own.log.2.gz")
        packed.write_bytes(gzip.compress(f"{SECRET}\n".encode()))
        older.replace(self.place / "ann" / "own.log.3")
        if BOB_IS is not None:
            os.chown(packed, BOB_IS, BOB_IS)
        packed.chmod(0o600)
        self.of_bob(directory(self.place / "globs", mode=0o1777) / "moved.log")
        file(self.place / "globs" / "public.log", "MARK 3 of anybody\n", mode=0o644)

    def _linked(self) -> None:
        (self.place / "globs" / "link.log").symlink_to(self.private)
        (self.place / "globs" / "hard.log").hardlink_to(self.of_bob(self.place / "bob" / "other.log"))
        os.mkfifo(self.place / "globs" / "pipe.log", 0o644)
        (self.place / "logs" / "ann-job" / "attempt-2").symlink_to(self.place / "bob")

    def policy(self) -> dict[str, object]:
        return {
            "roots": [f"{self.place}/logs"],
            "paths": [f"{self.place}/ann", f"{self.place}/bob"],
            "files": [{"path": f"{self.place}/globs/*.log"}],
        }


@pytest.fixture
def scene() -> Iterator[Scene]:
    with open_place() as place:
        yield Scene(place)


@pytest.fixture(params=WAYS)
def files(request: pytest.FixtureRequest, scene: Scene) -> GuardedFiles:
    tops = [f"{scene.place}/{name}" for name in ("logs", "ann", "bob", "globs")]
    # Where nobody is root this process stands for a user, and not for the agent whose own files are trusted.
    return GuardedFiles(tops, switch=switch_of(request.param), own_uid=None if MAY_GIVE else 4_000_000)


def test_findings_contain_no_foreign_byte(tmp_path: Path, scene: Scene, files: GuardedFiles) -> None:
    """Ann's own lines and public ones make findings, without any surrounding text of Bob."""
    reading = Reading(tmp_path / "state", policy_of(**scene.policy()), opened_by=files)
    for _ in range(3):
        reading.step()
    assert sorted(reading.marks()) == ["1", "2", "3"]
    assert not any(b"the-secret" in body for _, body in reading.store.number_next(10_000))
    reading.kill()


def test_search_answers_contain_no_foreign_byte(scene: Scene, files: GuardedFiles) -> None:
    """This holds for a file and for one that rotation seems to have renamed or compressed."""
    search = searcher_of(policy_of(**scene.policy()), NODE, files=files)
    page = search.page(LogQuery("ann-job", since=datetime.now(UTC) - timedelta(hours=1)), {})
    assert sorted(line.text for line in page.lines) == ["MARK 1 of ann", "MARK 2 of ann"]


def test_a_log_store_gets_no_foreign_byte(tmp_path: Path, scene: Scene, files: GuardedFiles) -> None:
    """The store gets what the rules read."""
    agent = Agent(tmp_path / "state", opened_by=files, **scene.policy())
    for _ in range(3):
        agent.step()
    assert sorted(agent.store.lines()) == ["MARK 1 of ann", "MARK 2 of ann", "MARK 3 of anybody"]
    agent.kill()


def test_another_users_dump_is_not_read(scene: Scene, files: GuardedFiles) -> None:
    """The digest says that it may not be read. The process that reads dumps gets no byte of it."""
    taken: list[bytes] = []

    class Taker:
        can_take = True

        def report(self, finding: Finding, excerpt: Excerpt, owner: BudgetOwner) -> None:
            assert "the-secret" not in "".join(excerpt.lines)

        def store_due(self) -> None: ...

    def read(raw: list[tuple[int, bytes]]) -> list[Dump | str]:
        taken.extend(each for _, each in raw)
        return ["no dump"]

    reading = DumpReading(Taker(), read, lambda: datetime.now(UTC), files=files)  # type: ignore[arg-type]
    discovery = Discovery(policy_of(**scene.policy()), NODE, files=files)
    for _ in range(3):
        scan = discovery.scan((), lambda: False)
        assert [Path(each.path).name for each in scan.dumps] == ["rank-0"]
        reading.take_scan(scan)
        reading.read()
    assert taken == []


def test_the_agent_reads_with_these_rights(scene: Scene) -> None:
    """The reader that the agent builds for a policy refuses the same files, and files outside the policy."""
    built = node_files(policy_of(**scene.policy()))
    assert isinstance(built, GuardedFiles)
    with pytest.raises(LogRefused):
        built.open("/etc/passwd")
    with pytest.raises(PermissionError):
        built.open(f"{scene.place}/globs/moved.log")
    assert built.takes_rights is ("rights" in WAYS)
