"""``trainmedic status``: the server as a whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from trainmedic_server.cli import exits, pauses, story, table
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.domain.plain_text import json_text
from trainmedic_server.domain.run import Status

_COUNTED_UP_TO = 1000  # runs in each status; one page of the history
_SHOWN = 10  # undos that could not be carried out


@click.command()
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@server_options
def status(client: Client, output: str) -> None:
    """Show whether the server is well, and what it is doing.

    Ends with 3 where the server answers that it is not ready.
    """
    ready = client.get("ready", {"any": "true"}, accept=(503,))
    if not isinstance(ready, dict) or "ready" not in ready:
        raise exits.Unreachable(f"{client.url} does not answer as Trainmedic does.")
    report = {
        "server": client.url,
        "version": client.get("health").get("version"),
        "ready": ready,
        "open_runs": _or_reason(lambda: _open_runs(client)),
        "undos": _or_reason(lambda: _owed_undos(client)),
        **{part: _or_reason(functools.partial(client.get, part)) for part in ("playbooks", "agents", "jobs")},
    }
    if output == "json":
        click.echo(json_text(report, indent=2))
    else:
        for line in _status_lines(report):
            click.echo(line)
    if not ready["ready"]:
        raise exits.Unreachable("The server is not ready.")


def _open_runs(client: Client) -> dict[str, int]:
    """How many runs are in each open status; each count ends at a page's length."""
    open_statuses = [status.value for status in Status if status.is_open]
    return {
        status: len(client.get("history", {"status": status, "limit": _COUNTED_UP_TO})["items"])
        for status in open_statuses
    }


def _owed_undos(client: Client) -> dict[str, Any]:
    """How many closed runs still owe an undo, and those of them whose undo was tried and did not succeed."""
    items = client.get("history", {"owes_undo": "true", "limit": _COUNTED_UP_TO})["items"]
    delayed = [{name: item.get(name) for name in ("run_id", "undo_error")} for item in items if item.get("undo_error")]
    return {"owed": len(items), "delayed": delayed}


def _or_reason(ask: Callable[[], Any]) -> Any:
    """Return the server's answer, or why there is none: one failing part does not hide the others."""
    try:
        return ask()
    except (exits.Unreachable, exits.NotAllowed) as error:
        return error.message.splitlines()[0]


def _status_lines(report: Mapping[str, Any]) -> Iterator[str]:
    ready = report["ready"]
    yield f"{'server':<11}{report['server']}, version {table.plain(report['version'])}"
    yield f"{'ready':<11}{'yes' if ready['ready'] else 'NO'}"
    for part in ("store", "redis", "playbooks"):
        state = ready.get(part, {})
        yield f"  {part:<11}{'ok' if state.get('ok') else 'NOT OK'}: {table.plain(state.get('detail'))}"
    if rules := ready.get("log_rules"):
        yield f"  {'log rules':<11}{'ok' if rules.get('ok') else 'NOT OK'}: {table.plain(rules.get('detail'))}"
    if not ready.get("clock", {}).get("ok", True):
        yield f"  {'clock':<11}NOT OK: {table.plain(ready['clock'].get('detail'))}"
    yield f"{'switches':<11}{pauses.controls(ready)}"
    described_by = {
        "open_runs": _counts,
        "undos": _undos,
        "playbooks": _playbooks,
        "agents": _connected,
        "jobs": _connected,
    }
    for part, describe in described_by.items():
        reply = report[part]
        text = f"unknown: {table.plain(reply)}" if isinstance(reply, str) else describe(reply)
        yield f"{part.removeprefix('open_'):<11}{text}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count}{'+' if count == _COUNTED_UP_TO else ''} {name.replace('_', ' ')}" for name, count in counts.items()
    )


def _undos(undos: Mapping[str, Any]) -> str:
    owed, delayed = undos["owed"], undos["delayed"]
    text = f"{owed}{'+' if owed == _COUNTED_UP_TO else ''} owed by closed runs"
    if not delayed:
        return text
    shown = "".join(
        f"\n{'':<13}{table.plain(undo['run_id'])}: {table.plain(undo['undo_error'])}" for undo in delayed[:_SHOWN]
    )
    more = f"\n{'':<13}and {len(delayed) - _SHOWN} more" if len(delayed) > _SHOWN else ""
    return f"{text}, {len(delayed)} of them NOT DONE when tried:{shown}{more}"


def _playbooks(reply: Mapping[str, Any]) -> str:
    names = ", ".join(table.plain(item.get("name")) for item in reply.get("items", ())) or "none"
    wrong = len(reply.get("errors", ()))
    return names + (f"; {wrong} errors, which 'trainmedic playbook check' shows" if wrong else "")


def _connected(reply: Mapping[str, Any]) -> str:
    shown = [f"{table.plain(item.get('name'))} (seen {story.moment(item.get('last_seen'))})" for item in reply["items"]]
    return ", ".join(shown) or "none connected"
