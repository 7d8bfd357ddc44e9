"""The removal of what attackers have left, in the tests that let them loose."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile.scene import remove


def test_a_world_writable_parent_directory_stays_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if the top directory cannot be removed at once because an attacker still writes there."""
    shared = tmp_path / "shared"
    closed = shared / "top" / "closed"
    closed.mkdir(parents=True)
    (closed / "file").touch()
    closed.chmod(0)
    shared.chmod(0o777)
    remove_directory, refused = os.rmdir, []

    def refuse_once(path: Any, **options: Any) -> None:
        if str(path) == str(shared / "top") and not refused:
            refused.append(path)
            raise OSError("Directory not empty")
        remove_directory(path, **options)

    monkeypatch.setattr(os, "rmdir", refuse_once)
    remove(shared / "top")
    assert refused
    assert (shared.stat().st_mode & 0o777, list(shared.iterdir())) == (0o777, [])
