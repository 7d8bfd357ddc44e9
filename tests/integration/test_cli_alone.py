"""What the command line says and offers without a server: help, completion, mistakes in a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.support.command_line import CommandLine
from tests.support.programs import free_port
from trainmedic_server.cli import history
from trainmedic_server.domain.run import Decision, Status


def test_a_server_that_is_not_there_ends_with_3_and_says_what_to_do() -> None:
    """The message names the URL and how to start or name a server."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    away = CommandLine(nowhere).run("status")
    assert away.code == 3
    assert nowhere in away.err
    assert "trainmedic serve" in away.err


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://[::1"])
def test_a_wrong_url_ends_with_2(url: str) -> None:
    """It is a mistake in the command, not a server that is away."""
    assert CommandLine(url).run("history").code == 2


def test_a_misspelt_command_is_answered_with_the_nearest() -> None:
    """As options are."""
    wrong = CommandLine("").run("histroy")
    assert (wrong.code, "Did you mean history?" in wrong.err) == (2, True)


def test_the_whole_help_can_be_read() -> None:
    """Every command and subcommand explains itself, the exit codes included."""
    assert "Exit codes:" in CommandLine("").run("--help").out
    for command in (
        "serve",
        "status",
        "history",
        "history show",
        "runs",
        "runs undo",
        "jobs end",
        "pause",
        "resume",
        "playbook",
    ):
        helped = CommandLine("").run(*command.split(), "--help")
        assert helped.code == 0, helped.err
        assert "Usage:" in helped.out


@pytest.mark.parametrize(
    ("commands", "libraries"),
    [("history, pauses, runs, status", ("fastapi", "sqlalchemy", "pydantic", "redis")),
     ("logs, playbook", ("fastapi", "sqlalchemy"))],
)  # fmt: skip
def test_commands_do_not_load_what_only_the_server_needs(commands: str, libraries: tuple[str, ...]) -> None:
    """They start in a fraction of the time that the server's libraries take."""
    script = (
        "import sys; from trainmedic_core.cli import completion;"
        f"from trainmedic_server.cli import {commands};"
        f"print([name for name in {libraries} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=CommandLine("").environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(shell: str) -> None:
    """For each shell, and they call back the command."""
    assert f"_TRAINMEDIC_COMPLETE={shell}_complete" in CommandLine("").run("completion", shell).out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("trainmedic hi", "plain,history"),
        ("trainmedic history --status awai", "plain,awaiting_approval"),
        ("trainmedic history --decision target_b", "plain,target_busy"),
        ("trainmedic serve --mode en", "plain,enforce"),
        ("trainmedic serve --log-level de", "plain,debug"),
        ("trainmedic serve --tokens ./to", "file,./to"),
    ],
)
def test_bash_completes_commands_and_values(typed: str, offered: str) -> None:
    """The script does what it is for."""
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    assert CommandLine("").run(**words, _TRAINMEDIC_COMPLETE="bash_complete").out.split() == [offered]


def test_the_filters_know_every_status_and_reason() -> None:
    """A wrong one ends with 2, and names those that there are."""
    choices = {parameter.name: parameter.type for parameter in history.history.params}
    findable = set(Decision) - {Decision.JOINED, Decision.DUPLICATE}
    for name, values in (("status", set(Status)), ("decision", findable)):
        offered = choices[name]
        assert isinstance(offered, click.Choice)
        assert set(offered.choices) == values
    refused = CommandLine("").run("history", "--status", "suceeded")
    assert refused.code == 2
    assert "did you mean 'succeeded'?" in refused.err
    assert "--status" in CommandLine("").run("history", "--statu", "failed").err
    assert "Did you mean runs approve?" in CommandLine("").run("approve", "9a0d6f1d").err
    assert "trainmedic history show 9a0d6f1d" in CommandLine("").run("history", "9a0d6f1d").err


def test_explaining_by_no_playbooks_is_no_answer(tmp_path: Path) -> None:
    """That no playbook reacts would be true of every alert where none was found: a wrong path is to be seen."""
    alert = tmp_path / "alert.json"
    alert.write_text('{"labels": {"alertname": "Trouble"}}')
    for path in (tmp_path, tmp_path / "none"):
        explained = CommandLine("").run("playbook", "explain", str(alert), "--playbooks", str(path))
        assert (explained.code, explained.out) == (2, "")
        assert f"No playbook was loaded from {path}." in explained.err
