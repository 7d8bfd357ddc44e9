"""``trainmedic status``, ``pause`` and ``resume``: the server as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import click

from trainmedic_server.cli import exits, story, table
from trainmedic_server.cli.client import Client, server_options

_OPEN = ("running", "waiting", "awaiting_approval")
_COUNTED_UP_TO = 1000


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
    found = {
        "server": client.url,
        "version": client.get("health").get("version"),
        "ready": ready,
        "open_runs": _open_runs(client),
        "playbooks": _or_reason(client, "playbooks"),
        "agents": _or_reason(client, "agents"),
        "jobs": _or_reason(client, "jobs"),
    }
    if output == "json":
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        for line in _tell(found):
            click.echo(line)
    if not ready["ready"]:
        raise exits.Unreachable("The server is not ready.")


@click.command()
@server_options
def pause(client: Client) -> None:
    """Stop new repairs until 'trainmedic resume'. Webhooks are recorded, and undo still runs."""
    _show_controls(client.post("pause"))


@click.command()
@click.option("--breaker", is_flag=True, help="Close the breaker too.")
@server_options
def resume(client: Client, breaker: bool) -> None:
    """Allow new repairs again. What came in between is not made up for."""
    _show_controls(client.post("resume", {"breaker": breaker}))


def _show_controls(controls: Mapping[str, Any]) -> None:
    click.echo(_controls(controls))


def _controls(controls: Mapping[str, Any]) -> str:
    """The switches in one line."""
    paused = "paused" if controls.get("paused") else "not paused"
    if controls.get("paused_by"):
        paused += f" by {table.plain(controls['paused_by'])} since {story.moment(controls.get('paused_at'))}"
    if not controls.get("breaker_open"):
        return f"{paused}, breaker closed"
    reason = f" ({table.plain(controls['breaker_reason'])})" if controls.get("breaker_reason") else ""
    return f"{paused}, breaker OPEN{reason}: close it with 'trainmedic resume --breaker'"


def _open_runs(client: Client) -> dict[str, int] | str:
    """How many runs are in each open status; each count ends at a page's length."""
    try:
        return {name: len(client.get("history", {"status": name, "limit": _COUNTED_UP_TO})["items"]) for name in _OPEN}
    except (exits.Unreachable, exits.NotAllowed) as error:
        return error.message.splitlines()[0]


def _or_reason(client: Client, path: str) -> Any:
    """What the server lists there, or why it cannot: one part that is away does not hide the others."""
    try:
        return client.get(path)
    except (exits.Unreachable, exits.NotAllowed) as error:
        return error.message.splitlines()[0]


def _tell(found: Mapping[str, Any]) -> Iterable[str]:
    ready = found["ready"]
    yield f"{'server':<11}{found['server']}, version {table.plain(found['version'])}"
    yield f"{'ready':<11}{'yes' if ready['ready'] else 'NO'}"
    for part in ("store", "redis", "playbooks"):
        state = ready.get(part, {})
        yield f"  {part:<11}{'ok' if state.get('ok') else 'NOT OK'}: {table.plain(state.get('detail'))}"
    if ready.get("mode"):
        yield f"{'mode':<11}{table.plain(ready['mode'])}"
    yield f"{'switches':<11}{_controls(ready)}"
    yield f"{'runs':<11}{_counts(found['open_runs'])}"
    yield f"{'playbooks':<11}{_playbooks(found['playbooks'])}"
    for part in ("agents", "jobs"):
        yield f"{part:<11}{_present(found[part])}"


def _counts(counts: dict[str, int] | str) -> str:
    if isinstance(counts, str):
        return f"unknown: {table.plain(counts)}"
    return ", ".join(
        f"{count}{'+' if count == _COUNTED_UP_TO else ''} {name.replace('_', ' ')}" for name, count in counts.items()
    )


def _playbooks(listed: Any) -> str:
    if isinstance(listed, str):
        return f"unknown: {table.plain(listed)}"
    names = ", ".join(table.plain(item.get("name")) for item in listed.get("items", ())) or "none"
    wrong = len(listed.get("errors", ()))
    return names + (f"; {wrong} errors, which 'trainmedic playbook check' shows" if wrong else "")


def _present(listed: Any) -> str:
    if isinstance(listed, str):
        return f"unknown: {table.plain(listed)}"
    shown = [f"{table.plain(one.get('name'))} (seen {story.moment(one.get('last_seen'))})" for one in listed["items"]]
    return ", ".join(shown) or "none connected"
