"""Writer of a playbook test file from explained alerts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from trainmedic_server.domain.alert import AlertStatus
from trainmedic_server.engine.explanation import ExplainedAlert, Explanation


def write(explained: Sequence[ExplainedAlert]) -> str:
    """Return one test for each alert. `explained` must be of `explanation.explain_for_a_test`."""
    sources = {PurePath(each.source).name for alert in explained for each in _naming(alert)}
    lines = [
        "# Decisions of the playbooks on these alerts. Put this file next to them, under a name that ends in "
        "_test.yaml.",
        "# Tests can also expect what the runs do: runs, calls.",
    ]
    if sources:
        lines.append(f"playbooks: [{', '.join(map(_quoted, sorted(sources)))}]")
    else:
        lines.append("# No playbook names these alerts: name the file of the playbook to test.")
        lines.append("playbooks: []")
    lines.append("tests:")
    for number, alert in enumerate(explained, start=1):
        lines += _test(alert, number)
    return "\n".join(lines) + "\n"


def _naming(explained: ExplainedAlert) -> list[Explanation]:  # of playbooks that name the alertname
    return [each for each in explained.playbooks if each.names_alert]


def _test(explained: ExplainedAlert, number: int) -> Iterator[str]:
    alert = explained.alert
    reacting = [each for each in explained.playbooks if each.decision is not None]
    names = " and ".join(each.playbook for each in reacting) or "no playbook"
    yield f"  - name: {_quoted(f'{alert.name or number}: {names}')}"
    yield "    alerts:"
    yield "      - alert:"
    yield f"          labels: {_mapping(alert.labels)}"
    if alert.annotations:
        yield f"          annotations: {_mapping(alert.annotations)}"
    if alert.status is AlertStatus.RESOLVED:
        yield "        status: resolved"
    yield "    expect:"
    if not reacting:
        yield "      decisions: []"
        return
    yield "      decisions:"
    for each in reacting:
        target = f", target: {_quoted(each.target)}" if each.target else ""
        yield f"        - {{playbook: {_quoted(each.playbook)}{target}, decision: {each.decision}}}"


def _mapping(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{_quoted(name)}: {_quoted(value)}" for name, value in sorted(values.items())) + "}"


def _quoted(text: str) -> str:
    # JSON's escapes are YAML's too.
    written = json.dumps(text, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in written)
