"""The cleaner under attack by a user of its node, who may do what he likes below its roots while it works.

Nothing outside the roots is deleted, whatever is renamed and linked; what is moved out stays; no half of a checkpoint
is left under a name that is read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.attack import disk_attacker
from tests.attack.cleaner_places import fill, in_process
from tests.attack.effort import random_source, trials
from tests.unit.agent.disk.trees import aged, checkpoint, clean, cleaner, left, names, put
from trainmedic_agent.disk.walk import DELETING

TRIALS = trials(60, 20_000)
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


def test_no_canary_is_deleted_while_directories_become_links(base: Path, outside: Path) -> None:
    """Neither file nor checkpoint cleaning deletes one, and the attack does hit the cleaner at work."""
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
    assert seen["changed_meanwhile"] + seen["vanished_meanwhile"] + seen["moved_meanwhile"] > TRIALS / 100


def test_the_attack_succeeds_against_a_cleaner_that_uses_paths(base: Path, outside: Path) -> None:
    """Control: deleting by path after a check for links loses canaries at once."""
    alive = names(outside)
    with attacker() as attack:
        for trial in range(300):
            place = base / f"trial-{trial}"
            root = lay_out(place, outside)
            attack(trial, place)
            for directory, _, files in os.walk(root, followlinks=False):
                for path in (Path(directory, name) for name in files):
                    if not path.parent.is_symlink() and not path.is_symlink():
                        time.sleep(0.001)  # so that the attacker has his turn between check and deletion
                        path.unlink(missing_ok=True)
            attack(0, base)
            if names(outside) != alive:
                return
    raise AssertionError("the attack never succeeded; it proves nothing")


MANY = 1500
MOVE = """
import os, sys, time
print(flush=True)
end = time.monotonic() + 60
while not os.path.exists(sys.argv[1]) and time.monotonic() < end:
    pass
time.sleep(float(sys.argv[3]))
os.rename(sys.argv[1], sys.argv[2])
print(sum(len(files) for _, _, files in os.walk(sys.argv[2])), flush=True)
"""


@pytest.mark.parametrize("kind", ["files", "checkpoints"])
def test_files_moved_out_during_cleaning_stay_except_for_one(base: Path, kind: str) -> None:
    """The move happens at a random moment; one file may be lost in the microseconds after its location check."""
    random = random_source()
    lost: Counter[int] = Counter()
    for trial in range(trials(6, 2_000)):
        place = base / f"trial-{trial}"
        moved = place / "root" / ("data" if kind == "files" else "checkpoint-1")
        for number in range(MANY):
            put(moved / "part" / f"{number:05}", days=100, size=0)
        if kind == "checkpoints":
            put(moved / ".trainmedic-complete", days=100)
            for step in (2, 3):
                checkpoint(place / "root" / f"checkpoint-{step}")
        aged(moved / "part", 100)
        aged(moved, 100)
        rule = {"roots": [place / "root"], "globs": "data/**" if kind == "files" else "*", "kind": kind}
        # A checkpoint is being deleted as soon as it is called so.
        goes = moved if kind == "files" else moved.with_name(f"{DELETING}{moved.name}")
        with mover(goes / "part", place / "outside", random.uniform(0, 0.03)) as move:
            clean(cleaner({"rule": rule}))
            after_move = move()
        if after_move is not None:
            lost[after_move - len(names(place / "outside"))] += 1
        shutil.rmtree(place)
    print(f"moves into a cleaning, by how many files were lost after them: {dict(lost)}")
    assert set(lost) <= {0, 1}
    assert lost


@contextmanager
def mover(source: Path, target: Path, delay: float) -> Iterator[Callable[[], int | None]]:
    """A process that moves a directory after a while; how many files it had then, None if it came too late."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", MOVE, source, target, str(delay)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has started
        yield lambda: int(text) if (text := process.communicate(timeout=60)[0]).strip() else None


KILLED = """
import sys
from tests.unit.agent.disk.trees import clean, cleaner
clean(cleaner({"old": {"roots": [sys.argv[1]], "globs": "*", "kind": "checkpoints"}}))
"""


def test_a_killed_cleaner_leaves_no_partial_checkpoint(base: Path) -> None:
    """Anything with a checkpoint's name or a completeness mark is whole; the next cleaning finishes the deletion."""
    random = random_source()
    halves = 0
    for trial in range(trials(4, 2_000)):
        root = base / f"trial-{trial}"
        for step in range(1, 5):
            path = root / f"checkpoint-{step}"
            for rank in range(400 if step < 3 else 1):
                put(path / "ranks" / f"{rank:03}", days=100 - step, size=10)
            checkpoint(path, days=100 - step)
        whole = {path.name: names(path) for path in root.iterdir()}
        with in_process(KILLED, root) as process:
            while not list(root.glob(f"{DELETING}*")) and process.poll() is None:
                pass
            time.sleep(random.uniform(0, 0.01))
            process.kill()
        for path in root.iterdir():
            is_whole = names(path) == whole[path.name.removeprefix(DELETING)]
            assert is_whole or path.name.startswith(DELETING)
            assert is_whole or not (path / ".trainmedic-complete").exists()
            halves += not is_whole
        clean(cleaner({"old": {"roots": [root], "globs": "*", "kind": "checkpoints"}}))
        assert sorted(path.name for path in root.iterdir()) == ["checkpoint-3", "checkpoint-4"]
        shutil.rmtree(root)
    print(f"half-deleted checkpoints met: {halves}")
