"""Command table of trainmedic-logs, for the entry point group ``trainmedic.commands``."""

from __future__ import annotations

from collections.abc import Mapping

from trainmedic_core.command import CommandEntry

COMMANDS: Mapping[str, CommandEntry] = {
    "logs": CommandEntry("trainmedic_logs.cli.log_rules", "Check and explain log rules."),
    "diagnose": CommandEntry(
        "trainmedic_logs.cli.folder_diagnosis", "Say who began a failure of a job, and why, from a folder of logs."
    ),
}
