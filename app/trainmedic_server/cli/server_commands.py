"""The commands that trainmedic-server brings: a table under the entry point group ``trainmedic.commands``."""

from __future__ import annotations

from collections.abc import Mapping

from trainmedic_core.command import CommandEntry

COMMANDS: Mapping[str, CommandEntry] = {
    "serve": CommandEntry("trainmedic_server.cli.serve", "Start the server."),
    "status": CommandEntry("trainmedic_server.cli.status", "Show whether the server is well, and what it is doing."),
    "now": CommandEntry(
        "trainmedic_server.cli.now", "Show what waits for you, what is changed, what comes next, and what is lost."
    ),
    "history": CommandEntry("trainmedic_server.cli.history", "Show what was done, and why."),
    "why": CommandEntry(
        "trainmedic_server.cli.why", "Say what happened to an alert, or why nothing did, and what would happen now."
    ),
    "alerts": CommandEntry("trainmedic_server.cli.alerts", "List the alerts that were heard, and what became of them."),
    "findings": CommandEntry("trainmedic_server.cli.findings", "Show what log rules have found."),
    "keep": CommandEntry("trainmedic_server.cli.findings", "Keep what is known of a job, however old it gets."),
    "approvals": CommandEntry("trainmedic_server.cli.approvals", "Show what waits for people, and what would be done."),
    "runs": CommandEntry("trainmedic_server.cli.runs", "Approve, reject, cancel, undo, start or try again a run."),
    "jobs": CommandEntry(
        "trainmedic_server.cli.connected", "List the training jobs, or say that one which is gone was meant to end."
    ),
    "agents": CommandEntry("trainmedic_server.cli.connected", "List the node agents, and those that are lost."),
    "report": CommandEntry(
        "trainmedic_server.cli.report", "Show what the time of a job came to, or what failures cost over all jobs."
    ),
    "pause": CommandEntry(
        "trainmedic_server.cli.pauses", "Stop new repairs, all or some, for a while or until further notice."
    ),
    "pauses": CommandEntry("trainmedic_server.cli.pauses", "Show what is paused, until when, and why."),
    "resume": CommandEntry("trainmedic_server.cli.pauses", "Allow new repairs again."),
    "mcp": CommandEntry(
        "trainmedic_server.cli.mcp",
        "Let an assistant look at everything, by the Model Context Protocol, and do nothing.",
    ),
    "probe": CommandEntry(
        "trainmedic_server.cli.probe", "Measure how fast nodes that do not train can speak with each other."
    ),
    "playbook": CommandEntry(
        "trainmedic_server.cli.playbook", "List playbooks; check, explain and test them without a server."
    ),
    "logs": CommandEntry(
        "trainmedic_server.cli.logs", "Show the lines of a job, or check, explain and test log rules."
    ),
    "diagnose": CommandEntry("trainmedic_server.cli.diagnose", "Say who began a failure of a job, and why."),
    "backup": CommandEntry("trainmedic_server.cli.backup", "Copy the run store while the server works."),
    "key": CommandEntry("trainmedic_server.cli.key", "Print the signing key of one job or node."),
}
