"""The command group ``trainmedic``, which imports commands only to run them."""

from __future__ import annotations

import difflib
import functools
import gc
import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

import click
from msgspec import Struct

from trainmedic_core import __version__

GROUP = "trainmedic.commands"
ORDER = ("server", "agent", "logs")
"""Entry points. The server's command ``logs`` replaces trainmedic-logs'."""

EXIT_CODES = """\b
Exit codes:
  0  done
  1  a check or test failed, or the server refused the request
  2  a flag, argument, file or setting is wrong
  3  the server cannot be reached, or cannot serve now
  4  the token is missing, unknown or not allowed to do that
  5  there is no run, playbook or other thing of that name
"""

# To name the missing distribution.
COMMANDS_BY_DISTRIBUTION = {
    "trainmedic-agent": ("agent", "agent-reader"),
    "trainmedic-logs": ("logs", "diagnose"),
    "trainmedic-server": (
        "serve",
        "demo",
        "status",
        "now",
        "history",
        "why",
        "alerts",
        "findings",
        "keep",
        "approvals",
        "runs",
        "jobs",
        "agents",
        "report",
        "pause",
        "pauses",
        "resume",
        "mcp",
        "probe",
        "playbook",
        "backup",
        "key",
    ),
}


class CommandEntry(Struct, frozen=True):
    module: str
    help: str


_COMMANDS_OF_CORE: Mapping[str, CommandEntry] = {
    "completion": CommandEntry("trainmedic_core.cli.completion", "Print the completion script of a shell."),
}

_REINSTALL_HINT = "Reinstall what you installed: its metadata is missing, or of an earlier version."


@functools.cache
def commands() -> Mapping[str, CommandEntry]:
    # From a checkout, a distribution can be found twice. Of equal commands, the first in `ORDER` counts.
    tables = {point.name: point for point in entry_points(group=GROUP) if point.name in ORDER}
    entries: dict[str, CommandEntry] = {}
    for name in ORDER:
        for command, entry in _table(tables[name]).items() if name in tables else ():
            entries.setdefault(command, entry)
    return {**entries, **_COMMANDS_OF_CORE}


def _table(point: EntryPoint) -> Mapping[str, CommandEntry]:
    table: Mapping[str, CommandEntry] = point.load()
    return table


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = commands().get(cmd_name)
        if entry is None:
            return None
        gc.disable()  # imported objects stay alive; collecting took 1/7 of a server's import time
        try:
            module = importlib.import_module(entry.module)
        finally:
            gc.freeze()
            gc.enable()
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in commands() and not ctx.resilient_parsing:
            if commands().keys() == _COMMANDS_OF_CORE.keys():
                ctx.fail(
                    f"{args[0]!r} is not available: no distribution has registered its commands. {_REINSTALL_HINT}"
                )
            for distribution, names in COMMANDS_BY_DISTRIBUTION.items():
                if args[0] in names:
                    ctx.fail(f"{args[0]!r} is a command of {distribution}, which is not installed here.")
            near = _subcommands(args[0]) or difflib.get_close_matches(args[0], commands())
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in commands().items()])
        if commands().keys() == _COMMANDS_OF_CORE.keys():
            formatter.write_paragraph()
            formatter.write_text(f"No distribution has registered its commands. {_REINSTALL_HINT}")


def _subcommands(name: str) -> list[str]:
    """Return the commands that end in `name`, such as ``playbook explain``."""
    group = LazyGroup()
    found: list[str] = []
    for parent in commands():
        command = group.get_command(click.Context(group), parent)
        if isinstance(command, click.Group) and name in command.commands:
            found.append(f"{parent} {name}")
    return found


@click.group(
    cls=LazyGroup,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="trainmedic")
def main() -> None:
    """Keep LLM training runs alive.

    Alertmanager posts an alert. Trainmedic matches it to a playbook, repairs the cause, verifies the effect, reverts
    its changes when the alert resolves, and records every step.
    """
