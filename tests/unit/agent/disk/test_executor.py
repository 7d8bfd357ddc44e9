"""The executor of ``disk.clean``: what a command may ask for, and what comes back."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.repairs import accepted
from tests.unit.agent.disk.trees import cleaner, names, put
from trainmedic_agent.disk import throttle
from trainmedic_agent.disk.executor import DiskCleanExecutor
from trainmedic_agent.disk.filesystems import mount_of
from trainmedic_agent.disk.mounts import mounts_of
from trainmedic_agent.disk.throttle import Clocks
from trainmedic_agent.errors import CommandRejected
from trainmedic_agent.executors import AcceptedCommand


@pytest.fixture(autouse=True)
def _priority_is_not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering it cannot be taken back, and this thread has other tests to run."""
    monkeypatch.setattr(throttle, "take_low_priority", lambda: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path / "root" / "a", size=5000)
    return tmp_path / "root"


def order(params: Mapping[str, Any], *, resumed: bool = False, lasts: float = 600) -> AcceptedCommand:
    return accepted("disk.clean", resumed=resumed, seconds=lasts, **params)


def test_a_command_cleans_and_returns_a_serialisable_output(root: Path) -> None:
    """The output has plain values: freed space, usage before and after, and whether it was resumed."""
    executor = DiskCleanExecutor(cleaner({"tmp": {"roots": [root]}}))
    assert (executor.action, executor.queue) == ("disk.clean", "disk")
    output = json.loads(json.dumps(executor.perform(order({"rules": ["tmp"]}))))
    assert (output["files"], output["bytes"], output["dry_run"], output["resumed"]) == (1, 8192, False, False)
    assert output["free_percent_before"] <= 100
    assert names(root) == set()


def test_an_undo_cleans_nothing(root: Path) -> None:
    """Deleted files cannot be restored, and an undo must not delete more."""
    undo = order({"rules": ["tmp"]})
    undo = replace(undo, command=dataclasses.replace(undo.command, undo_of="c0"))
    with pytest.raises(CommandRejected, match="has no undo"):
        DiskCleanExecutor(cleaner({"tmp": {"roots": [root]}})).perform(undo)
    assert names(root) == {"a"}


def test_a_repeated_command_finds_nothing_more_to_do(root: Path) -> None:
    """The files named by the rules are gone; the output says that it counts only the second part."""
    executor = DiskCleanExecutor(cleaner({"tmp": {"roots": [root]}}))
    executor.perform(order({"rules": ["tmp"]}))
    again = executor.perform(order({"rules": ["tmp"]}, resumed=True))
    assert (again["files"], again["resumed"]) == (0, True)


def test_a_dry_run_deletes_nothing(root: Path) -> None:
    """With dry_run the output says what would be deleted."""
    output = DiskCleanExecutor(cleaner({"tmp": {"roots": [root]}})).perform(order({"rules": ["tmp"], "dry_run": True}))
    assert (output["files"], names(root)) == (1, {"a"})


def test_the_cleaning_ends_before_the_command_expires(root: Path) -> None:
    """It ends early enough for the reply to arrive."""
    clocks = Clocks(now=lambda: time.time() + 596, sleep=lambda _: None)
    output = DiskCleanExecutor(cleaner({"tmp": {"roots": [root]}}, clocks=clocks)).perform(order({"rules": ["tmp"]}))
    assert output["stopped"] == "out_of_time"


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({}, "rules must be a list"),
        ({"rules": []}, "rules must be a list"),
        ({"rules": "tmp"}, "rules must be a list"),
        ({"rules": ["tmp"] * 101}, "rules must be a list"),
        ({"rules": ["tmp", "other"]}, "no cleaning rule 'other'; it has 'gone', 'tmp'"),
        ({"rules": [3]}, "no cleaning rule '3'"),
        ({"rules": ["tmp"], "until_free_percent": 100}, "until_free_percent must be"),
        ({"rules": ["tmp"], "until_free_percent": True}, "until_free_percent must be"),
        ({"rules": ["tmp"], "until_free_percent": float("nan")}, "until_free_percent must be"),
        ({"rules": ["tmp"], "dry_run": "no"}, "dry_run must be true or false"),
        ({"rules": ["tmp"], "roots": ["/"]}, "does not know 'roots'"),
        ({"rules": ["gone"]}, "no root of 'gone' can be cleaned: "),
    ],
)
def test_invalid_parameters_are_rejected_and_nothing_is_touched(root: Path, params: dict[str, Any], told: str) -> None:
    """The rejection has a reason. A command can name rules, but never what to delete or where."""
    executor = DiskCleanExecutor(cleaner({"tmp": {"roots": [root]}, "gone": {"roots": [root / "gone"]}}))
    with pytest.raises(CommandRejected, match="^.*" + told.replace("'", ".")):
        executor.perform(order(params))
    assert names(root) == {"a"}


def test_a_policy_without_rules_is_reported() -> None:
    """The policy has to be changed, not the playbook."""
    with pytest.raises(CommandRejected, match="it has none"):
        DiskCleanExecutor(cleaner({})).perform(order({"rules": ["tmp"]}))


def test_roots_on_other_file_systems_are_left_alone_and_reported(root: Path) -> None:
    """Nothing is deleted for a file system that no rule of the policy covers."""
    executor = DiskCleanExecutor(cleaner({"tmp": {"roots": [root]}}))
    named = [{"mountpoint": "/no/such/mount", "device": "/dev/no-such-disk"}]
    with pytest.raises(CommandRejected, match=r"does not lie on /no/such/mount \(/dev/no-such-disk\)"):
        executor.perform(order({"rules": ["tmp"], "filesystems": named}))
    assert names(root) == {"a"}


def test_roots_on_the_named_file_system_are_cleaned(root: Path) -> None:
    """The process identifies the file system by the mount through which the root is reached."""
    fd = os.open(root, os.O_RDONLY)
    number = mount_of(fd)
    os.close(fd)
    (mount,) = [each for each in mounts_of(Path("/proc/self")) if each.number == number]
    executor = DiskCleanExecutor(cleaner({"tmp": {"roots": [root]}}))
    named = [{"mountpoint": os.fsdecode(mount.point), "device": ""}, {"mountpoint": "/no/such/mount", "device": ""}]
    assert executor.perform(order({"rules": ["tmp"], "filesystems": named}))["files"] == 1


@pytest.mark.parametrize(
    "named",
    ["/", {"mountpoint": "/"}, [{"mountpoint": ""}], [{}], ["/"], [{"mountpoint": 7}], [{"mountpoint": "/"}] * 101],
)
def test_unreadable_file_systems_are_rejected(root: Path, named: Any) -> None:
    """Otherwise none would be selected, which would mean all."""
    with pytest.raises(CommandRejected, match="filesystems must be a list"):
        DiskCleanExecutor(cleaner({"tmp": {"roots": [root]}})).perform(order({"rules": ["tmp"], "filesystems": named}))
    assert names(root) == {"a"}
