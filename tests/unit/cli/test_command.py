"""The command finds its commands in the tables of the distributions that are installed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.command_line import CommandLine
from trainmedic_agent.cli import agent_commands
from trainmedic_core import command
from trainmedic_logs.cli import log_commands
from trainmedic_server.cli import demo, server_commands
from trainmedic_server.errors import DemoFailed

TABLES = {"server": server_commands, "agent": agent_commands, "logs": log_commands}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names of the distributions that are there; a test takes some away."""
    names = set(TABLES)

    def entry_points(group: str) -> Collection[EntryPoint]:
        assert group == "trainmedic.commands"
        return [EntryPoint(name, f"{TABLES[name].__name__}:COMMANDS", group) for name in sorted(names)]

    monkeypatch.setattr(command, "entry_points", entry_points)
    command.commands.cache_clear()
    yield names
    command.commands.cache_clear()


@pytest.mark.parametrize(
    ("absent", "name", "distribution"),
    [("server", "serve", "trainmedic-server"), ("agent", "agent-reader", "trainmedic-agent")],
)
def test_an_absent_command_names_its_distribution(
    installed: set[str], absent: str, name: str, distribution: str
) -> None:
    """It ends with 2, as a wrong argument does."""
    installed.remove(absent)
    ran = CliRunner().invoke(command.main, [name])
    assert ran.exit_code == 2
    assert f"'{name}' is a command of {distribution}, which is not installed here." in ran.output
    assert name not in command.commands()


def test_a_missing_required_note_is_reported_before_the_server_is_asked(installed: set[str]) -> None:
    """It is reported as an invalid use of the command."""
    ran = CliRunner().invoke(command.main, ["runs", "close-undo", "01a2"])
    assert ran.exit_code == 2
    assert "Missing option '--note'" in ran.output


def test_an_install_that_registers_nothing_is_named(installed: set[str]) -> None:
    """As after a pull into a checkout that an earlier version was installed from: nothing is said to be absent that may
    be there."""
    installed.clear()
    ran = CliRunner().invoke(command.main, ["serve"])
    assert ran.exit_code == 2
    assert "no distribution has registered its commands. Reinstall" in " ".join(ran.output.split())
    assert "not installed here" not in ran.output
    assert "Reinstall" in CliRunner().invoke(command.main, ["--help"]).output


def test_console_scripts_of_earlier_versions_find_the_command() -> None:
    """They are not written again when a checkout is updated."""
    assert importlib.import_module("trainmedic_server.cli").main is command.main


def test_the_servers_command_is_used_if_two_have_the_same_name(installed: set[str]) -> None:
    """It includes all of the other, and adds the lines and verdicts of a server."""
    assert command.commands()["logs"].module == server_commands.COMMANDS["logs"].module
    installed.remove("server")
    command.commands.cache_clear()
    assert command.commands()["logs"].module == log_commands.COMMANDS["logs"].module


def test_the_command_knows_where_each_command_comes_from() -> None:
    """This includes one that is not installed."""
    for name, table in TABLES.items():
        named = set(command.COMMANDS_BY_DISTRIBUTION[f"trainmedic-{name}"])
        assert named <= table.COMMANDS.keys()
        assert table.COMMANDS.keys() - named <= {"logs", "diagnose"}, name


def test_a_folder_is_diagnosed_without_the_server_being_loaded(tmp_path: Path) -> None:
    """Its libraries are not imported either: the engine, the store and HTTP."""
    (tmp_path / "rank0.log").write_text("Traceback (most recent call last):\nValueError: a wrong value\n")
    program = (
        "import sys; from trainmedic_logs.cli.folder_diagnosis import diagnose; "
        f"diagnose(['--dir', {str(tmp_path)!r}], standalone_mode=False); "
        "print(*(name for name in sys.modules if name.startswith("
        "('fastapi', 'sqlalchemy', 'structlog', 'httpx', 'trainmedic_server'))))"
    )
    environment = CommandLine("").environment()
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "cause" in done.stdout
    assert done.stdout.splitlines()[-1] == ""


def test_rules_are_checked_without_a_server_and_unchecked_parts_are_named(installed: set[str], tmp_path: Path) -> None:
    """A test that expects runs is not said to be checked whole."""
    installed.remove("server")
    (tmp_path / "a.yaml").write_text(
        "log_rule: a\nsource: training\ncontains: [went wrong]\nmatch: [went wrong]\nrole: root\n"
    )
    (tmp_path / "a_test.yaml").write_text(
        "tests:\n- name: t\n  lines: [{source: training, text: it went wrong}]\n"
        "  expect: {findings: [{rule: a}], runs: []}\n"
    )
    ran = CliRunner().invoke(command.main, ["logs", "check", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert "1 log rule, no mistake." in ran.output
    assert "runs: not checked here; trainmedic-server checks it" in ran.output
    ran = CliRunner().invoke(command.main, ["logs", "test", str(tmp_path)])
    assert (ran.exit_code, "1 tests, 0 failed" in ran.output) == (0, True), ran.output
    assert "runs: not tested here; trainmedic-server tests it" in ran.output
    (tmp_path / "a_test.yaml").write_text(
        "tests:\n- name: t\n  lines: [{source: training}]\n  expect: {findings: [{rule: a}]}\n"
    )
    ran = CliRunner().invoke(command.main, ["logs", "check", str(tmp_path)])
    assert ran.exit_code == 1
    assert "a line has either `text` or `fixture`" in ran.output
    assert CliRunner().invoke(command.main, ["logs", "test", str(tmp_path)]).exit_code == 1


@pytest.mark.parametrize("length", ["1ms", "999ms", "0s", "2h1s"])
def test_a_demo_with_an_invalid_duration_is_rejected(length: str) -> None:
    """The error comes before anything starts."""
    ran = CliRunner().invoke(command.main, ["demo", "--for", length])
    assert (ran.exit_code, f"{length} is not between 1s and 2h" in ran.output) == (2, True)


@pytest.mark.parametrize("length", ["1s", "2h"])
def test_a_demo_accepts_the_shortest_and_the_longest_duration(length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_here(*_: object, **__: object) -> None:
        raise DemoFailed("it would start")

    monkeypatch.setattr(demo, "DemoStage", not_here)
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    ran = CliRunner().invoke(command.main, ["demo", "--for", length])
    assert (ran.exit_code, "it would start" in ran.output) == (1, True)


@pytest.mark.parametrize("options", [["--job", "llm-1"], ["-f"], ["--output", "text"]])
def test_options_for_lines_are_rejected_before_a_command_on_rules(options: list[str]) -> None:
    ran = CliRunner().invoke(command.main, ["logs", *options, "schema"])
    flag = {"-f": "--follow"}.get(options[0], options[0])
    assert (ran.exit_code, f"{flag} is for lines of a job; omit it before schema" in ran.output) == (2, True)
    assert CliRunner().invoke(command.main, ["logs", "--server", "http://127.0.0.1:1", "schema"]).exit_code == 0
