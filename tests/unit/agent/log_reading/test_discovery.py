"""Which files are logs, and whose."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agent.log_reading.reading import NODE, policy_of
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_agent.log_opening.node_files import Listing, NamedBy
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading import discovery as discovering
from trainmedic_agent.log_reading.directory_look import is_rotated
from trainmedic_agent.log_reading.discovery import Discovery, Scan
from trainmedic_logs.domain.finding import Origin


def touch(path: Path, text: str = "x\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def say(attempt: AttemptLogs, node: str = NODE, /, **values: Any) -> None:
    """Write what a rank of a node says of itself."""
    said = {"version": 1, "job": "llm-1", "attempt": 2, "rank": 8, "local_rank": 0, "node_rank": 1, "node": node}
    touch(attempt.sources(node, values.get("local_rank", 0)), json.dumps({**said, **values}))


def scan(discovery: Discovery) -> Scan:
    return discovery.scan(set(), lambda: False)


def origins(found: Scan) -> dict[str, Origin]:
    return {Path(file.path).name: file.origin for file in found.files if file.origin is not None}


class ListingsCounted(OwnFiles):
    """Files that remember which directories were listed."""

    def __init__(self) -> None:
        self.listed: list[str] = []

    def listing(self, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
        self.listed.append(path)
        return super().listing(path, most, named_by)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptLogs:
    made = AttemptLogs.of(tmp_path / "logs", "llm-1", 2)
    made.path.mkdir(parents=True)
    return made


def test_the_directory_layout_identifies_job_attempt_and_rank(tmp_path: Path, attempt: AttemptLogs) -> None:
    """This covers records, torchrun's files of each rank, and the launcher."""
    say(attempt)
    touch(attempt.records(8))
    touch(attempt.ranks(NODE) / "none_x" / "attempt_0" / "0" / "stdout.log")
    touch(attempt.launcher(NODE))
    touch(attempt.dump(8))
    touch(attempt.path / "rank-8.jsonl.1")
    found = origins(scan(Discovery(policy_of(roots=[str(tmp_path / "logs")]), NODE)))
    assert found.keys() == {"rank-8.jsonl", "stdout.log", "launcher-n1.log"}
    for name in ("rank-8.jsonl", "stdout.log"):
        origin = found[name]
        assert (origin.source, origin.job, origin.attempt, origin.rank, origin.local_rank, origin.node_rank) == (
            "training",
            "llm-1",
            2,
            8,
            0,
            1,
        )
    assert (found["launcher-n1.log"].source, found["launcher-n1.log"].rank) == ("launcher", None)
    assert found["stdout.log"].stream.endswith("/ranks-n1/none_x/attempt_0/0/stdout.log")


def test_a_rank_without_a_local_rank_has_its_records(tmp_path: Path, attempt: AttemptLogs) -> None:
    """A process was started manually, with RANK alone. Files kept by local rank are not assigned to it."""
    touch(attempt.sources(NODE, 5), json.dumps({"version": 1, "job": "llm-1", "attempt": 2, "rank": 5, "node": NODE}))
    touch(attempt.records(5))
    touch(attempt.ranks(NODE) / "none_x" / "attempt_0" / "5" / "stdout.log")
    found = origins(scan(Discovery(policy_of(roots=[str(tmp_path / "logs")]), NODE)))
    assert (found["rank-5.jsonl"].rank, found["rank-5.jsonl"].local_rank) == (5, None)
    assert (found["stdout.log"].rank, found["stdout.log"].local_rank) == (None, 5)


def test_the_rank_is_not_guessed_without_a_sources_file(tmp_path: Path, attempt: AttemptLogs) -> None:
    """Its records may be another node's; of torchrun's files, the local rank is known."""
    touch(attempt.records(8))
    touch(attempt.ranks(NODE) / "none_x" / "attempt_0" / "3" / "stdout.log")
    found = origins(scan(Discovery(policy_of(roots=[str(tmp_path / "logs")]), NODE)))
    assert found.keys() == {"stdout.log"}
    assert (found["stdout.log"].rank, found["stdout.log"].local_rank) == (None, 3)


def test_a_job_may_name_files_where_the_policy_allows_it(tmp_path: Path, attempt: AttemptLogs) -> None:
    """Others are counted, however the path is written; no job can add kernel lines."""
    own, other = touch(tmp_path / "runs" / "own.log"), touch(tmp_path / "elsewhere" / "other.log")
    named = [
        {"path": str(own), "source": "training"},
        {"path": str(other), "source": "training"},
        {"path": f"{tmp_path}/runs/../elsewhere/other.log", "source": "training"},
        {"path": str(own), "source": "kernel"},
    ]
    say(attempt, files=named)
    policy = policy_of(roots=[str(tmp_path / "logs")], paths=[str(tmp_path / "runs")])
    result = scan(Discovery(policy, NODE))
    assert {name: origin.rank for name, origin in origins(result).items()} == {"own.log": 8}
    assert result.refused == {"outside": 3}


def test_a_renamed_directory_does_not_identify_a_job_by_its_name(tmp_path: Path, attempt: AttemptLogs) -> None:
    """Where users may rename each other's directories, one could show another's output as that of his own job. What
    the ranks say of themselves still counts."""
    say(attempt)
    for path in (
        attempt.records(8),
        attempt.launcher(NODE),
        attempt.dump(3),
        attempt.ranks(NODE) / "x" / "attempt_0" / "5" / "stdout.log",
    ):
        touch(path)
    attempt.path.parent.rename(tmp_path / "logs" / "mallory-job")
    result = scan(Discovery(policy_of(roots=[str(tmp_path / "logs")]), NODE))
    assert {name: origin.job for name, origin in origins(result).items()} == {"rank-8.jsonl": "llm-1"}
    assert result.dumps == ()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"rank": 1}', '{"job": "x", "rank": -1, "local_rank": 0, "node": "n1"}', "x" * 70_000]
)
def test_invalid_content_in_a_sources_file_is_ignored(tmp_path: Path, attempt: AttemptLogs, text: str) -> None:
    """Any process with write access to the directory can write it."""
    touch(attempt.sources(NODE, 0), text)
    touch(attempt.records(8))
    assert origins(scan(Discovery(policy_of(roots=[str(tmp_path / "logs")]), NODE))) == {}


def test_a_changed_or_removed_sources_file_is_followed(tmp_path: Path, attempt: AttemptLogs) -> None:
    """It may be read while it is being written."""
    discovery = Discovery(policy_of(roots=[str(tmp_path / "logs")]), NODE)
    touch(attempt.records(8))
    touch(attempt.sources(NODE, 0), "{")
    assert origins(scan(discovery)) == {}
    say(attempt)
    assert origins(scan(discovery)).keys() == {"rank-8.jsonl"}
    attempt.sources(NODE, 0).unlink()
    assert origins(scan(discovery)) == {}


def test_patterns_identify_the_owner_of_a_file(tmp_path: Path) -> None:
    """Job, rank and node come from placeholders; another node's file is not read here."""
    for name in ("llm-1/n1/rank-3.out", "llm-1/n2/rank-4.out", "llm-1/n1/rank-x.out"):
        touch(tmp_path / name)
    policy = policy_of(files=[{"path": f"{tmp_path}/{{job}}/{{node}}/rank-{{rank}}.out", "source": "own"}])
    found = origins(scan(Discovery(policy, NODE)))
    assert found == {"rank-3.out": Origin("own", NODE, job="llm-1", rank=3, stream=f"{tmp_path}/llm-1/n1/rank-3.out")}


def test_slurm_output_is_found_by_pattern(tmp_path: Path) -> None:
    """The job's name is included if the file name contains it."""
    touch(tmp_path / "llm-1-4711.out")
    found = origins(scan(Discovery(policy_of(slurm=[f"{tmp_path}/{{job}}-[0-9]*.out"]), NODE)))
    assert (found["llm-1-4711.out"].source, found["llm-1-4711.out"].job) == ("slurm", "llm-1")


def test_container_logs_identify_their_pod(tmp_path: Path) -> None:
    """The policy lists the namespaces."""
    pods = tmp_path / "pods"
    for pod in ("team-a_worker-0_1b2c", "kube-system_dns_3d4e", "nonsense"):
        touch(pods / pod / "main" / "0.log")
    touch(pods / "team-a_worker-0_1b2c" / "main" / "0.log.20260101-000000")
    found = scan(Discovery(policy_of(pods=["team-*"]), NODE, str(pods)))
    assert [(file.origin.pod, file.origin.source) for file in found.files if file.origin] == [
        ("team-a/worker-0", "training")
    ]


@pytest.mark.parametrize(
    ("name", "others", "rotated"),
    [
        ("a.log.1", {"a.log"}, True),
        ("a.log.1", set(), False),  # of a program that numbers its logs
        ("a.log-20260101", {"a.log"}, True),
        ("0.log.20260101-093000", {"0.log"}, True),
        ("a.log.2.gz", set(), True),
        ("rank-1", {"rank-2"}, False),
        ("a.log", {"a.log.1"}, False),
    ],
)
def test_rotated_logs_are_recognised_by_the_newer_one_next_to_them(name: str, others: set[str], rotated: bool) -> None:
    """Their lines were read under their first name."""
    assert is_rotated(name, {name, *others}) is rotated


def test_a_renamed_file_is_found_by_its_inode(tmp_path: Path) -> None:
    """It may have any name in the same directory."""
    file = touch(tmp_path / "a.log")
    facts = file.stat()
    file.rename(tmp_path / "some-other-name")
    discovery = Discovery(policy_of(files=[f"{tmp_path}/*.log"]), NODE)
    (found,) = discovery.scan({(facts.st_dev, facts.st_ino)}, lambda: False).files
    assert (found.path, found.origin) == (f"{tmp_path}/some-other-name", None)


def test_a_directory_with_too_many_entries_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan reports it."""
    monkeypatch.setattr(discovering, "MOST_ENTRIES", 100)
    for number in range(200):
        touch(tmp_path / f"{number}.log", "")
    found = scan(Discovery(policy_of(files=[f"{tmp_path}/*.log"]), NODE))
    assert found.is_cut


def test_a_listing_that_the_opener_cuts_is_shown(tmp_path: Path) -> None:
    """It lists fewer entries than a scan may take."""

    class CuttingFiles(OwnFiles):
        def listing(self, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
            return super().listing(path, min(most, 3), named_by)

    for number in range(4):
        touch(tmp_path / f"{number}.log", "")
    found = scan(Discovery(policy_of(files=[f"{tmp_path}/*.log"]), NODE, files=CuttingFiles()))
    assert found.is_cut
    (tmp_path / "3.log").unlink()
    assert not scan(Discovery(policy_of(files=[f"{tmp_path}/*.log"]), NODE, files=CuttingFiles())).is_cut


def test_a_thousand_files_are_scanned_quickly(tmp_path: Path) -> None:
    """Of three thousand files, one is a log: the others cost no call each."""
    for number in range(3000):
        (tmp_path / f"{number}.bin").touch()
    touch(tmp_path / "a.log")
    assert origins(scan(Discovery(policy_of(files=[f"{tmp_path}/*.log"]), NODE))).keys() == {"a.log"}


def test_old_jobs_are_not_scanned_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier results still count; a new attempt is found at once, everything else within a minute."""
    old = AttemptLogs.of(tmp_path / "logs", "llm-1", 1)
    say(old, attempt=1, files=[{"path": str(touch(tmp_path / "logs" / "own.log")), "source": "training"}])
    touch(old.records(8))
    for path in [*(tmp_path / "logs").rglob("*"), tmp_path / "logs" / "llm-1"]:
        os.utime(path, (1e9, 1e9))
    elapsed = [1000.0]
    monkeypatch.setattr(discovering.time, "monotonic", lambda: elapsed[0])
    files = ListingsCounted()
    discovery = Discovery(policy_of(roots=[str(tmp_path / "logs")]), NODE, files=files)
    assert origins(scan(discovery)).keys() == {"rank-8.jsonl", "own.log"}
    job = tmp_path / "logs" / "llm-1"
    looked_at = [str(tmp_path / "logs"), str(job), str(job / "attempt-1"), str(tmp_path / "logs")]
    assert files.listed == looked_at
    files.listed.clear()
    elapsed[0] += 90
    scan(discovery)
    assert files.listed == looked_at
    files.listed.clear()
    assert origins(scan(discovery)).keys() == {"rank-8.jsonl", "own.log"}
    assert files.listed == [str(tmp_path / "logs")], "the job's directory was not listed"
    touch(AttemptLogs.of(tmp_path / "logs", "llm-1", 2).launcher(NODE))
    assert origins(scan(discovery)).keys() == {"rank-8.jsonl", "own.log", "launcher-n1.log"}


@pytest.mark.parametrize("name", [b"\xff\xfe\xe4", b"%ff\xff", b"new\nline", b"9" * 255])
def test_a_job_with_any_name_hides_no_other(tmp_path: Path, attempt: AttemptLogs, name: bytes) -> None:
    """A directory name in invalid UTF-8 would otherwise end each scan before it starts."""
    attempt.launcher(NODE).touch()
    odd = os.fsencode(tmp_path) + b"/logs/" + name + b"/attempt-1"
    os.makedirs(odd + b"/ranks-n1/" + "\u00b2".encode())  # noqa: PTH103
    for path in (b"/launcher-n1.log", b"/ranks-n1/" + "\u00b2".encode() + b"/stdout.log"):
        open(odd + path, "wb").close()  # noqa: PTH123
    scan = Discovery(policy_of(roots=[f"{tmp_path}/logs"]), NODE).scan((), lambda: False)
    assert str(attempt.launcher(NODE)) in {file.path for file in scan.files}
    assert scan.errors == 0


def test_an_error_in_one_job_hides_no_other(
    tmp_path: Path, attempt: AttemptLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is counted."""
    attempt.launcher(NODE).touch()
    bad = AttemptLogs.of(tmp_path / "logs", "bad", 1)
    bad.path.mkdir(parents=True)
    listing = OwnFiles.listing

    def fail(files: OwnFiles, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
        if path.endswith("/bad"):
            raise ValueError("unexpected")
        return listing(files, path, most, named_by)

    monkeypatch.setattr(OwnFiles, "listing", fail)
    scan = Discovery(policy_of(roots=[f"{tmp_path}/logs"]), NODE).scan((), lambda: False)
    assert [file.path for file in scan.files] == [str(attempt.launcher(NODE))]
    assert scan.errors == 1
