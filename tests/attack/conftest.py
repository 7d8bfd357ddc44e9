"""Directories for attacks on the cleaner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.cleaner_places import fast_directory, fill


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    with fast_directory(tmp_path) as directory:
        yield directory


@pytest.fixture
def outside(base: Path) -> Path:
    """The canaries: they have the names and ages of what is cleaned."""
    fill(base / "outside")
    return base / "outside"
