"""Servers started at once under random names and copies of one run store: one works, the others say why not.

The store is reached by its own name, through symlinks, by a hard link, and as copies from while a server worked on it
and from after it was killed.
"""

from __future__ import annotations

import random
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.attack.effort import random_source, trials
from tests.support.programs import PYTHON_PATH, ROOT, Program, eventually, free_port

REFUSED = 2
REASONS = ("in use by", "is a copy", "hard links")


def itself(state: Path, alias: Path) -> None:
    alias.symlink_to(state)


def linked_file(state: Path, alias: Path) -> None:
    alias.mkdir()
    (alias / "trainmedic.db").symlink_to(state / "trainmedic.db")


def hard_link(state: Path, alias: Path) -> None:
    alias.mkdir()
    (alias / "trainmedic.db").hardlink_to(state / "trainmedic.db")


def copied(state: Path, alias: Path) -> None:
    shutil.copytree(state, alias)


ALIASES: tuple[Callable[[Path, Path], None], ...] = (itself, linked_file, copied, copied, itself, hard_link)


class Contender:
    """One of the servers that are started at once."""

    def __init__(self, state: Path, log: Path) -> None:
        self.state = state
        self.url = f"http://127.0.0.1:{(port := free_port())}/ready"
        self.program = Program(
            [
                *(sys.executable, "-m", "trainmedic_server", "serve", "--port", str(port)),
                *("--state-dir", state, "--playbooks", ROOT / "playbooks"),
            ],
            log,
            {"PYTHONPATH": PYTHON_PATH},
        )

    def works(self) -> bool:
        try:
            with urllib.request.urlopen(self.url, timeout=60) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as refused:
            refused.close()
            return False
        except (urllib.error.URLError, OSError):
            return False

    def is_decided(self) -> bool:
        return self.program.process.poll() is not None or self.works()


def start_at_once(directory: Path, states: list[Path], first: int = 0) -> list[Contender]:
    contenders = [Contender(state, directory / f"{number}.log") for number, state in enumerate(states, first)]
    try:
        for contender in contenders:
            eventually(contender.is_decided, 60, "it works or has ended", every=0.05)
    except BaseException:
        end(contenders)
        raise
    return contenders


def end(contenders: list[Contender]) -> None:
    for contender in contenders:
        contender.program.process.kill()
        contender.program.process.wait()


def drawn(source: random.Random, state: Path, directory: Path, number: int) -> Path:
    alias = directory / f"alias-{number}"
    source.choice(ALIASES)(state, alias)
    return alias


def test_only_one_of_many_servers_on_one_store_works(tmp_path: Path) -> None:
    """Any of them may be first. All are killed, and the next ones start at once on what was left."""
    source = random_source()
    state = tmp_path / "state"
    end(start_at_once(tmp_path, [state]))
    for trial in range(trials(2, 100)):
        directory = tmp_path / str(trial)
        directory.mkdir()
        early = [drawn(source, state, directory, number) for number in range(source.randint(1, 2))]
        contenders = start_at_once(directory, [*early, state])
        try:
            late = drawn(source, state, directory, 9)
            contenders += start_at_once(directory, [late], first=len(contenders))
            working = [contender for contender in contenders if contender.works()]
            has_hard_links = (state / "trainmedic.db").stat().st_nlink > 1
            assert len(working) == 1 or (has_hard_links and not working), [
                contender.program.tail(3) for contender in contenders
            ]
            for contender in contenders:
                if contender not in working:
                    assert contender.program.process.poll() == REFUSED, contender.program.tail()
                    assert any(reason in contender.program.tail() for reason in REASONS), contender.program.tail()
        finally:
            end(contenders)
            shutil.rmtree(directory, ignore_errors=True)  # a Redis that ends takes its own files away meanwhile
