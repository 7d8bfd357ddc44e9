"""``trainmedic diagnose --dir``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from trainmedic.errors import ConfigurationError
from trainmedic_core.cli import exits
from trainmedic_core.cli.output import output_option, print_document, with_options
from trainmedic_core.plain_text import visible
from trainmedic_logs.cli.log_rules import loaded, rules_option
from trainmedic_logs.diagnosis.advice import MEANS
from trainmedic_logs.diagnosis.verdict import Advice
from trainmedic_logs.files import reading_limits
from trainmedic_logs.files.reading_limits import ReadingLimits
from trainmedic_logs.folder_diagnosis import AttemptVerdict, FolderDiagnosis, diagnose_folder

_MOST_SHOWN = 6

_OPTIONS = (
    click.argument("job", metavar="[JOB]", required=False),
    click.option(
        "--dir",
        "directory",
        metavar="DIR",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="Directory of logs, kernel logs and flight recorder dumps from all nodes of the job, in any layout.",
    ),
    click.option("--attempt", type=click.IntRange(1), help="Number of the attempt. Default: the newest."),
    rules_option,
    click.option(
        "--limit-seconds",
        type=click.IntRange(1, 7 * 86400),
        default=int(reading_limits.DEFAULT_SECONDS),
        show_default=True,
        help="With --dir: time limit for reading, in seconds. The verdict uses what was read until then.",
    ),
    click.option(
        "--limit-memory",
        type=click.IntRange(reading_limits.LEAST_MEMORY // 2**20),
        default=reading_limits.DEFAULT_MEMORY // 2**20,
        show_default=True,
        metavar="MIB",
        help="With --dir: memory limit for reading, in MiB. The dump parser gets the same amount.",
    ),
    output_option(),
)


# Shared with the server's command of the same name.
folder_options = with_options(_OPTIONS)


@click.command()
@folder_options
def diagnose(
    job: str | None,
    directory: Path | None,
    attempt: int | None,
    paths: Sequence[Path],
    output: str,
    limit_seconds: int,
    limit_memory: int,
) -> None:
    """Show the origin and cause of a job's failure.

    Reads a folder of logs and dumps (--dir). JOB is required if it holds logs of several jobs. The verdict has a
    confidence, evidence, contradictions, and missing data. A node is named only with high confidence, and only by data
    that no job can have printed.

    \b
    trainmedic diagnose --dir /data/failed/llm-1
    """
    if directory is None:
        raise exits.InvalidInput("pass a folder with --dir; showing a server's verdict requires trainmedic-server")
    show_folder(directory, job, attempt, paths, output, limit_seconds, limit_memory)


def show_folder(
    directory: Path,
    job: str | None,
    attempt: int | None,
    paths: Sequence[Path],
    output: str,
    limit_seconds: int,
    limit_memory: int,  # MiB
) -> None:
    # The command reports loading errors itself.
    logging.getLogger().setLevel(logging.CRITICAL)
    rules = loaded(paths)
    limits = ReadingLimits(limit_seconds, limit_memory * 2**20)  # They begin now: loading the rules is no reading.
    try:
        found = diagnose_folder(directory, rules, job, limits)
    except ConfigurationError as error:
        raise exits.InvalidInput(str(error)) from error
    chosen = next((each for each in reversed(found.attempts) if attempt in (None, each.attempt)), None)
    if chosen is None:
        raise exits.UnknownName(f"there are no logs of attempt {attempt}")
    verdict = {"job": chosen.job, "attempt": chosen.attempt, **chosen.verdict.plain()}
    read = {"files_read": found.files_read, "read_in_part": found.read_in_part, "left_out": found.left_out}
    read |= {"limit_reached": found.limit_reached}
    print_document(verdict | read, output, lambda _: map(visible, _text(chosen, found, limits)))


def _text(chosen: AttemptVerdict, found: FolderDiagnosis, limits: ReadingLimits) -> Iterator[str]:
    heading = [chosen.job or "", f"attempt {chosen.attempt}" if chosen.attempt is not None else ""]
    if any(heading):
        yield ", ".join(part for part in heading if part)
    yield from shown(chosen.verdict.plain())
    for name, unread in list(found.read_in_part.items())[:_MOST_SHOWN]:
        yield f"{name} is long: its first {unread / 2**20:,.0f} MiB were not read"
    if found.limit_reached is not None:
        option = f"--limit-{found.limit_reached}"
        yield f"{limits.text_of(found.limit_reached)}: the verdict uses what was read before; {option} sets the limit"
    left_out = len(found.left_out)
    yield f"{_counted(found.files_read, 'file')} read" + (f", {_counted(left_out)} not:" if left_out else "")
    for name, why in list(found.left_out.items())[:_MOST_SHOWN]:
        yield f"  {name}: {why}"


def _counted(count: int, noun: str = "") -> str:
    counted = f"{count} {noun}" if noun else str(count)
    return f"{counted} was" if count == 1 else f"{counted}{'s' if noun else ''} were"


def shown(verdict: Mapping[str, Any]) -> Iterator[str]:
    yield str(verdict["summary"])
    yield f"  cause       {verdict['cause']}, confidence {verdict['confidence']}"
    if verdict["ranks"]:
        yield f"  ranks       {', '.join(str(rank) for rank in verdict['ranks'])}"
    if verdict["node"]:
        yield f"  node        {verdict['node']}"
    if verdict["gpu"]:
        yield f"  GPU         {verdict['gpu']}"
    if verdict["advice"] != Advice.NONE:
        yield f"  do next     {verdict['advice']}: {MEANS.get(verdict['advice'], '')}".rstrip(": ")
    if verdict["same_before"]:
        yield f"  before      {_counted(verdict['same_before'], 'earlier failure')} the same"
    for heading, member in (("because", "evidence"), ("against", "against")):
        for each in verdict[member][:_MOST_SHOWN]:
            yield from _evidence(heading, each)
    for missing in verdict["missing"]:
        yield f"  missing     {missing}"


def _evidence(heading: str, evidence: Mapping[str, Any]) -> Iterator[str]:
    at = str(evidence["at"] or "")[:19].replace("T", " ")
    rank = f"rank {evidence['rank']}" if evidence["rank"] is not None else ""
    where = " ".join(part for part in (at, evidence["node"], rank, evidence["source"]) if part)
    yield f"  {heading:<11} {evidence['why']}" + (f" [{where}]" if where else "")
    if evidence["line"]:
        yield f"              {evidence['line'].partition(chr(10))[0][:160]}"
