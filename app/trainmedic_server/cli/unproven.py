"""Alerts of the last day that a playbook refused for lack of proof, for ``trainmedic status``.

After an upgrade these are alerts of rules that an earlier release shipped, without the label that playbooks require.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainmedic_server.cli.client import Client
from trainmedic_server.domain.reaction import NoReaction
from trainmedic_server.presentation import words

_WITHIN = "1d"
_MOST_ALERTS = 100
"""Most alerts that are read for one alertname, the newest ones. They come from one rule or a few."""
_SHOWN = 10


def refused(client: Client, playbooks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for each playbook and alertname: ``playbook``, ``alert``, ``alerts`` (how many of the newest
    hundred) and the ``reason`` of the newest."""
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


def lines(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the text lines for them. No lines if there are none."""
    listed = list(entries)
    for entry in listed[:_SHOWN]:
        text = f"{entry['playbook']} refused {entry['alerts']} of {entry['alert']} within a day: {entry['reason']}"
        yield f"{'NO PROOF':<11}{words.plain(text)}"
    if len(listed) > _SHOWN:
        yield f"{'':<11}and {len(listed) - _SHOWN} more: 'trainmedic alerts --since 1d'"
