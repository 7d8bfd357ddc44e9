"""Compiled entries of an alert map for events: JSON bodies to labels or alerts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from trainmedic_core.errors import ExpressionError
from trainmedic_core.expressions.evaluation import Expression, TextTemplate
from trainmedic_server.errors import PayloadError
from trainmedic_server.ports.alert_map import MappedEvent

Value = Expression | TextTemplate | str


class EventEntry(Struct, frozen=True):
    source: str
    line: int
    column: int
    event: str
    when: Expression | None = None
    labels: tuple[tuple[str, Value], ...] = ()
    key: Value | None = None  # events with the same key start one run; None: equal bodies do, within an hour
    alerts: Value | None = None  # template for a list of alerts; None if the event itself starts playbooks

    def takes(self, scope: Mapping[str, Any]) -> bool:
        """Raises PayloadError."""
        try:
            return self.when is None or self.when.holds(scope)
        except ExpressionError as error:
            raise PayloadError.at([("when", str(error))]) from error

    def mapped(self, scope: Mapping[str, Any]) -> MappedEvent:
        """Raises PayloadError with all fields that have no value."""
        problems: list[tuple[str, str]] = []
        if self.alerts is not None:
            alerts = _value("alerts", self.alerts, scope, problems)
            if not problems and not isinstance(alerts, list):
                problems.append(("alerts", "is no list of alerts"))
            made = MappedEvent(alerts=alerts)
        else:
            labels = {name: _text(f"labels.{name}", value, scope, problems) for name, value in self.labels}
            key = None if self.key is None else _text("key", self.key, scope, problems)
            if self.key is not None and not key and not problems:
                problems.append(("key", "is empty"))
            made = MappedEvent({name: text for name, text in labels.items() if text}, key)
        if problems:
            raise PayloadError.at(problems)
        return made


def map_event(entries: Sequence[EventEntry], body: Any) -> MappedEvent | None:
    """Return the first entry's result, None if none takes the event. Raises PayloadError."""
    scope = {"body": body}
    return next((entry.mapped(scope) for entry in entries if entry.takes(scope)), None)


def _value(field: str, value: Value, scope: Mapping[str, Any], problems: list[tuple[str, str]]) -> Any:
    if isinstance(value, str):
        return value
    try:
        return value.evaluate(scope)
    except ExpressionError as error:
        problems.append((field, str(error)))
        return None


def _text(field: str, value: Value, scope: Mapping[str, Any], problems: list[tuple[str, str]]) -> str:
    made = _value(field, value, scope, problems)
    if isinstance(made, bool):
        return str(made).lower()
    if isinstance(made, (list, dict)):
        problems.append((field, f"is {'a list' if isinstance(made, list) else 'an object'}; must be text or a number"))
        return ""
    return "" if made is None else str(made)
