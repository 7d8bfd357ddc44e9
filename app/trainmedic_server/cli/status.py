"""``trainmedic status``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click

from trainmedic_core import words
from trainmedic_core.cli import exits
from trainmedic_core.cli.output import output_option, print_document
from trainmedic_server.cli.client import Client, every, server_options
from trainmedic_server.cli.now import switches_text
from trainmedic_server.domain.reaction import NoReaction
from trainmedic_server.presentation.waiting import waiting_for_person

_SHOWN = 10
_WITHIN = "1d"
_MOST_ALERTS = 100


@click.command()
@output_option()
@server_options
def status(client: Client, output: str) -> None:
    """Show whether the server is ready and may act, and what it is doing.

    Exit code 3 if the server is not ready.
    """
    ready = client.get("ready", {"any": "true"}, accept=(503,))  # the leader's state, also from a standby server
    if not isinstance(ready, dict) or "ready" not in ready:
        raise exits.Unreachable(f"{client.url} is not a Trainmedic server.")
    now = _or_reason(functools.partial(client.get, "now"))
    report = {
        "server": client.url,
        "version": client.get("health").get("version"),
        "ready": ready,
        "now": now,
        "open_runs": now if isinstance(now, str) else now["counts"]["open"],
        "waits_for_you": now if isinstance(now, str) else counts_of_waiting(now),
        "undos": now if isinstance(now, str) else _undos_of(now),
        "playbooks": _or_reason(functools.partial(client.get, "playbooks")),
        **{part: _or_reason(functools.partial(_all_pages, client, part)) for part in ("agents", "jobs")},
    }
    books = report["playbooks"]
    report["unproven"] = (
        [] if isinstance(books, str) else _or_reason(lambda: _refused_for_lack_of_proof(client, books.get("items", ())))
    )
    if output == "json":
        report = {name: part for name, part in report.items() if name != "now"} | _switch_members(now)
    print_document(report, output, _lines)
    if not ready["ready"]:
        raise exits.Unreachable("The server is not ready.")


def _all_pages(client: Client, path: str) -> dict[str, Any]:
    return {"items": list(every(client, path))}


def _switch_members(now: Any) -> dict[str, Any]:
    return {} if isinstance(now, str) else {name: now[name] for name in ("mode", "paused", "breaker", "lost")}


def counts_of_waiting(now: Mapping[str, Any]) -> dict[str, int]:
    waiting = waiting_for_person(now)
    return {"approvals": len(waiting.approvals), "failed": len(waiting.failed)}


def _undos_of(now: Mapping[str, Any]) -> dict[str, Any]:
    delayed = [
        {name: change[name] for name in ("run_id", "undo_error")} for change in now["changed"] if change["undo_error"]
    ]
    return {"owed": now["counts"]["owing"], "delayed": delayed}


def _or_reason(ask: Callable[[], Any]) -> Any:
    """Return an error as text, so that other parts are shown."""
    try:
        return ask()
    except (exits.Unreachable, exits.NotAllowed) as error:
        return error.message.splitlines()[0]


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    ready, now = report["ready"], report["now"]
    yield f"{'server':<11}{report['server']}, version {words.plain(report['version'])}"
    yield f"{'ready':<11}{'yes' if ready['ready'] else 'NO'}"
    for part in ("store", "redis", "playbooks", "log_rules", "alert_map", "slurm", "alertmanager", "prometheus"):
        if state := ready.get(part):
            name, result = part.replace("_", " "), "ok" if state.get("ok") else "NOT OK"
            yield f"  {name:<13}{result}: {words.plain(state.get('detail'))}"
    for part in ("clock", "tokens"):
        if not ready.get(part, {}).get("ok", True):
            yield f"  {part:<13}NOT OK: {words.plain(ready[part].get('detail'))}"
    if not ready.get("notifications", {}).get("ok", True):
        yield f"  {'messages':<13}NOT SENT: {words.plain(ready['notifications'].get('detail'))}"
    elif not isinstance(now, str) and now.get("notifications"):
        yield f"  {'messages':<13}{words.plain(now['notifications'])}"
    yield f"{'switches':<11}{f'unknown: {words.plain(now)}' if isinstance(now, str) else switches_text(now, now['at'])}"
    if not isinstance(now, str):
        waiting = waiting_for_person(now)
        more = ": 'trainmedic now'" if waiting else ""
        yield f"{'for you':<11}{waiting}{more}"
    described_by: Mapping[str, Callable[[Any], str]] = {
        "open_runs": _counts,
        "undos": _undos,
        "playbooks": _playbooks,
        "agents": functools.partial(_connected, "agents", "agent", now),
        "jobs": functools.partial(_connected, "jobs", "job", now),
    }
    for part, describe in described_by.items():
        reply = report[part]
        text = f"unknown: {words.plain(reply)}" if isinstance(reply, str) else describe(reply)
        yield f"{part.removeprefix('open_'):<11}{text}"
    if not isinstance(report["unproven"], str):
        yield from _proof_lines(report["unproven"])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())


def _undos(undos: Mapping[str, Any]) -> str:
    owed, delayed = undos["owed"], undos["delayed"]
    text = f"{owed} pending in closed runs"
    if not delayed:
        return text
    shown = "".join(
        f"\n{'':<13}{words.plain(undo['run_id'])}: {words.plain(undo['undo_error'])}" for undo in delayed[:_SHOWN]
    )
    more = f"\n{'':<13}and {len(delayed) - _SHOWN} more" if len(delayed) > _SHOWN else ""
    return f"{text}, FAILED when last tried: {len(delayed)}{shown}{more}"


def _playbooks(reply: Mapping[str, Any]) -> str:
    wrong = len(reply.get("errors", ()))
    count = f"{len(reply.get('items', ()))} loaded: 'trainmedic playbook list'"
    return count + (f"; {wrong} errors, which 'trainmedic playbook check' shows" if wrong else "")


def _connected(command: str, kind: str, now: Any, reply: Mapping[str, Any]) -> str:
    count = len(reply["items"])
    text = f"{count} connected: 'trainmedic {command}'" if count else "none connected"
    lost = [] if isinstance(now, str) else [each["name"] for each in now["lost"] if each["kind"] == kind]
    if not lost:
        return text
    more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    return f"{text}; LOST within a day: {', '.join(map(words.plain, lost[:_SHOWN]))}{more}"


def _refused_for_lack_of_proof(client: Client, playbooks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return an entry per alert name and playbook that refused it, by each name's newest alerts."""
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    asking = [playbook for playbook in playbooks if playbook.get("proof")]
    for name in sorted({name for playbook in asking for name in playbook["alerts"]}):
        for alert in client.get("alerts", {"alertname": name, "since": _WITHIN, "limit": _MOST_ALERTS})["items"]:
            for reaction in alert["reactions"]:
                if reaction["decision"] == NoReaction.NO_PROOF:
                    key = (reaction["playbook"], name)
                    entry = {"playbook": key[0], "alert": name, "alerts": 0, "reason": reaction["reason"]}
                    entries.setdefault(key, entry)["alerts"] += 1
    return [entries[key] for key in sorted(entries)]


def _proof_lines(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    listed = list(entries)
    for entry in listed[:_SHOWN]:
        text = f"{entry['playbook']} refused {entry['alerts']} of {entry['alert']} within a day: {entry['reason']}"
        yield f"{'NO PROOF':<11}{words.plain(text)}"
    if len(listed) > _SHOWN:
        yield f"{'':<11}and {len(listed) - _SHOWN} more: 'trainmedic alerts --since 1d'"
