"""Outcomes of a rule file's alerts as text. Pure. Caller: ``playbook``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainmedic_core.words import plain
from trainmedic_server.domain.alert_suggestions import snippet
from trainmedic_server.simulation.rule_outcomes import RuleOutcome


def lines(outcomes: Sequence[RuleOutcome]) -> Iterator[str]:
    """Return one line for each alert, the suggested entries for an alert map, and the totals."""
    width = max(len(plain(outcome.alert.name)) for outcome in outcomes)
    for outcome in outcomes:
        yield f"{plain(outcome.alert.name):<{width}}  {_told(outcome)}"
    suggested = {outcome.alert.name: outcome.suggestion for outcome in outcomes if outcome.suggestion is not None}
    if suggested:
        yield ""
        yield "An alert map could have these entries; playbook explain says what would be done then:"
        yield "rename:"
        for name, suggestion in suggested.items():
            yield from (plain(line) for line in snippet(name, suggestion).splitlines()[1:])
    starting = sum(bool(outcome.playbooks) for outcome in outcomes)
    yield ""
    yield f"{len(outcomes)} alerts: {starting} with a playbook, {len(outcomes) - starting} without."


def _told(outcome: RuleOutcome) -> str:
    renamed = f"as {plain(outcome.renamed_to)}: " if outcome.renamed_to is not None else ""
    expected = "" if outcome.is_as_expected else f"  NOT AS EXPECTED: {outcome.alert.expected or 'none'}"
    if outcome.playbooks:
        conditions = f", if {' and '.join(map(plain, outcome.conditions))}" if outcome.conditions else ""
        return f"{renamed}{', '.join(outcome.playbooks)}{conditions}{expected}"
    suggested = f"; it means {outcome.suggestion.name}, see below" if outcome.suggestion is not None else ""
    return f"{renamed}none: {plain(outcome.reason)}{suggested}{expected}"
