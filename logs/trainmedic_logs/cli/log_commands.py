from __future__ import annotations

from collections.abc import Mapping

from trainmedic_core.command import CommandEntry

COMMANDS: Mapping[str, CommandEntry] = {
    "logs": CommandEntry("trainmedic_logs.cli.log_rules", "Check, test and explain log rules."),
    "diagnose": CommandEntry(
        "trainmedic_logs.cli.folder_diagnosis", "Show the origin and cause of a job's failure from a folder of logs."
    ),
}
