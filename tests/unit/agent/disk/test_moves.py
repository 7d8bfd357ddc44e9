"""What is moved away while it is cleaned keeps all that it holds from then on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.agent.disk.trees import checkpoint, clean, cleaner, left, names, put
from trainmedic_agent.disk import checkpoint_removal
from trainmedic_agent.disk.walk import DELETING

FILES = 60


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A root with many files and a checkpoint with as many, and a place outside."""
    for number in range(FILES):
        put(tmp_path / "root" / "runs" / "data" / f"{number:03}")
        put(tmp_path / "root" / "old" / "checkpoint-1" / "ranks" / f"{number:03}", days=100)
    for step in (1, 2, 3):
        checkpoint(tmp_path / "root" / "old" / f"checkpoint-{step}", days=100 - step)
    (tmp_path / "outside").mkdir()
    return tmp_path


def after(count: int, act: Callable[[], object]) -> Callable[[], bool]:
    """Asked whether to stop, which is between two files, it acts once in the middle, and never says so."""
    asked = [0]

    def is_stopping() -> bool:
        asked[0] += 1
        if asked[0] == count:
            act()
        return False

    return is_stopping


@pytest.mark.parametrize(
    ("moved", "to"),
    [
        ("root/runs/data", "outside/data"),
        ("root/runs", "outside/runs"),
        ("root", "elsewhere"),
        ("root/runs/data", "root/keep"),
        ("root/runs", "root/keep"),
    ],
)
@pytest.mark.parametrize("link", [False, True])
def test_a_directory_that_is_moved_away_ends_its_cleaning(base: Path, moved: str, to: str, link: bool) -> None:
    """It may leave the root, move under an excluded name, or move with the root; a link may lead to it."""

    def move() -> None:
        (base / moved).rename(base / to)
        if link:
            (base / moved).symlink_to(base / to)
        alive.append(len(names(base)))

    alive: list[int] = []
    rule = {"roots": [base / "root"], "globs": "runs/**", "exclude": "keep/**"}
    output = clean(cleaner({"tmp": rule}), stopping=after(FILES // 2, move))
    assert 0 < output["files"] < FILES
    assert [len(names(base))] == alive
    assert left(output, "tmp")["moved_meanwhile"] >= 1
    assert output["files"] + sum(left(output, "tmp").values()) == FILES


def test_a_log_in_a_directory_that_is_moved_away_keeps_its_content(base: Path) -> None:
    """Truncating is as harmful as deleting."""
    rule = {"roots": [base / "root"], "globs": "runs/**", "do": "truncate"}

    def move() -> None:
        (base / "root" / "runs").rename(base / "outside" / "runs")

    output = clean(cleaner({"logs": rule}), stopping=after(FILES // 2, move))
    empty = [path for path in (base / "outside").rglob("*") if path.is_file() and not path.stat().st_size]
    assert 0 < len(empty) == output["files"] < FILES


@pytest.mark.parametrize("moved", ["root", "root/old", f"root/old/{DELETING}checkpoint-1"])
def test_a_checkpoint_moved_away_during_deletion_keeps_the_rest(base: Path, moved: str) -> None:
    """The rest is no complete checkpoint under any name, because its markers were deleted first."""
    alive: list[int] = []

    def move() -> None:
        if (base / moved).exists() and len(list((base / "root/old").rglob("*"))) < total - 5:
            (base / moved).rename(base / "outside" / "moved")
            alive.append(len(names(base)))

    total = len(list((base / "root/old").rglob("*")))
    rule = {"roots": [base / "root"], "globs": "old/*", "kind": "checkpoints", "min_age": "90d"}
    output = clean(cleaner({"old": rule}), stopping=lambda: bool(not alive and move()))
    assert [len(names(base))] == alive
    assert 0 < output["files"] < FILES
    assert left(output, "old")["moved_meanwhile"] == 1
    complete = {path.parent.name for path in base.rglob(".trainmedic-complete")}
    assert complete == {"checkpoint-2", "checkpoint-3"}


def test_a_checkpoint_moved_before_anything_is_deleted_keeps_its_name(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves with its directory right after its rename, and stays whole under its old name."""
    in_place = checkpoint_removal.is_in_place

    def moving(fd: int, path: str) -> bool:
        if DELETING in path:
            (base / "root" / "old").rename(base / "outside" / "old")
            monkeypatch.undo()
        return in_place(fd, path)

    monkeypatch.setattr(checkpoint_removal, "is_in_place", moving)
    before = names(base / "root" / "old")
    rule = {"roots": [base / "root"], "globs": "old/*", "kind": "checkpoints", "min_age": "90d"}
    output = clean(cleaner({"old": rule}))
    assert names(base / "outside" / "old") == before
    assert (output["files"], left(output, "old")["moved_meanwhile"]) == (0, 1)
