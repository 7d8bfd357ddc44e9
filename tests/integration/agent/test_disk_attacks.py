"""The cleaner under attack: whatever is renamed and linked while it works, nothing outside its roots is deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.agent import disk_attacker
from tests.unit.agent.disk.trees import aged, checkpoint, clean, cleaner, left, names, put

TRIALS = int(os.environ.get("TRIALS", "400"))
FILES = ("a/f1", "a/b/f1", "a/b/f2", "a/b/c/f1", "a/b/c/f2", "a/d/f1", "a/d/c/f1")
RANKS = 4
LINKS = {
    "a": "a",
    "b": "a/b",
    "c": "a/b/c",
    "f1": "a/b/f1",
    "run": "run",
    "checkpoint-1": "run/checkpoint-1",
    "ranks": "run/checkpoint-1/ranks",
    "1": "run/checkpoint-1/ranks/1",
    "model.pt": "run/checkpoint-2/model.pt",
}

Attack = Callable[[int, Path], None]
"""Begins an attack, by its number, on a directory."""


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """Where it happens: in memory if possible, where a directory costs microseconds."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


@pytest.fixture
def outside(base: Path) -> Path:
    """The canaries: they have the names and ages of what is cleaned."""
    fill(base / "outside")
    return base / "outside"


def fill(root: Path) -> None:
    """Everything that the rules name, and the two newest checkpoints, which stay."""
    for name in FILES:
        put(root / name)
    for step in (1, 2, 3, 4):
        path = checkpoint(root / "run" / f"checkpoint-{step}", days=100 - step)
        for rank in range(RANKS if step < 3 else 0):
            put(path / "ranks" / str(rank) / "optimizer.pt", days=100 - step, size=0)
            aged(path / "ranks" / str(rank), 100 - step)
        aged(path / "ranks", 100 - step)


def lay_out(base: Path, outside: Path) -> Path:
    """A fresh root with something to clean, and beside it links to the canaries for the attacker."""
    fill(base / "root")
    (base / "links").mkdir()
    (base / "elsewhere").mkdir()
    for name, target in LINKS.items():
        (base / "links" / name).symlink_to(outside / target)
    return base / "root"


@contextmanager
def attacker() -> Iterator[Attack]:
    """A process that attacks the directory that it is told."""
    argv = [sys.executable, disk_attacker.__file__]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        commands, answers = process.stdin, process.stdout

        def attack(number: int, base: Path) -> None:
            commands.write(f"{number % len(disk_attacker.ATTACKS)} {base}\n")
            commands.flush()
            assert answers.readline()

        try:
            yield attack
        finally:
            process.kill()


def test_no_canary_dies_while_directories_become_links(base: Path, outside: Path) -> None:
    """None dies by the cleaning of files or of checkpoints, and the attack does hit the cleaner while it works."""
    alive = names(outside)
    seen: Counter[str] = Counter()
    deleted = whole = 0
    with attacker() as attack:
        for trial in range(TRIALS):
            place = base / f"trial-{trial}"
            root = lay_out(place, outside)
            by = cleaner(
                {
                    "files": {"roots": [root], "globs": "**"},
                    "checkpoints": {"roots": [root], "globs": "**/checkpoint-*", "kind": "checkpoints"},
                }
            )
            attack(trial, place)
            output = clean(by, "checkpoints", "files")
            deleted += output["files"]
            whole += output["rules"]["checkpoints"]["checkpoints"]
            for rule in by.cleaning.rules:
                seen.update(left(output, rule))
            assert names(outside) == alive, f"trial {trial}"
            attack(0, base)
            shutil.rmtree(place)
    print(f"{TRIALS} trials, {deleted} files and {whole} whole checkpoints deleted, left: {dict(seen)}")
    assert deleted > TRIALS
    assert seen["changed_meanwhile"] + seen["vanished_meanwhile"] > TRIALS / 20


def test_the_attack_works_on_a_cleaner_that_goes_by_path(base: Path, outside: Path) -> None:
    """The proof of the proof: deleting by path, after looking that there is no link, loses canaries at once."""
    alive = names(outside)
    with attacker() as attack:
        for trial in range(300):
            place = base / f"trial-{trial}"
            root = lay_out(place, outside)
            attack(trial, place)
            for directory, _, files in os.walk(root, followlinks=False):
                for path in (Path(directory, name) for name in files):
                    if not path.parent.is_symlink() and not path.is_symlink():
                        path.unlink(missing_ok=True)
            attack(0, base)
            if names(outside) != alive:
                return
    raise AssertionError("the attack never succeeded; it proves nothing")
