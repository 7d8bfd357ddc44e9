"""Playbooks follow their files on a real file system, as editors and Kubernetes change them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.catalog.actions import PLAYBOOK, config_map, library
from trainmedic_server.catalog.library import Library


def named(name: str) -> str:
    return PLAYBOOK.replace("playbook: spike", f"playbook: {name}")


async def changed(made: Library, name: str, text: str) -> None:
    """Return once the playbook's text holds `text`."""
    async with asyncio.timeout(60):
        while text not in getattr(made.get(name), "text", ""):
            await asyncio.sleep(0.01)


async def test_watching_detects_edits_and_swaps(tmp_path: Path) -> None:
    """An editor's rename over the file and a ConfigMap's swap are noticed without a request."""
    config_map(tmp_path / "map", "1", {"b.yaml": named("b")})
    (tmp_path / "a.yaml").write_text(named("a"))
    made = library(tmp_path, tmp_path / "map")
    watching = asyncio.create_task(made.watch())
    await asyncio.sleep(0.2)
    (tmp_path / ".a.yaml.swp").write_text(named("a").replace("100", "50"))
    (tmp_path / ".a.yaml.swp").rename(tmp_path / "a.yaml")
    await changed(made, "a", "steps_back: 50")
    config_map(tmp_path / "map", "2", {"b.yaml": named("b").replace("100", "50")})
    await changed(made, "b", "steps_back: 50")
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
