"""Messages that the server sends by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core.problems import did_you_mean

NO_CHANNEL = "no notification channel is configured"


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


class MessageKind(StrEnum):
    APPROVAL = "approval"
    RUN_FAILED = "run_failed"
    NOT_STARTED = "not_started"
    TARGET_UNKNOWN = "target_unknown"
    UNDO_OVERDUE = "undo_overdue"  # A change could not be reverted for 2 min
    EFFECT_LOST = "effect_lost"  # What a run changed ended while it was needed
    BREAKER = "breaker"
    PAUSE = "pause"
    PLAYBOOK_BROKEN = "playbook_broken"
    TAKEOVER = "takeover"
    FOLLOW_UP = "follow_up"
    REPAIRED = "repaired"
    GIVEN_BACK = "given_back"


class MessageRule(Struct, frozen=True):
    """Severity of a kind of messages, and its channels; without them `message_routes` decide."""

    severity: Severity
    is_on: bool = True
    channels: tuple[str, ...] = ()


_INFO, _WARNING, _CRITICAL = (MessageRule(severity) for severity in Severity)
DEFAULT_RULES: Mapping[MessageKind, MessageRule] = {
    MessageKind.APPROVAL: _WARNING,
    MessageKind.RUN_FAILED: _WARNING,
    MessageKind.NOT_STARTED: _WARNING,
    MessageKind.TARGET_UNKNOWN: _WARNING,
    MessageKind.UNDO_OVERDUE: _CRITICAL,
    MessageKind.EFFECT_LOST: _WARNING,
    MessageKind.BREAKER: _CRITICAL,
    MessageKind.PAUSE: _INFO,
    MessageKind.PLAYBOOK_BROKEN: _WARNING,
    MessageKind.TAKEOVER: _WARNING,
    MessageKind.FOLLOW_UP: _INFO,
    MessageKind.REPAIRED: replace(_INFO, is_on=False),
    MessageKind.GIVEN_BACK: replace(_INFO, is_on=False),
}


class Message(Struct, frozen=True):
    id: str  # derived from subject and channel, to detect repeats
    channel: str
    kind: MessageKind
    severity: Severity
    topic: str  # key for grouping
    title: str
    text: str  # Omitted if the message is grouped; may be empty
    at: datetime
    due_at: datetime
    """Time of sending; a little earlier with others of its topic. Messages outdated by then are dropped."""
    run_id: str | None = None
    link: str = ""


_PAIR = re.compile(r"([a-z_]+)=([a-z]+)(?:@([A-Za-z0-9_.,-]+))?")


def parse_rules(text: str) -> Mapping[MessageKind, MessageRule]:
    """Return the default rules changed by ``kind=severity@channel,channel`` pairs. Raises ValueError.

    Severity can be ``on`` or ``off``, kind ``all``.
    """
    rules = dict(DEFAULT_RULES)
    for pair in text.split():
        parts = _PAIR.fullmatch(pair)
        if parts is None:
            raise ValueError(f"{pair!r} is not kind=severity or kind=severity@channel, such as run_failed=critical")
        for kind in _kinds(parts[1]):
            rules[kind] = _with_level(rules[kind], parts[2], parts[3])
    return rules


def _kinds(name: str) -> Iterator[MessageKind]:
    if name == "all":
        yield from MessageKind
    elif name in list(MessageKind):
        yield MessageKind(name)
    else:
        hint = did_you_mean(name, MessageKind) or f"; use all, {', '.join(MessageKind)}"
        raise ValueError(f"unknown message kind {name!r}{hint}")


def _with_level(rule: MessageRule, level: str, channels: str | None) -> MessageRule:
    if channels is not None:
        rule = replace(rule, channels=tuple(dict.fromkeys(filter(None, channels.split(",")))))
    if level in ("on", "off"):
        return replace(rule, is_on=level == "on")
    if level not in list(Severity):
        raise ValueError(f"{level!r} is unknown; use on, off, {', '.join(Severity)}")
    return replace(rule, is_on=True, severity=Severity(level))


def minute(at: datetime | str) -> str:
    """Return a time as ``31 Jan 12:00Z``."""
    moment = datetime.fromisoformat(at) if isinstance(at, str) else at
    return f"{moment.astimezone(UTC):%d %b %H:%M}Z"
