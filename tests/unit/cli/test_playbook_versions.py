"""``trainmedic playbook versions``: which texts a playbook had, and what was changed last."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from trainmedic_core.command import main
from trainmedic_server.cli.client import Client

USED = {"first_used_at": "2026-01-31T12:00:00Z", "last_used_at": None, "runs": 3}
ITEMS = [{"version": "b" * 64, "loaded": True, **USED}, {"version": "a" * 64, "loaded": False, **USED}]


def test_the_last_change_is_shown_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown against the version before the loaded one; no text can steer the terminal."""

    def get(self: Client, path: str, params: Any = None) -> dict[str, Any]:
        assert path == "playbooks/cool%2Fx/versions"
        if params is None:
            return {"items": ITEMS, "diff": None}
        assert params == {"before": "a" * 64, "after": "b" * 64}
        return {"items": ITEMS, "diff": {"text": "-watts: 300\n+watts: 250\x1b[2J"}}

    monkeypatch.setattr(Client, "get", get)
    done = CliRunner().invoke(main, ["playbook", "versions", "cool/x"], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    header, loaded, earlier, _, *diff = done.output.splitlines()
    assert header.split() == ["VERSION", "LOADED", "RUNS", "FIRST", "USED", "LAST", "USED"]
    assert (loaded.split()[:3], earlier.split()[:3]) == (["b" * 12, "yes", "3"], ["a" * 12, "no", "3"])
    assert diff == ["-watts: 300", "+watts: 250\\x1b[2J"]
