"""Budgets of log reading: whoever has much to read delays only their own logs."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agent.log_reading.reading import NODE, Reading, policy_of
from tests.unit.agent.log_reading.test_discovery import say, touch
from tests.unit.agent.log_reading.test_dumps import Node, write_dump
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_agent.log_opening.node_files import Listing, NamedBy
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading import dumps, scan_units
from trainmedic_agent.log_reading.budgets import NODE_ITSELF, BudgetOwner, FairTurns, HourlyBudget
from trainmedic_agent.log_reading.cut_record import FORGOTTEN_AFTER, CutRecord
from trainmedic_agent.log_reading.directory_look import DirectoryLook
from trainmedic_agent.log_reading.discovery import Discovery, Scan
from trainmedic_agent.log_reading.files import FileFollowing, shares
from trainmedic_agent.log_reading.finders import NamedFiles
from trainmedic_agent.log_reading.followed_file import KnownFile
from trainmedic_agent.log_reading.job_budgets import LinesOfJobs
from trainmedic_agent.log_reading.log_counters import LogCounters
from trainmedic_agent.log_reading.log_files import GrowingFile
from trainmedic_agent.log_reading.scan_units import FoundFile, ScanUnit
from trainmedic_logs.diagnosis.flight_recorder import digest
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_cuts import MOST_REPORTED, CutKind, LogCut, cuts_in

HOSTILE, OTHER, NORMAL = BudgetOwner(1000, "hostile"), BudgetOwner(1000, "other"), BudgetOwner(2000, "normal")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_users_and_then_their_jobs_are_served_in_turn() -> None:
    """The user with the least use comes first, also in the next round."""
    clock = Clock()
    turns = FairTurns(clock)

    def served(count: int) -> list[str | None]:
        waiting = {HOSTILE: iter(range(100)), OTHER: iter(range(100)), NORMAL: iter(range(2))}
        names = []
        for owner, _ in turns.turns(waiting):
            names.append(owner.job)
            clock.now += 1.0 if owner == HOSTILE else 0.1
            if len(names) == count:
                break
        return names

    first = served(6)
    assert first.count("hostile") == 1
    assert first.count("normal") == 2
    second = served(8)
    assert second[:2] == ["normal", "normal"]
    assert "hostile" not in second


def test_short_work_goes_before_long_work_of_other_new_jobs() -> None:
    """A thousand new jobs with floods do not delay the one line of another."""
    turns = FairTurns(Clock())
    waiting = {BudgetOwner(1000, str(number)): [0.1] for number in range(100)} | {OTHER: [0.0]}
    owner, _ = next(turns.turns(waiting, lambda seconds: seconds))
    assert owner == OTHER


def test_an_hourly_budget_applies_to_a_job_and_its_user() -> None:
    """A user with many jobs has four times the budget of one job, and a job's first findings always pass."""
    clock = Clock()
    budget = HourlyBudget(100, clock)
    assert sum(budget.take(HOSTILE) for _ in range(200)) == 100
    others = [BudgetOwner(1000, f"job-{number}") for number in range(20)]
    assert sum(budget.take(owner) for owner in others for _ in range(100)) == 300 + 2 * 17
    assert not budget.take(HOSTILE)
    assert budget.take(OTHER)
    assert all(budget.take(NORMAL) for _ in range(100))
    assert all(budget.take(NODE_ITSELF) for _ in range(1000))
    clock.now += 1800
    assert sum(budget.take(HOSTILE) for _ in range(200)) == 50


def test_lines_of_a_job_are_limited_per_second() -> None:
    """Ten seconds' worth pass at once, then the rate applies, with one in a hundred of the others."""
    clock = Clock()
    lines, some, more = LinesOfJobs(100, CutRecord(), clock), [(0, b"")] * 400, [(0, b"")] * 900
    assert len(lines.within(HOSTILE, more)) == 900
    assert len(lines.within(HOSTILE, some)) == 100 + 3
    assert len(lines.within(HOSTILE, some)) == 4
    clock.now += 1.0
    assert len(lines.within(HOSTILE, some)) == 100 + 3
    assert len(lines.within(NORMAL, some)) == 400


def found(owner: BudgetOwner, number: int) -> FoundFile:
    return FoundFile(f"/{owner.job}/{number}", 1, hash((owner, number)), 1, number, None, owner)


def test_file_slots_are_shared_between_users_and_jobs() -> None:
    """Followed files make room for another user's, and no job exceeds its limit."""
    followed = {(1, number): HOSTILE for number in range(10)}
    wanted = [found(NORMAL, 1), found(OTHER, 1), *(found(HOSTILE, number) for number in range(5))]
    chosen = shares(followed, wanted, 6, 100)
    assert {file.owner for file in chosen.opened} == {NORMAL, OTHER}
    assert (len(chosen.closed), dict(chosen.left_out)) == (6, {HOSTILE: 11})
    chosen = shares(followed, wanted, 100, 3)
    assert (len(chosen.closed), dict(chosen.left_out)) == (7, {HOSTILE: 12})


def test_a_job_with_many_entries_hides_no_other_job(tmp_path: Path) -> None:
    """Its own scan ends at the limit, with the newest attempt first, and that is recorded."""
    crowd = AttemptLogs.of(tmp_path, "crowd", 1)
    for number in range(300):
        touch(crowd.path / f"rank-{number}.jsonl", "")
    touch(AttemptLogs.of(tmp_path, "crowd", 2).launcher(NODE))
    normal = touch(AttemptLogs.of(tmp_path, "normal", 1).launcher(NODE))
    cuts = CutRecord()
    discovery = Discovery(policy_of(roots=[str(tmp_path)], max_job_entries=100), NODE, cuts=cuts)
    scan = discovery.scan((), lambda: False, 60.0)
    paths = {file.path for file in scan.files}
    assert str(normal) in paths
    assert str(AttemptLogs.of(tmp_path, "crowd", 2).launcher(NODE)) in paths
    assert scan.is_cut
    assert {(cut.job, cut.uid, cut.what) for cut in cuts.cuts()} == {("crowd", os.getuid(), CutKind.ENTRIES)}


def test_a_scan_without_time_left_keeps_earlier_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is scanned again later, with more time."""
    path = touch(AttemptLogs.of(tmp_path, "slow", 1).launcher(NODE))
    cuts = CutRecord()
    discovery = Discovery(policy_of(roots=[str(tmp_path)]), NODE, cuts=cuts)
    assert [file.path for file in discovery.scan((), lambda: False).files] == [str(path)]
    (unit,) = discovery._units[0].by_name.values()
    unit.due, unit.changed_ns = 0.0, -1
    monkeypatch.setattr("trainmedic_agent.log_reading.discovery.SMALL_SECONDS", 0.0)
    assert [file.path for file in discovery.scan((), lambda: False, 60.0).files] == [str(path)]
    assert [(cut.job, cut.what) for cut in cuts.cuts()] == [("slow", CutKind.SECONDS)]


def test_files_named_by_a_job_are_listed_once_per_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 names in one directory cost one listing of it."""
    attempt = AttemptLogs.of(tmp_path / "logs", "llm-1", 2)
    files = [
        {"path": str(touch(tmp_path / "logs" / "own" / f"{number}.log")), "source": "training"} for number in range(64)
    ]
    say(attempt, files=files)
    listings: list[str] = []
    real = DirectoryLook.listed

    def listed(self: DirectoryLook, place: Any, *units: Any) -> Any:
        listings.append(place.path)
        return real(self, place, *units)

    monkeypatch.setattr(DirectoryLook, "listed", listed)
    scan = Discovery(policy_of(roots=[str(tmp_path / "logs")]), NODE).scan((), lambda: False)
    assert len(scan.files) == 64
    assert len(listings) <= 5  # the root, the job, its attempt, "own" as a job, and "own" by its name


def test_the_memory_of_a_users_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest job forgets its oldest files, a small one none."""
    monkeypatch.setattr("trainmedic_agent.log_reading.discovery.MOST_OF_USER", 20)
    for number in range(50):
        touch(AttemptLogs.of(tmp_path, "many", 1 + number).launcher(NODE))
    for number in range(5):
        touch(AttemptLogs.of(tmp_path, "few", 1 + number).launcher(NODE))
    cuts = CutRecord()
    scan = Discovery(policy_of(roots=[str(tmp_path)]), NODE, cuts=cuts).scan((), lambda: False)
    assert len(scan.files) == 20
    assert sum("/few/" in file.path for file in scan.files) == 5
    assert [(cut.job, cut.what, cut.count) for cut in cuts.cuts()] == [("many", CutKind.FILES, 35)]


def test_dropped_files_of_one_job_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmedic_agent.log_reading.discovery.MOST_FOUND", 20)
    for number in range(30):
        touch(AttemptLogs.of(tmp_path, "many", 1 + number).launcher(NODE))
    cuts = CutRecord()
    scan = Discovery(policy_of(roots=[str(tmp_path)]), NODE, cuts=cuts).scan((), lambda: False)
    assert len(scan.files) == 20
    assert [(cut.job, cut.what, cut.count) for cut in cuts.cuts()] == [("many", CutKind.FILES, 10)]


def test_job_directories_are_bounded_per_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those changed last are scanned; the number of the others is recorded."""
    monkeypatch.setattr(scan_units, "MOST_JOBS", 3)
    for number in range(5):
        touch(AttemptLogs.of(tmp_path, f"job-{number}", 1).launcher(NODE))
        os.utime(tmp_path / f"job-{number}", (1e9 + number, 1e9 + number))
    cuts = CutRecord()
    scan = Discovery(policy_of(roots=[str(tmp_path)]), NODE, cuts=cuts).scan((), lambda: False)
    assert {file.origin.job for file in scan.files if file.origin} == {"job-2", "job-3", "job-4"}
    assert [(cut.job, cut.what, cut.count) for cut in cuts.cuts()] == [(None, CutKind.JOBS, 2)]


def test_findings_of_one_job_are_limited_per_hour(tmp_path: Path) -> None:
    """Another job's are reported. Refused ones are counted, and get no later update."""
    root = tmp_path / "logs"
    policy = policy_of(roots=[str(root)], max_job_findings=10)
    reading = Reading(tmp_path / "state", policy)
    flood = touch(AttemptLogs.of(root, "flood", 1).launcher(NODE), "".join(f"MARK {n}\n" for n in range(100, 200)))
    normal = touch(AttemptLogs.of(root, "normal", 1).launcher(NODE), "MARK 1\n")
    reading.step()
    marks = reading.marks()
    assert "1" in marks
    assert len(marks) == 11
    with flood.open("a") as file:
        file.write("MARK 199\n")
    reading.step()
    reading.step(60)
    assert len(reading.last_words()) == 11
    assert {(cut.job, cut.what) for cut in reading.counters.cuts.cuts()} == {("flood", CutKind.FINDINGS)}
    assert normal.exists()
    reading.kill()


def test_a_flood_is_read_after_another_jobs_line(tmp_path: Path) -> None:
    """This holds in one round of reading, however many files the flood has."""
    root = tmp_path / "logs"
    reading = Reading(tmp_path / "state", policy_of(roots=[str(root)]))
    for number in range(20):
        touch(AttemptLogs.of(root, f"flood-{number}", 1).launcher(NODE), "x" * 70 + "\n")
    normal = touch(AttemptLogs.of(root, "normal", 1).launcher(NODE), "step\n")
    reading.step()
    for number in range(20):
        with AttemptLogs.of(root, f"flood-{number}", 1).launcher(NODE).open("a") as file:
            file.write("MARK 5\n" * 200)
    with normal.open("a") as file:
        file.write("MARK 1\n")
    reading.elapsed += 1.1
    polled: list[str] = []
    real = reading.following._poll
    reading.following._poll = lambda key, file, at: (polled.append(file.origin.job or ""), real(key, file, at))[1]  # type: ignore[method-assign]
    reading.following.read()
    assert polled[0] == "normal"
    reading.kill()


def test_a_dump_with_a_time_in_the_future_ages_out(tmp_path: Path) -> None:
    """Its age counts from when it was first seen."""
    attempt = AttemptLogs.of(tmp_path / "logs", "llm-1", 2)
    touch(attempt.launcher(NODE))
    path = write_dump(attempt, 0)
    os.utime(path, (4e9, 4e9))
    node = Node(tmp_path / "logs")
    node.look()
    assert node.told
    assert node.reading._lines
    node.now += timedelta(hours=2)
    node.look()
    assert not node.reading._lines
    times = node.times
    node.look()
    assert node.times == times


def test_dumps_of_one_job_use_no_budget_of_another(tmp_path: Path) -> None:
    """Heavy dumps are refused once they have used up the job's seconds. The other job's are read in its turn."""
    heavy, light = AttemptLogs.of(tmp_path / "logs", "heavy", 1), AttemptLogs.of(tmp_path / "logs", "light", 1)
    for attempt in (heavy, light):
        touch(attempt.launcher(NODE))
    for rank in range(12):
        write_dump(heavy, rank)
    write_dump(light, 1)
    node = Node(tmp_path / "logs")
    clock = Clock()
    order: list[int] = []

    def slow(raw: object) -> list[str]:
        order.append(len(order))
        clock.now += 50.0
        return ["it takes more time or memory than a dump may"]

    cuts = CutRecord()
    node.reading = type(node.reading)(node, slow, lambda: node.now, cuts, clock)
    node.look()
    said = {each.origin.job: digest.read(excerpt.lines, 1)[1] for each, excerpt in node.told.values()}
    assert len(said["light"]) == 1
    assert "time" in said["light"][1]
    assert sum("budget" in why for why in said["heavy"].values()) == 9
    assert [(cut.job, cut.what, cut.count) for cut in cuts.cuts()] == [("heavy", CutKind.DUMPS, 9)]


def test_dumps_beyond_the_newest_attempts_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This covers all older attempts, and ranks beyond the limit of one attempt."""
    monkeypatch.setattr(dumps, "MOST_RANKS", 2)
    monkeypatch.setattr(dumps, "DUMPS_OF_JOB", 2)
    for number, ranks in ((1, 2), (2, 1), (3, 3)):
        attempt = AttemptLogs.of(tmp_path / "logs", "llm-1", number)
        touch(attempt.launcher(NODE))
        for rank in range(ranks):
            write_dump(attempt, rank)
    node = Node(tmp_path / "logs")
    cuts = CutRecord()
    node.reading = type(node.reading)(node, lambda raw: ["refused"] * len(raw), lambda: node.now, cuts)
    node.look()
    assert [(cut.job, cut.what, cut.count) for cut in cuts.cuts()] == [("llm-1", CutKind.DUMPS, 4)]


def test_cuts_are_forgotten_and_bounded() -> None:
    """An agent's presence stays small, with some cuts of each kind."""
    clock = Clock()
    record = CutRecord(lambda: 1.7e9, clock)
    for number in range(500):
        record.add(BudgetOwner(number, "x" * 300), CutKind.LINES, 3)
    record.set_count(NORMAL, CutKind.FILES, 7)
    record.set_count(NORMAL, CutKind.FILES, 4)
    record.set_count(NORMAL, CutKind.ENTRIES, 0)
    cuts = record.cuts()
    assert len(cuts) <= MOST_REPORTED
    assert LogCut("", "normal", 2000, CutKind.FILES, 4, datetime.fromtimestamp(1.7e9, UTC)) in cuts
    assert record.totals()["files"] == 2
    raw = json.loads(json.dumps([cut.plain() for cut in cuts]))
    assert list(cuts_in("", {"logs": {"cuts": raw}})) == cuts
    clock.now += FORGOTTEN_AFTER + 1
    assert record.cuts() == []


@pytest.mark.parametrize(
    "cut",
    [
        None,
        7,
        {"what": "lines"},
        {"what": "other", "count": 1, "since": 0},
        {"what": "lines", "count": True, "since": 0},
        {"what": "lines", "count": 0, "since": 0},
        {"what": "lines", "count": 2**60, "since": 0},
        {"what": "lines", "count": 1, "since": 1e300},
        {"what": "lines", "count": 1, "since": 0, "job": "x" * 300},
        {"what": "lines", "count": 1, "since": 0, "uid": -1},
        {"what": ["lines"], "count": 1, "since": "now"},
    ],
)
def test_an_invalid_cut_in_a_presence_is_skipped(cut: object) -> None:
    """The valid ones next to it are listed."""
    good = {"what": "lines", "count": 1, "since": 0, "job": None, "uid": None}
    assert len(list(cuts_in("n1", {"logs": {"cuts": [cut, good]}}))) == 1
    assert list(cuts_in("n1", {"logs": {"cuts": "x"}})) == list(cuts_in("n1", {})) == []


class SlowFiles(OwnFiles):
    """Files of this process that take 0.1 s of a virtual clock to open."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.most_listed = 0

    def open(self, path: str, named_by: NamedBy | None = None) -> int:
        self.clock.now += 0.1
        return super().open(path, named_by)

    def listing(self, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
        listing = super().listing(path, most, named_by)
        self.most_listed = max(self.most_listed, len(listing.entries))
        return listing


class NoPositions:
    is_first = False
    can_take = True

    def stored(self) -> dict[str, Any]:
        return {}

    def forget(self, key: str) -> None: ...
    def store_if_overdue(self) -> None: ...


class OpenFile:
    def __init__(self, file: GrowingFile, known: KnownFile, monotonic: float) -> None:
        self.file, self.origin, self.grown_at = file, known.origin, monotonic
        self.polled = 0

    def begin(self) -> None: ...

    def poll(self, now: datetime, monotonic: float) -> bool:
        self.polled += 1
        return False

    def known(self) -> KnownFile:
        raise NotImplementedError

    def has_origin(self, origin: Origin) -> bool:
        return True

    def change_origin(self, origin: Origin) -> None: ...
    def end(self, now: datetime) -> None: ...


class Opening:
    """`FileFollowing` of files that a test owns for several users, in virtual time."""

    def __init__(self, place: Path) -> None:
        self.clock = Clock()
        self.place = place
        self.counters = LogCounters()
        self.following = FileFollowing(
            NoPositions(),
            OpenFile,
            self.counters,
            max_files=1000,
            max_job_files=500,
            now=lambda: datetime.now(UTC),
            monotonic=self.clock,
            files=SlowFiles(self.clock),
        )
        self.found: list[FoundFile] = []

    def write(self, owner: BudgetOwner, name: str, seconds_ago: float = 0.0, mode: int = 0o600) -> str:
        path = touch(self.place / f"{owner.job}-{name}", "line\n")
        path.chmod(mode)
        at = path.stat().st_mtime_ns - int(seconds_ago * 1e9)
        os.utime(path, ns=(at, at))
        facts = path.stat()
        origin = Origin("training", NODE, owner.job, stream=str(path))
        self.found.append(FoundFile(str(path), facts.st_dev, facts.st_ino, facts.st_size, at, origin, owner))
        return str(path)

    def scanned(self) -> None:
        self.following.take_scan(Scan(tuple(self.found), {}))

    @property
    def polled(self) -> dict[str, int]:
        return {file.file.position(None).path: file.polled for file in self.following.followed}


def test_opening_one_users_files_delays_no_line_of_another(tmp_path: Path) -> None:
    """A hundred older files of one user are opened on that user's time; each round serves the others first."""
    opening = Opening(tmp_path)
    for number in range(100):
        opening.write(HOSTILE, str(number), seconds_ago=60.0)
    first = opening.write(NORMAL, "first")
    opening.scanned()
    assert opening.following.read()
    assert opening.polled[first] == 1
    assert opening.clock.now < 1.0
    second = opening.write(NORMAL, "second")
    opening.scanned()
    opening.following.read()
    assert opening.polled[first] == 2
    assert opening.polled[second] == 1
    rounds = 0
    while opening.following.read():
        rounds += 1
        assert opening.polled[first] == 3 + rounds - 1
    assert len(opening.polled) == 102
    assert dict(opening.counters.files) == {"training": 102}


def test_a_jobs_files_are_opened_in_the_order_of_their_last_writes(tmp_path: Path) -> None:
    """This holds also if it takes several rounds, and later scans find more."""
    opening = Opening(tmp_path)
    expected = [opening.write(NORMAL, str(number), seconds_ago=60.0 - number) for number in range(10)]
    opening.found.reverse()
    opening.scanned()
    opening.following.read()
    expected.append(opening.write(NORMAL, "older, found later", seconds_ago=100.0))
    opening.scanned()
    while opening.following.read():
        pass
    assert list(opening.polled) == expected


def test_a_file_that_may_not_be_opened_is_counted_until_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scan tries again."""
    opening = Opening(tmp_path)
    path = opening.write(NORMAL, "closed")
    real, is_closed = OwnFiles.open, [True]

    def opened(self: OwnFiles, path: str, named_by: NamedBy | None = None) -> int:
        if is_closed[0]:
            raise PermissionError(path)
        return real(self, path, named_by)

    monkeypatch.setattr(OwnFiles, "open", opened)
    for _ in range(2):
        opening.scanned()
        opening.following.read()
        assert dict(opening.counters.refused) == {"forbidden": 1}
    is_closed[0] = False
    opening.following.read()
    assert opening.polled == {}
    opening.scanned()
    opening.following.read()
    assert opening.polled == {path: 1}
    assert dict(opening.counters.refused) == {}


def test_a_large_job_is_left_to_a_separate_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan lists a few of its entries once, then none. The thread finds the rest until the job is small again."""
    monkeypatch.setattr("trainmedic_agent.log_reading.discovery.SMALL_ENTRIES", 50)
    crowd = AttemptLogs.of(tmp_path, "crowd", 1)
    launcher = touch(crowd.launcher(NODE))
    others = [touch(crowd.path / f"other-{number}", "") for number in range(300)]
    normal = touch(AttemptLogs.of(tmp_path, "normal", 1).launcher(NODE))
    files = SlowFiles(Clock())
    discovery = Discovery(policy_of(roots=[str(tmp_path)]), NODE, files=files)

    def paths() -> set[str]:
        for unit in discovery._units[0].by_name.values():
            unit.due = 0.0 if not unit.is_in_progress else unit.due
        return {file.path for file in discovery.scan((), lambda: False, 60.0).files}

    assert str(normal) in paths()
    assert files.most_listed <= 50
    assert discovery._units[0].by_name["crowd"].is_large
    assert not discovery._units[0].by_name["normal"].is_large
    files.most_listed = 0
    paths()
    assert files.most_listed < 10
    discovery.large.look()
    assert files.most_listed == 301
    files.most_listed = 0
    assert paths() == {str(normal), str(launcher)}
    assert files.most_listed < 10
    for path in others:
        path.unlink()
    paths()
    discovery.large.look()
    assert paths() == {str(normal), str(launcher)}
    assert not discovery._units[0].by_name["crowd"].is_large


class InterruptedFiles(OwnFiles):
    """Files of this process. Each listing takes `seconds` of a virtual clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds = 0.0

    def listing(self, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
        self.clock.now += self.seconds
        return super().listing(path, most, named_by)


def test_an_interrupted_scan_of_a_job_does_not_delay_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is repeated at once. Only a job with three slow scans in a row waits, and counts as large."""
    clock = Clock()
    monkeypatch.setattr("trainmedic_agent.log_reading.scan_units.time.monotonic", clock)
    path = touch(AttemptLogs.of(tmp_path, "normal", 1).launcher(NODE))
    files = InterruptedFiles(clock)
    discovery = Discovery(policy_of(roots=[str(tmp_path)]), NODE, files=files)
    waits = []
    for seconds in (0.0, 0.9, 0.9, 0.0, 0.9, 0.9, 0.9):
        files.seconds = seconds
        assert [file.path for file in discovery.scan((), lambda: False, 60.0).files] == [str(path)]
        (unit,) = discovery._units[0].by_name.values()
        waits.append((unit.due - clock.now, unit.is_large))
        clock.now = unit.due
    assert waits[:-1] == [(wait, False) for wait in (1.0, 0.0, 0.0, 1.0, 0.0, 0.0)]
    seconds, is_large = waits[-1]
    assert seconds > 40
    assert is_large


def test_waiting_jobs_are_scanned_in_the_next_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users take turns, and each user's jobs are scanned in the order of waiting."""
    clock = Clock()
    monkeypatch.setattr("trainmedic_agent.log_reading.scan_units.time.monotonic", clock)
    files = InterruptedFiles(clock)
    discovery = Discovery(policy_of(roots=[str(tmp_path)]), NODE, files=files)
    for name in ("third", "first", "second", "other"):
        touch(AttemptLogs.of(tmp_path, name, 1).launcher(NODE))
    assert not discovery.scan((), lambda: False, 60.0).is_behind
    units = discovery._units[0].by_name
    clock.now = 2.0
    for name, due in (("first", 0.5), ("second", 0.6), ("third", 0.7), ("other", 1.0)):
        units[name].owner = BudgetOwner(2000 if name == "other" else 1000, name)
        units[name].due, units[name].looked_at = due, 0.0
    files.seconds = 0.2
    looked: list[str] = []
    is_behind = True
    while is_behind:
        is_behind = discovery.scan((), lambda: False, 0.5).is_behind
        done = [unit for unit in units.values() if unit.looked_at and unit.name not in looked]
        looked += [unit.name for unit in sorted(done, key=lambda unit: unit.looked_at)]
    assert [name for name in looked if name != "other"] == ["first", "second", "third"]
    assert looked.index("other") < 2


def test_among_many_jobs_one_without_writes_waits_longer() -> None:
    now = time.time()
    unit = ScanUnit("a", "/a", NORMAL, NamedFiles({}), None, NamedFiles({}), (0, 0, 0), "a")
    waits = []
    for seconds in (0.0, 3600.0):
        unit.written_ns = int((now - seconds) * 1e9)
        for units in (10, 3000):
            unit.record_look(5.0, 5.0, units, is_late=False)
            waits.append(round(unit.due - 5.0, 1))
    assert waits == [1.0, 3.0, 1.0, 6.0]


def test_an_interrupted_turn_counts_little() -> None:
    """Its user is not served later than others because of it."""
    clock, processor = Clock(), Clock()
    turns = FairTurns(clock, most_waiting=20.0, processor=processor)
    for _, _ in turns.turns({NORMAL: [1]}):
        clock.now += 0.8
        processor.now += 0.002
    assert turns.used_by(NORMAL.uid) == pytest.approx(0.04)
    for _, _ in turns.turns({OTHER: [1]}):
        clock.now += 0.05
        processor.now += 0.05
    assert turns.used_by(OTHER.uid) == pytest.approx(0.05)


def test_large_jobs_of_users_are_scanned_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with many of them waits longer than one with a single job. No job is scanned twice at a time."""
    table = Discovery(policy_of(roots=[str(tmp_path)]), NODE)
    units = []
    for number in range(4):
        touch(AttemptLogs.of(tmp_path, f"job-{number}", 1).launcher(NODE))
    table.scan((), lambda: False)
    for name, unit in table._units[0].by_name.items():
        unit.owner = BudgetOwner(2000 if name == "job-3" else 1000, name)
        unit.costs = (0.0, 0.0, 0.0)  # a busy machine makes one look cost more than the next
        units.append(unit)
    due: dict[BudgetOwner, list[Any]] = {unit.owner: [(unit, 1)] for unit in units}
    looks = table.large
    looks.wait_for(due, (), lambda: False)
    for _ in range(5):
        looks.look()
    results = looks.results()
    assert sorted(looked.unit.name for looked in results) == ["job-0", "job-1", "job-2", "job-3"]
    assert "job-3" in {looked.unit.name for looked in results[:2]}
    assert not any(unit.is_in_progress for unit in units)
