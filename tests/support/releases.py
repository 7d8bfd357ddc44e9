"""Releases of the past and of the future, for the tests of an upgrade.

Those of the past are their files from this repository's history, with the libraries they pinned. Each is installed
once, into a virtual environment beside its files in ``.cache/releases``, which takes about a minute and a package
index. That of the future is this checkout with one migration more. Not here: what a release is asked to do.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.programs import CACHE, ROOT
from trainmedic_server.adapters.sql_store import schema

NEXT_REVISION = "9999"
_MIGRATION = f"""
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "{NEXT_REVISION}", "{schema.HEAD}", None, None


def upgrade():
    op.add_column("runs", sa.Column("mood", sa.Text))
    op.create_table("moods", sa.Column("name", sa.Text, primary_key=True))
    op.execute("INSERT INTO moods (name) SELECT id FROM runs")
    op.execute("UPDATE runs SET mood = 'calm'")
"""


@dataclass(frozen=True)
class Release:
    """Whose Python has the libraries, and where what is imported lies."""

    python: Path
    python_path: str


PARTS = ("app", "agent", "logs", "sdk")
"""The folders of the distributions. Older commits have the first and the last."""


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
        parts = [part for part in PARTS if git("ls-tree", "-d", "--name-only", commit, part)]
        content = git("archive", commit, *parts, "requirements/server.txt")
        subprocess.run(["tar", "-x", "-C", str(directory)], input=content, check=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory / "venv")], check=True)
        requirements = str(directory / "requirements" / "server.txt")
        options = ("--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps")
        subprocess.run([str(python), "-m", "pip", "install", *options, "--requirement", requirements], check=True)
        (directory / "complete").touch()
    return Release(python, ":".join(f"{directory}/{part}" for part in PARTS))


def add_migration(migrations: Path) -> None:
    """Add a migration to `NEXT_REVISION`, which only adds to the schema."""
    (migrations / "versions" / f"{NEXT_REVISION}_moods.py").write_text(_MIGRATION)


def next_release(directory: Path) -> Release:
    """This checkout with one migration more, as files in `directory`."""
    shutil.copytree(ROOT / "app", directory / "app", ignore=shutil.ignore_patterns("__pycache__"))
    store = directory / "app/trainmedic_server/adapters/sql_store"
    add_migration(store / "migrations")
    code = (store / "schema.py").read_text()
    changed = code.replace(f'HEAD = "{schema.HEAD}"', f'HEAD = "{NEXT_REVISION}"')
    assert changed != code
    (store / "schema.py").write_text(changed)
    return Release(
        Path(sys.executable), ":".join((f"{directory}/app", *(f"{ROOT}/{part}" for part in PARTS if part != "app")))
    )
