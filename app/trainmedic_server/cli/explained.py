"""Text of ``POST /explain`` documents. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainmedic_core import words
from trainmedic_core.plain_text import json_text
from trainmedic_core.words import plain

Document = Mapping[str, Any]


def lines(explained: Document) -> Iterator[str]:
    if (server := explained.get("server")) is not None:
        yield f"server: mode {plain(server.get('mode'))}{_switches(server)}"
    for number, alert in enumerate(explained.get("items", ())):
        if number:
            yield ""
        yield from alert_lines(alert)


def alert_lines(alert: Document) -> Iterator[str]:
    labels = {name: value for name, value in alert.get("labels", {}).items() if name != "alertname"}
    name = plain(alert.get("alert_name") or "(without a name)")
    yield f"alert {name}, {plain(alert.get('status'))}: {words.data(labels)}"
    yield from original_lines(alert, "  ")
    if alert.get("kept_back"):
        yield f"  Alertmanager does not send it: {plain(alert['kept_back'])}. If it did:"
    if alert.get("told"):
        yield f"  resolved: notifies {', '.join(map(plain, alert['told']))}"
    playbooks = alert.get("playbooks", ())
    if not playbooks:
        yield f"  {plain(alert.get('reason'))}"
        yield from suggestion_lines(alert, "  ")
    if len(alert.get("acting", ())) > 1:
        yield f"  {' and '.join(map(plain, alert['acting']))} would each act on it, one after the other"
    for playbook in sorted(playbooks, key=lambda playbook: not playbook.get("matched")):
        yield from _playbook(playbook)


def original_lines(alert: Document, indent: str) -> Iterator[str]:
    if (sent := alert.get("original_labels")) is not None:
        labels = {name: value for name, value in sent.items() if name != "alertname"}
        name = plain(alert.get("original_alert_name") or sent.get("alertname") or "(without a name)")
        yield f"{indent}mapped from {name}: {words.data(labels)}".rstrip()


def suggestion_lines(alert: Document, indent: str) -> Iterator[str]:
    suggested = alert.get("suggestion")
    if not suggested:
        return
    yield f"{indent}this entry of the alert map would rename it:"
    for line in suggested.get("rename", "").splitlines():
        yield f"{indent}    {plain(line)}"
    for each in suggested.get("playbooks", ()):
        summary = f": {plain(each['summary'])}" if each.get("summary") else ""
        yield f"{indent}then {plain(each.get('playbook'))} reacts, if its conditions hold{summary}"


def _switches(server: Document) -> str:
    paused = f", paused by {plain(server.get('paused_by'))}" if server.get("paused") else ""
    return paused + (f", breaker open: {plain(server.get('breaker_reason'))}" if server.get("breaker_open") else "")


def _playbook(playbook: Document) -> Iterator[str]:
    if not playbook.get("matched"):
        yield f"  {plain(playbook.get('playbook'))}: does not react: {plain(playbook.get('why'))}"
        return
    yield f"  {plain(playbook.get('playbook'))}: reacts ({plain(playbook.get('source'))})"
    yield f"    target:   {plain(playbook.get('target') or 'none')}"
    yield from (f"              {plain(reason)}" for reason in playbook.get("target_from") or ())
    yield f"    mode:     {plain(playbook.get('mode'))}"
    why = f" ({plain(playbook['why'])})" if playbook.get("why") else ""
    yield f"    decision: {plain(playbook.get('decision') or 'none')}{why}"
    if playbook.get("waits_for"):
        yield f"    waits:    for run {plain(playbook['waits_for'])}, whose lock excludes it"
    for guard in playbook.get("guards", ()):
        yield f"    guard:    {plain(guard)}"
    for number, step in enumerate(playbook.get("steps", ()), start=1):
        yield from _step(number, step)


def _step(number: int, step: Document) -> Iterator[str]:
    phases = {"check": "after each batch, ", "on_success": "if the run succeeds, ", "on_failure": "if the run fails, "}
    phase = phases.get(str(step.get("phase")), "")
    why = f" ({plain(step['why'])})" if step.get("why") else ""
    what = f"{plain(step.get('id'))}: {plain(step.get('what'))}"
    yield f"    {number:>2}. {phase}{what} — {plain(step.get('verdict'))}{why}"
    if step.get("params") is not None:
        yield f"        with: {plain(json_text(step['params'], sort_keys=True))}"
    if step.get("undo") is not None:
        yield f"        undo: {plain(step['undo'])}"
