"""Launchers for the tests, of which nothing is left at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.launch.launched import Launched


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts a command under ``trainmedic-run``."""
    made: list[Launched] = []

    def start(command: Sequence[str], *options: str, **variables: str) -> Launched:
        made.append(Launched(tmp_path, command, *options, **variables))
        return made[-1]

    yield start
    for launched in made:
        launched.close()
