"""``trainmedic diagnose``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import click

from trainmedic_core.cli import exits
from trainmedic_core.cli.output import print_document
from trainmedic_core.plain_text import visible
from trainmedic_logs.cli.folder_diagnosis import folder_options, show_folder, shown
from trainmedic_server import telemetry
from trainmedic_server.cli.client import Client, server_options


@click.command()
@folder_options
@server_options
def diagnose(
    client: Client,
    job: str | None,
    directory: Path | None,
    attempt: int | None,
    paths: Sequence[Path],
    output: str,
    limit_seconds: int,
    limit_memory: int,
) -> None:
    """Show the cause of a job's failure, with the evidence.

    With --dir, diagnose a folder of logs and dumps without a server. JOB is then needed only if the folder has several
    jobs. Otherwise, show the verdict that the server made when JOB failed. A verdict names a node only with high
    confidence, and only from evidence that no job can forge.

    \b
    trainmedic diagnose llm-1
    trainmedic diagnose --dir /data/failed/llm-1
    """
    if directory is None:
        _show_verdict_of_server(client, job, attempt, output)
    else:
        telemetry.configure_logging("CRITICAL")
        show_folder(directory, job, attempt, paths, output, limit_seconds, limit_memory)


def _show_verdict_of_server(client: Client, job: str | None, attempt: int | None, output: str) -> None:
    if job is None:
        raise exits.InvalidInput("pass a job, or a folder with --dir")
    query = {} if attempt is None else {"attempt": str(attempt)}
    found = client.get(f"jobs/{quote(job)}/diagnosis", query)
    attempts = f", attempt {found['attempt']}" if found["attempt"] else ""
    print_document(found, output, lambda _: map(visible, (f"{found['job']}{attempts}", *shown(found))))
