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


def test_an_unavailable_server_ends_with_3_and_a_hint() -> None:
    """The message names the URL and how to start or name a server."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    away = CommandLine(nowhere).run("status")
    assert away.code == 3
    assert nowhere in away.err
    assert "trainmedic serve" in away.err


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://[::1"])
def test_a_wrong_url_ends_with_2(url: str) -> None:
    """It is an error in the command, not an unavailable server."""
    assert CommandLine(url).run("history").code == 2


def test_a_misspelt_command_is_answered_with_the_nearest() -> None:
    """The same holds for options."""
    wrong = CommandLine("").run("histroy")
    assert (wrong.code, "Did you mean history?" in wrong.err) == (2, True)


def test_all_help_texts_can_be_read() -> None:
    """Every command and subcommand describes itself, including the exit codes."""
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
def test_commands_do_not_load_server_dependencies(commands: str, libraries: tuple[str, ...]) -> None:
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
    """Each shell has its script, which calls the command back."""
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
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    assert CommandLine("").run(**words, _TRAINMEDIC_COMPLETE="bash_complete").out.split() == [offered]


def test_the_filters_know_every_status_and_reason() -> None:
    """A wrong value ends with 2, and the message names the valid ones."""
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


def test_explaining_without_playbooks_is_an_error(tmp_path: Path) -> None:
    """Without playbooks no alert ever gets a reaction, so a wrong path must be visible."""
    alert = tmp_path / "alert.json"
    alert.write_text('{"labels": {"alertname": "Trouble"}}')
    for path in (tmp_path, tmp_path / "none"):
        explained = CommandLine("").run("playbook", "explain", str(alert), "--playbooks", str(path))
        assert (explained.code, explained.out) == (2, "")
        assert f"No playbook was loaded from {path}." in explained.err
