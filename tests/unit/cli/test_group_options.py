"""Options that are written before a command of a group, such as ``jobs --output json end``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from trainmedic_core import command
from trainmedic_server.cli.client import Client

LIFE = {"name": "llm-1", "state": "ended", "note": "scancel"}
RUN = "019c1415-6c05-7c11-9a0d-6f1d2e3c4b5a"


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of a server; which path was asked does not matter here."""
    monkeypatch.setattr(Client, "post", lambda *_, **__: LIFE)
    monkeypatch.setattr(Client, "get", lambda *_, **__: {"id": RUN})


@pytest.mark.parametrize(
    "options",
    [
        ["jobs", "--output", "json", "end", "llm-1", "--note", "x"],
        ["jobs", "end", "llm-1", "--note", "x", "--output", "json"],
        ["jobs", "--output", "table", "end", "llm-1", "--note", "x", "--output", "json"],
    ],
)
def test_the_end_of_a_job_is_shown_as_json(options: list[str]) -> None:
    """Wherever the option stands; the command's own counts first."""
    ran = CliRunner().invoke(command.main, options)
    assert (ran.exit_code, json.loads(ran.output)) == (0, LIFE)


def test_the_end_of_a_job_is_shown_in_words() -> None:
    """This holds also after the format option of the group's table."""
    for options in ([], ["--output", "table"]):
        ran = CliRunner().invoke(command.main, ["jobs", *options, "end", "llm-1", "--note", "x"])
        assert (ran.exit_code, ran.output) == (0, "llm-1: ended\n")


@pytest.mark.parametrize("group", ["history", "findings"])
def test_one_run_or_finding_is_shown_in_the_format_of_the_group(group: str) -> None:
    ran = CliRunner().invoke(command.main, [group, "--output", "json", "show", RUN])
    assert (ran.exit_code, json.loads(ran.output)) == (0, {"id": RUN})


def test_an_unsupported_output_format_is_rejected() -> None:
    ran = CliRunner().invoke(command.main, ["history", "--output", "csv", "show", RUN])
    assert (ran.exit_code, "show has no --output csv; use text or json" in ran.output) == (2, True)


@pytest.mark.parametrize(
    ("options", "flag", "about"),
    [
        (["history", "--status", "failed"], "--status", "the list of runs"),
        (["history", "-f"], "--follow", "the list of runs"),
        (["findings", "--job", "llm-1"], "--job", "the list of findings"),
    ],
)
def test_list_filters_before_the_subcommand_are_rejected(options: list[str], flag: str, about: str) -> None:
    """They had no effect: a filter for jobs does not choose the job of one run."""
    ran = CliRunner().invoke(command.main, [*options, "show", RUN])
    assert (ran.exit_code, f"{flag} is for {about}; omit it before show" in ran.output) == (2, True), ran.output
    server = ["--server", "http://127.0.0.1:1", "--token", "t"]
    assert CliRunner().invoke(command.main, [options[0], *server, "show", RUN, "--output", "json"]).exit_code == 0


def test_a_state_dir_before_the_health_check_is_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The check had nothing to compare with, as if no directory had been given."""
    ran = CliRunner().invoke(command.main, ["agent", "--state-dir", str(tmp_path), "health", "--gpus", "0"])
    assert f"Not compared: {tmp_path} has no record of an agent" in ran.output
