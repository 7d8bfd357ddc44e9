"""Registered as entry point of the group ``trainmedic.commands``."""

from __future__ import annotations

from collections.abc import Mapping

from trainmedic_core.command import CommandEntry

COMMANDS: Mapping[str, CommandEntry] = {
    "serve": CommandEntry("trainmedic_server.cli.serve", "Start the server."),
    "demo": CommandEntry("trainmedic_server.cli.demo", "Show repairs on this machine, without a GPU."),
    "status": CommandEntry("trainmedic_server.cli.status", "Show whether the server is ready, and what it is doing."),
    "now": CommandEntry(
        "trainmedic_server.cli.now", "Show pending approvals, active changes, open runs, and lost agents and jobs."
    ),
    "history": CommandEntry("trainmedic_server.cli.history", "Show runs, and decisions not to start one."),
    "why": CommandEntry(
        "trainmedic_server.cli.why", "Show what happened for an alert, or why nothing did, and what would happen now."
    ),
    "alerts": CommandEntry("trainmedic_server.cli.alerts", "List received alerts and the reactions to them."),
    "findings": CommandEntry("trainmedic_server.cli.findings", "Show findings of log rules."),
    "keep": CommandEntry("trainmedic_server.cli.findings", "Keep a job's data past retention."),
    "approvals": CommandEntry("trainmedic_server.cli.approvals", "Show questions that wait for people."),
    "runs": CommandEntry("trainmedic_server.cli.runs", "Approve, reject, cancel, undo, start or retry a run."),
    "jobs": CommandEntry("trainmedic_server.cli.connected", "List training jobs, or mark a gone one as ended."),
    "agents": CommandEntry("trainmedic_server.cli.connected", "List connected and lost node agents."),
    "report": CommandEntry("trainmedic_server.cli.report", "Show the use of a job's time, or the cost of failures."),
    "pause": CommandEntry(
        "trainmedic_server.cli.pauses", "Stop new repairs, all or some, for a while or until further notice."
    ),
    "pauses": CommandEntry("trainmedic_server.cli.pauses", "Show present and future pauses."),
    "resume": CommandEntry("trainmedic_server.cli.pauses", "Allow new repairs again."),
    "mcp": CommandEntry(
        "trainmedic_server.cli.mcp",
        "Give an assistant read-only access, by the Model Context Protocol.",
    ),
    "probe": CommandEntry("trainmedic_server.cli.probe", "Measure the network between idle nodes."),
    "playbook": CommandEntry(
        "trainmedic_server.cli.playbook", "List playbooks; check, explain and test them without a server."
    ),
    "logs": CommandEntry(
        "trainmedic_server.cli.logs", "Show the lines of a job, or check, explain and test log rules."
    ),
    "diagnose": CommandEntry("trainmedic_server.cli.diagnose", "Show the cause of a job's failure."),
    "backup": CommandEntry("trainmedic_server.cli.backup", "Copy the run store while the server runs."),
    "key": CommandEntry("trainmedic_server.cli.key", "Print the signing key of one job or node."),
}
