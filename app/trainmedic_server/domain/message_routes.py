"""Routing of messages to channels by component, severity and kind.

A channel takes messages that match one of its routes, or all if it has none and is no default. Unmatched messages go to
the default channels, otherwise to all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_core.problems import did_you_mean
from trainmedic_server.domain.component import Component
from trainmedic_server.domain.message import MessageKind, Severity

VARIABLE = "TRAINMEDIC_MESSAGE_ROUTES"
NOTIFY = "notify"  # kind of messages of playbooks
KINDS: tuple[str, ...] = (*MessageKind, NOTIFY)
_ALL, _DEFAULT = "all", "default"
_EXAMPLE = "gpu=component:gpu,node;severity:warning,critical"
_Choice = TypeVar("_Choice")


class RouteField(StrEnum):
    COMPONENT = "component"
    SEVERITY = "severity"
    KIND = "kind"


class MessageRoute(Struct, frozen=True):
    """Conditions that must all hold; empty ones always do."""

    components: frozenset[Component] = frozenset()
    severities: frozenset[Severity] = frozenset()
    kinds: frozenset[str] = frozenset()

    def takes(self, component: Component, severity: Severity, kind: str) -> bool:
        return (
            (not self.components or component in self.components)
            and (not self.severities or severity in self.severities)
            and (not self.kinds or kind in self.kinds)
        )

    def __str__(self) -> str:
        fields: tuple[tuple[RouteField, Collection[str], Iterable[str]], ...] = (
            (RouteField.COMPONENT, self.components, Component),
            (RouteField.SEVERITY, self.severities, Severity),
            (RouteField.KIND, self.kinds, KINDS),
        )
        conditions = [
            f"{name}:{','.join(each for each in order if each in chosen)}" for name, chosen, order in fields if chosen
        ]
        return ";".join(conditions) or _ALL


class ChosenChannels(Struct, frozen=True):
    names: tuple[str, ...]
    is_taken: bool = True  # False if no route takes the message


class MessageRoutes(Struct, frozen=True):
    channels: tuple[str, ...] = ()
    routes: Mapping[str, tuple[MessageRoute, ...]] = field(default_factory=dict)
    """By channel, without those that have none."""
    defaults: tuple[str, ...] = ()

    @property
    def are_set(self) -> bool:
        return bool(self.routes or self.defaults)

    def choose(self, component: Component, severity: Severity, kind: str) -> ChosenChannels:
        names = tuple(name for name in self.channels if self._takes(name, component, severity, kind))
        if names or not self.channels:
            return ChosenChannels(names)
        return ChosenChannels(self.defaults or self.channels, is_taken=False)

    def may_get(self, name: str, kind: str) -> bool:  # with any component and severity
        return any(name in self.choose(each, severity, kind).names for each in Component for severity in Severity)

    def described(self, name: str) -> list[str]:
        """Return routes as written; empty if none are set at all."""
        if not self.are_set:
            return []
        written = [str(route) for route in self.routes.get(name, ())]
        written += [_DEFAULT] if name in self.defaults else []
        return written or [_ALL]

    @property
    def caveat(self) -> str:
        """Warning if a message may need a missing default channel."""
        if not self.are_set or self.defaults or any(_takes_all(self, name) for name in self.channels):
            return ""
        return (
            "no default channel is set, so a message that no route takes goes to all channels; "
            f"add CHANNEL={_DEFAULT} to {VARIABLE}"
        )

    def _takes(self, name: str, component: Component, severity: Severity, kind: str) -> bool:
        if name not in self.routes:
            return name not in self.defaults  # a channel that is only a default takes what no other does
        return any(route.takes(component, severity, kind) for route in self.routes[name])


def _takes_all(routes: MessageRoutes, name: str) -> bool:
    return name not in routes.routes or MessageRoute() in routes.routes[name]


def parse_routes(text: str) -> MessageRoutes:
    """Parse routes such as ``gpu=component:gpu,node;severity:critical chat=default``.

    White space separates pairs, of which a channel may have several; semicolons separate conditions that must all hold.
    Raises ValueError.
    """
    routes: dict[str, list[MessageRoute]] = {}
    defaults: set[str] = set()
    for number, pair in enumerate(text.split(), 1):
        if "://" in pair:  # it may contain a secret, so do not repeat it
            raise ValueError(f"pair {number} has a URL; name a channel. URLs belong in TRAINMEDIC_NOTIFY_URLS")
        name, equals, conditions = pair.partition("=")
        if not equals or not name or not conditions:
            raise ValueError(f"pair {number}, {pair!r}, is not channel=conditions, such as {_EXAMPLE}")
        if conditions == _DEFAULT:
            defaults.add(name)
        else:
            routes.setdefault(name, []).append(_route(conditions, f"pair {number}, channel {name!r}"))
    every = {name: tuple(dict.fromkeys(each)) for name, each in routes.items()}
    return MessageRoutes(tuple(sorted({*every, *defaults})), every, tuple(sorted(defaults)))


def routes_of(text: str, channels: Collection[str]) -> MessageRoutes:
    """Parse routes. Raises ValueError if a channel is not in `channels`."""
    parsed = parse_routes(text)
    unknown = sorted(set(parsed.channels) - set(channels))
    if unknown:
        there = ", ".join(sorted(channels)) or "none"
        raise ValueError(
            f"channel {unknown[0]!r} is not set; add it to TRAINMEDIC_NOTIFY_URLS or use one that is set: {there}"
        )
    return replace(parsed, channels=tuple(sorted(channels)))


def _route(conditions: str, where: str) -> MessageRoute:
    if conditions == _ALL:
        return MessageRoute()
    values_by_field: dict[RouteField, str] = {}
    for condition in conditions.split(";"):
        name, _, values = condition.partition(":")
        if name not in list(RouteField):
            hint = did_you_mean(name, RouteField) or f"; use {', '.join(RouteField)}, or {_ALL} or {_DEFAULT} alone"
            raise ValueError(f"{where}: {name!r} is no field of a message{hint}")
        if name in values_by_field:
            raise ValueError(f"{where}, field {name}: is given twice; join the values by commas")
        values_by_field[RouteField(name)] = values
    return MessageRoute(
        _values(values_by_field.get(RouteField.COMPONENT), Component, Component, f"{where}, field component"),
        _values(values_by_field.get(RouteField.SEVERITY), Severity, Severity, f"{where}, field severity"),
        _values(values_by_field.get(RouteField.KIND), KINDS, str, f"{where}, field kind"),
    )


def _values(text: str | None, choices: Iterable[str], make: Callable[[str], _Choice], where: str) -> frozenset[_Choice]:
    if text is None:
        return frozenset()
    known: Sequence[str] = list(choices)
    for value in text.split(","):
        if value not in known:
            hint = did_you_mean(value, known) if value else ""
            raise ValueError(f"{where}: {value!r} is none of {', '.join(known)}{hint}")
    return frozenset(map(make, text.split(",")))
