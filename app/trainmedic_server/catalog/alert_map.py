"""Compiled alert map: accepted alerts, renames, and labels of events. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_core.errors import ExpressionError
from trainmedic_core.expressions.evaluation import Expression, TextTemplate, as_text
from trainmedic_core.expressions.regexes import ValueTooLong
from trainmedic_core.problems import shown
from trainmedic_server import telemetry
from trainmedic_server.catalog.matchers import Matcher
from trainmedic_server.domain.alert import SHIPPED_RULE_LABEL, Alert
from trainmedic_server.domain.own_source import is_own
from trainmedic_server.errors import PayloadError
from trainmedic_server.ports.alert_map import MappedAlert, MappedEvent

log = telemetry.logger(__name__)

LabelValue = Expression | TextTemplate | str  # A template over ``labels`` or an event's ``body``, or a constant


class Rename(Struct, frozen=True):
    """Entry that renames alerts and sets or drops their labels."""

    source: str
    line: int
    column: int
    alertnames: tuple[str, ...]
    name: str | None = None  # new alertname; None to keep it
    matchers: tuple[Matcher, ...] = ()
    labels: tuple[tuple[str, LabelValue], ...] = ()
    drop: frozenset[str] = frozenset()

    @property
    def constants(self) -> Mapping[str, str]:
        return {label: value for label, value in self.labels if isinstance(value, str)}

    def takes(self, labels: Mapping[str, str]) -> bool:
        try:
            return all(matcher.matches(labels) for matcher in self.matchers)
        except ValueTooLong:  # an unchecked matcher does not hold
            return False

    def renamed(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Return the new labels. Only absent, empty and dropped ones are set. Templates see all of the alert's."""
        made = {label: value for label, value in labels.items() if label not in self.drop}
        scope = {"labels": dict(labels)}
        for label, value in self.labels:
            if not made.get(label) and (text := _text(value, scope)):
                made[label] = text
        if self.name is not None and self.name != labels.get("alertname"):
            made["alertname"] = self.name
            # The label proves a shipped rule for that rule's own alert only, so a renamed alert loses it.
            made.pop(SHIPPED_RULE_LABEL, None)
        return made


class Accept(Struct, frozen=True):  # condition that all alerts must meet
    source: str
    matcher: Matcher

    def refusal(self, labels: Mapping[str, str]) -> str:  # empty if it is met
        try:
            if self.matcher.matches(labels):
                return ""
        except ValueTooLong as error:
            return f"{error} ({self.source})"
        return f"{self.matcher.refusal(labels)} ({self.source})"


class EventEntry(Struct, frozen=True):
    source: str
    line: int
    column: int
    event: str
    when: Expression | None = None
    labels: tuple[tuple[str, LabelValue], ...] = ()
    key: LabelValue | None = None  # events with the same key start one run; None: equal bodies do, within an hour
    alerts: LabelValue | None = None  # template for a list of alerts; None if the event itself starts playbooks

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
            alerts = _field_value("alerts", self.alerts, scope, problems)
            if not problems and not isinstance(alerts, list):
                problems.append(("alerts", "is no list of alerts"))
            made = MappedEvent(alerts=alerts)
        else:
            labels = {name: _field_text(f"labels.{name}", value, scope, problems) for name, value in self.labels}
            key = None if self.key is None else _field_text("key", self.key, scope, problems)
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


class CompiledFile(Struct, frozen=True):
    accept: tuple[Accept, ...] = ()
    renames: tuple[Rename, ...] = ()
    events: tuple[EventEntry, ...] = ()


class CompiledAlertMap(Struct, frozen=True):
    accept: tuple[Accept, ...] = ()
    renames: Mapping[str, Sequence[Rename]] = field(default_factory=dict)
    events: Mapping[str, Sequence[EventEntry]] = field(default_factory=dict)
    unusable: str = ""
    """Why no alert is accepted: a file that was never loaded may have conditions. Empty if all are loaded."""

    @classmethod
    def of(cls, files: Sequence[CompiledFile], unusable: str = "") -> CompiledAlertMap:
        by_name: dict[str, list[Rename]] = {}
        by_event: dict[str, list[EventEntry]] = {}
        for file in files:
            for rename in file.renames:
                for name in rename.alertnames:
                    by_name.setdefault(name, []).append(rename)
            for entry in file.events:
                by_event.setdefault(entry.event, []).append(entry)
        return cls(tuple(each for file in files for each in file.accept), by_name, by_event, unusable)

    @property
    def names(self) -> int:
        return len(self.renames)

    def apply(self, alert: Alert) -> MappedAlert:
        """Map the labels as sent, also of an alert that was mapped before.

        Stand-ins and Trainmedic's own alerts stay: they may lack Prometheus's labels, which ``accept`` can require.
        """
        is_empty = not (self.renames or self.accept or self.unusable)
        if is_empty and alert.original is None:
            return MappedAlert(alert)
        sent = alert.sent_labels
        if is_own(sent) or alert.is_stand_in:
            return MappedAlert(alert)
        rename = self.rename_of(sent)
        made = rename.renamed(sent) if rename is not None else sent
        if made == sent:
            mapped = alert if alert.original is None else replace(alert, labels=sent, original=None)
        else:
            mapped = replace(alert, labels=made, original=sent)
        return MappedAlert(mapped, self._refusal(sent))

    def map_event(self, name: str, body: Any) -> MappedEvent | None:
        return map_event(self.events.get(name, ()), body)

    def rename_of(self, labels: Mapping[str, str]) -> Rename | None:
        return next((each for each in self.renames.get(labels.get("alertname", ""), ()) if each.takes(labels)), None)

    def _refusal(self, labels: Mapping[str, str]) -> str:
        return self.unusable or next((why for each in self.accept if (why := each.refusal(labels))), "")


def _text(value: LabelValue, scope: Mapping[str, Any]) -> str:
    if isinstance(value, str):
        return value
    try:
        made = value.evaluate(scope)
    except ExpressionError as error:
        log.debug("alert map template has no value", why=shown(str(error), 200))
        return ""
    return as_text(made)


def _field_value(field: str, value: LabelValue, scope: Mapping[str, Any], problems: list[tuple[str, str]]) -> Any:
    if isinstance(value, str):
        return value
    try:
        return value.evaluate(scope)
    except ExpressionError as error:
        problems.append((field, str(error)))
        return None


def _field_text(field: str, value: LabelValue, scope: Mapping[str, Any], problems: list[tuple[str, str]]) -> str:
    made = _field_value(field, value, scope, problems)
    if isinstance(made, (list, dict)):
        problems.append((field, f"is {'a list' if isinstance(made, list) else 'an object'}; must be text or a number"))
        return ""
    return as_text(made)
