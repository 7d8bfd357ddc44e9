"""``trainmedic logs``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from trainmedic_core.cli import groups
from trainmedic_logs.cli import log_rules
from trainmedic_server import telemetry
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.cli.log_lines import line_options, show_lines


@click.group(invoke_without_command=True)
@line_options
@server_options
def logs(client: Client, job: str | None, **conditions: Any) -> None:
    """Show the lines of a job; or check, explain and test log rules, without a server.

    \b
    trainmedic logs --job llm-1 --level error --since 1h
    trainmedic logs --job llm-1 --rank 7 --grep 'loss|grad' --follow

    Commands without a PATH use the rules of TRAINMEDIC_LOG_RULES, or else the shipped ones.
    """
    if click.get_current_context().invoked_subcommand is None:
        if job is None:
            raise click.UsageError("pass a job with --job, or a command: check, explain, schema, test")
        show_lines(client, job, **conditions)
        return
    groups.refuse_options("lines of a job")
    # The command's output covers what the catalog would log.
    telemetry.configure_logging("CRITICAL")


logs.add_command(log_rules.schema)
logs.add_command(log_rules.explain)


@logs.command()
@log_rules.paths_argument
def check(paths: Sequence[Path]) -> None:
    """Check log rules and the form of their tests.

    Each error is reported with file, line and column. Exit code: 1 after an error, 2 if there is no rule.
    """
    from trainmedic_server.simulation.check import check_log_rules  # slow to import, as below

    roots = log_rules.rule_roots(paths)
    log_rules.report_checked(roots, *check_log_rules(roots))


@logs.command()
@log_rules.paths_argument
@click.option("--verbose", "-v", is_flag=True, help="List passed tests, too.")
def test(paths: Sequence[Path], verbose: bool) -> None:
    """Run the tests next to the log rules, in virtual time.

    The tests of gpu.yaml are in gpu_test.yaml. Exit code 1 if one fails.
    """
    from trainmedic_server.actions import registry
    from trainmedic_server.simulation import suite

    actions = registry.specs_only()
    files = log_rules.found_tests(log_rules.rule_roots(paths))
    log_rules.show_results(files, lambda file: suite.run_file(file, actions), verbose=verbose)
