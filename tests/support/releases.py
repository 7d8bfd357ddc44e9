"""Releases of the past, as they were: their files from this repository's history, with the libraries they pinned.

Here: what makes one run. Not here: what it is asked to do. Used by the tests of an upgrade. Each is installed once,
into a virtual environment beside its files in ``.cache/releases``, which takes about a minute and a package index.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.programs import CACHE, ROOT


@dataclass(frozen=True)
class Release:
    """Whose Python has the libraries, and where what is imported lies."""

    python: Path
    python_path: str


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True).stdout


def commit_of(*words: str) -> str:
    """The newest commit that ``git log`` finds by these words."""
    commit = git("log", "-1", "--format=%H", *words).decode().strip()
    assert commit, "the tests of an upgrade need the history of this repository, not a copy of its files"
    return commit


def installed(commit: str) -> Release:
    """What the repository held at this commit, ready to be run."""
    directory = CACHE / "releases" / commit
    python = directory / "venv" / "bin" / "python"
    if not (directory / "complete").exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        content = git("archive", commit, "app", "sdk", "requirements/server.txt")
        subprocess.run(["tar", "-x", "-C", str(directory)], input=content, check=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory / "venv")], check=True)
        requirements = str(directory / "requirements" / "server.txt")
        options = ("--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps")
        subprocess.run([str(python), "-m", "pip", "install", *options, "--requirement", requirements], check=True)
        (directory / "complete").touch()
    return Release(python, f"{directory}/app:{directory}/sdk")
