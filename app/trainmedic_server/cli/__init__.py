"""``trainmedic``, the command.

This module holds only the group: which commands there are, and which module each lives in. A command's
module is imported when the command is run, so that ``trainmedic --help`` and the commands that
only speak to a server do not wait for the server's libraries.
"""

from __future__ import annotations

import difflib
import gc
import importlib
from collections.abc import Mapping

import click
from msgspec import Struct

from trainmedic_server import __version__

EXIT_CODES = """\b
Exit codes:
  0  done
  1  a check or test failed, or the server refused the request
  2  a flag, argument, file or setting is wrong
  3  the server cannot be reached, or cannot serve now
  4  the token is missing, unknown or not allowed to do that
  5  there is no run, playbook or other thing of that name
"""


class _CommandEntry(Struct, frozen=True):
    """The module of a command in this package, and its line in the list of commands."""

    module: str
    help: str


_COMMANDS: Mapping[str, _CommandEntry] = {
    "serve": _CommandEntry("serve", "Start the server."),
    "agent": _CommandEntry("agent", "Run the agent of a node, check what it would do, or give back what it holds."),
    "agent-reader": _CommandEntry("agent_reader", "Read logs for the agent of a node, in a process of its own."),
    "status": _CommandEntry("status", "Show whether the server is well, and what it is doing."),
    "now": _CommandEntry("now", "Show what waits for you, what is changed, what comes next, and what is lost."),
    "history": _CommandEntry("history", "Show what was done, and why."),
    "why": _CommandEntry("why", "Say what happened to an alert, or why nothing did, and what would happen now."),
    "alerts": _CommandEntry("alerts", "List the alerts that were heard, and what became of them."),
    "findings": _CommandEntry("findings", "Show what log rules have found."),
    "keep": _CommandEntry("findings", "Keep what is known of a job, however old it gets."),
    "approvals": _CommandEntry("approvals", "Show what waits for people, and what would be done."),
    "runs": _CommandEntry("runs", "Approve, reject, cancel, undo, start or try again a run."),
    "jobs": _CommandEntry("connected", "List the training jobs, or say that one which is gone was meant to end."),
    "agents": _CommandEntry("connected", "List the node agents, and those that are lost."),
    "report": _CommandEntry("report", "Show what the time of a job came to, or what failures cost over all jobs."),
    "pause": _CommandEntry("pauses", "Stop new repairs, all or some, for a while or until further notice."),
    "pauses": _CommandEntry("pauses", "Show what is paused, until when, and why."),
    "resume": _CommandEntry("pauses", "Allow new repairs again."),
    "mcp": _CommandEntry("mcp", "Let an assistant look at everything, by the Model Context Protocol, and do nothing."),
    "probe": _CommandEntry("probe", "Measure how fast nodes that do not train can speak with each other."),
    "playbook": _CommandEntry("playbook", "List playbooks; check, explain and test them without a server."),
    "logs": _CommandEntry("logs", "Show the lines of a job, or check, explain and test log rules."),
    "diagnose": _CommandEntry("diagnose", "Say who began a failure of a job, and why."),
    "backup": _CommandEntry("backup", "Copy the run store while the server works."),
    "key": _CommandEntry("key", "Print the signing key of one job or node."),
    "completion": _CommandEntry("completion", "Print the completion script of a shell."),
}


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _COMMANDS.get(cmd_name)
        if entry is None:
            return None
        gc.disable()  # what modules make lives on: to look for garbage in it was a seventh of a server's imports
        try:
            module = importlib.import_module(f"{__name__}.{entry.module}")
        finally:
            gc.freeze()
            gc.enable()
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; a name that nothing has is answered with those that are near, as it does for options."""
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], _COMMANDS)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in _COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="trainmedic")
def main() -> None:
    """Keep LLM training runs alive.

    Alertmanager posts an alert; Trainmedic matches it to a playbook, repairs the cause, checks that
    it worked, gives back what it took when the alert resolves, and keeps the record.
    """
