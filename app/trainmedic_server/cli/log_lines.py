"""Options and output of ``trainmedic logs``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import click

from trainmedic_core.cli import exits
from trainmedic_core.cli.choice import NearestChoice
from trainmedic_core.cli.output import with_options
from trainmedic_core.plain_text import json_text, visible
from trainmedic_logs.domain.log_search import LogLevel
from trainmedic_server.cli.client import Client, unknown_job_note
from trainmedic_server.cli.params import TimeParam


def _rank_option(*names: str, of: str) -> Callable[[Any], Any]:
    return click.option(*names, type=click.IntRange(min=0), metavar="N", help=f"Only lines of this {of}.")


_OPTIONS = (
    click.option("--job", "--job-id", "--job_id", "job", metavar="NAME", help="Show the lines of this job."),
    _rank_option("--rank", of="rank"),
    _rank_option("--node-rank", "--node_rank", "node_rank", of="node rank"),
    _rank_option("--local-rank", "--local_rank", "local_rank", of="local rank"),
    click.option("--node", metavar="NAME", help="Only lines of this node."),
    click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="Only lines of this attempt."),
    click.option(
        "--since",
        type=TimeParam(),
        metavar="TIME",
        help="Start: a time, or a duration before now (90m, 7d). Default: 10m.",
    ),
    click.option("--until", type=TimeParam(), metavar="TIME", help="End: a time, or a duration before now."),
    click.option("--grep", metavar="REGEX", help="Only lines that match this regular expression (RE2)."),
    click.option(
        "--level",
        type=NearestChoice([level.value for level in LogLevel]),
        metavar="LEVEL",
        help=f"Only lines of at least this level: {', '.join(LogLevel)}.",
    ),
    click.option("--kernel", is_flag=True, help="Also kernel lines of the job's nodes."),
    click.option(
        "--limit", type=click.IntRange(1, 100_000), default=10_000, show_default=True, help="Maximum number of lines."
    ),
    click.option("--follow", "-f", is_flag=True, help="Then show new lines until interrupted."),
    click.option("--output", type=NearestChoice(["text", "json", "raw"]), default="text", show_default=True),
)

_ASK_FOR_LESS = "Narrow the search with a later --since, or with --attempt, --node or --rank."


line_options = with_options(_OPTIONS)


def show_lines(client: Client, job: str, output: str, follow: bool, kernel: bool, **conditions: Any) -> None:
    params = {name: value for name, value in conditions.items() if value is not None}
    if kernel:
        params["kernel"] = "true"
    path = f"jobs/{quote(job)}/logs"
    answers = _followed(client, path, params) if follow else map(json.loads, client.lines(path, params))
    count = 0
    try:
        for answer in answers:
            if "note" in answer:
                click.echo(visible(str(answer["note"])), err=True)
                continue
            count += 1
            click.echo(_WRITERS[output](answer))
    except exits.UnknownName as error:
        doubt = unknown_job_note(client, job)
        raise exits.UnknownName(f"{doubt}\n{error.message}" if doubt else error.message) from error
    except exits.NoAnswerYet as error:
        raise exits.NoAnswerYet(f"{error.message} {_ASK_FOR_LESS}") from error
    if not count:
        usual = "no lines found; check --since, and whether the node's agent still has them"
        doubt = unknown_job_note(client, job)
        click.echo(f"{usual}; {doubt}" if doubt else usual, err=True)


def _followed(client: Client, path: str, params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for event in client.events(None, path, {**params, "follow": "true"}):
        if event.data:
            yield json.loads(event.data)
    if "until" in params:
        return  # the server ends the stream itself, some seconds after `until`
    raise exits.Unreachable("the server ended the stream")


def _text(line: Mapping[str, Any]) -> str:
    at = datetime.fromisoformat(str(line["at"])).astimezone(UTC)
    guessed_mark = "~" if line.get("clock") == "guessed" else " "
    who = str(line["node"]) + (f" rank {line['rank']}" if "rank" in line else f" {line['source']}")
    return visible(f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d}{guessed_mark}{who}  {line['line']}", keep="\t")


def _raw(line: Mapping[str, Any]) -> str:
    return visible(str(line["line"]), keep="\t")


_WRITERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"text": _text, "json": json_text, "raw": _raw}
