"""``trainmedic playbook rules``."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from trainmedic_server.cli.playbook import playbook

_SOUND = "playbook: cool\non: {alert: Hot}\ntarget: node\nsteps: [{action: notify, with: {message: hot}}]\n"
_RULES = "groups: [{name: a, rules: [{alert: Hot, expr: up}, {alert: Cold, expr: up}]}]\n"


def test_a_playbook_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """It might be the one that would react to alerts without a playbook."""
    books, rules = tmp_path / "books", tmp_path / "rules.yaml"
    books.mkdir()
    (books / "sound.yaml").write_text(_SOUND)
    (books / "broken.yaml").write_text(_SOUND.replace("Hot", "Cold") + "stps: []\n")
    rules.write_text(_RULES)
    result = CliRunner().invoke(playbook, ["rules", str(rules), "--playbooks", str(books)])
    assert (result.exit_code, "Hot   cool" in result.stdout) == (0, True)
    assert f"Not loaded: {books / 'broken.yaml'}:5:1" in result.stderr
