"""Jobs' directories that another user renames, or that change their owner: whose logs and whose budget."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.unit.agent.log_reading.reading import NODE, policy_of
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading.discovery import Discovery, Scan
from trainmedic_agent.log_reading.scan_units import DirectoryNames, FoundFile

_TENANT = 20_003
"""A user that no machine has."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root in which users can rename each other's directories."""
    made = tmp_path / "logs"
    made.mkdir()
    made.chmod(0o777)
    return made


def launched(root: Path, job: str) -> None:
    """The log of a job's launcher, which states no job: without the SDK no sources file does."""
    path = AttemptLogs.of(root, job, 1).launcher(NODE)
    path.parent.mkdir(parents=True)
    path.write_text("a line\n")


def jobs(scan: Scan) -> dict[str, str | None]:
    """By the directory's name, the job of its log."""
    return {file.path.split("/")[-3]: file.origin.job for file in scan.files if file.origin is not None}


def look(discovery: Discovery) -> Scan:
    return discovery.scan((), lambda: False)


def test_a_renamed_directory_stays_with_its_job(root: Path) -> None:
    """This holds for reading, and for searches, which use its scans."""
    reading = Discovery(policy_of(roots=[str(root)]), NODE)
    launched(root, "of-tenant")
    launched(root, "victim")
    assert jobs(look(reading)) == {"of-tenant": "of-tenant", "victim": "victim"}
    (root / "victim").rename(root / "away")
    (root / "of-tenant").rename(root / "victim")
    expected = {"away": "victim", "victim": "of-tenant"}
    assert jobs(look(reading)) == expected
    (root / "away" / "attempt-2").mkdir()
    assert jobs(look(reading)) == expected, "what the job writes later changes nothing"


def test_a_new_directory_with_a_reused_inode_number_belongs_to_its_own_job() -> None:
    """A file system reuses the number of a deleted directory for the next one, which was written later."""
    names = DirectoryNames()
    facts = OwnFiles().facts("/", ["proc"])[0]
    assert facts is not None
    later = type(facts)(facts.mode, facts.device, facts.inode, 1, 0, facts.written_ns + 1, facts.uid)
    other = type(facts)(facts.mode, facts.device, facts.inode, 1, 0, facts.written_ns, facts.uid + 1)
    assert names.first_of("a", facts) == "a"
    assert names.first_of("b", later) == "b"
    assert names.first_of("a", facts) == "a"
    assert names.first_of("c", other) == "c"


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_the_new_name_counts_where_only_owners_can_rename(root: Path, mode: int) -> None:
    """Programs write under another name first."""
    root.chmod(mode)
    discovery = Discovery(policy_of(roots=[str(root)]), NODE)
    launched(root, "unready")
    look(discovery)
    (root / "unready").rename(root / "job")
    assert jobs(look(discovery)) == {"job": "job"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
@pytest.mark.parametrize("how", ["chown", "exchange"])
def test_the_budget_is_that_of_the_current_owner(root: Path, how: str) -> None:
    """The directory may have had another owner at the first check."""
    discovery = Discovery(policy_of(roots=[str(root)]), NODE)
    launched(root, "job")
    assert owners(look(discovery)) == {0}
    if how == "exchange":
        shutil.copytree(root / "job", root / "other")
        (root / "job").rename(root / "away")
        shutil.rmtree(root / "away")
        os.chown(root / "other", _TENANT, _TENANT)
        (root / "other").rename(root / "job")
    else:
        os.chown(root / "job", _TENANT, _TENANT)
    assert owners(look(discovery)) == {_TENANT}


def owners(scan: Scan) -> set[int | None]:
    files: tuple[FoundFile, ...] = scan.files
    return {file.owner.uid for file in files}
