"""Commands of trainmedic-agent, for the entry point group ``trainmedic.commands``."""

from __future__ import annotations

from collections.abc import Mapping

from trainmedic_core.command import CommandEntry

COMMANDS: Mapping[str, CommandEntry] = {
    "agent": CommandEntry(
        "trainmedic_agent.cli.agent", "Run the agent of a node, check its setup, or revert its changes."
    ),
    "agent-reader": CommandEntry(
        "trainmedic_agent.cli.agent_reader", "Read logs for the agent of a node, in a separate process."
    ),
}
