"""Messages that Trainmedic sends to people by itself, and what is set of them. Pure.

A playbook tells people by ``notify`` what its author wants them to know. These messages are about what no playbook can
tell: that a person is asked, that a run has failed, that the server is paused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core.problems import did_you_mean

NO_CHANNEL = "no notification channel is configured"
"""Why nothing can be sent if TRAINMEDIC_NOTIFY_URLS is not set."""


class Severity(StrEnum):
    """How soon somebody should look."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


class MessageKind(StrEnum):
    """What a message is about."""

    APPROVAL = "approval"
    """A person is asked whether a run may act."""
    RUN_FAILED = "run_failed"
    """A run has failed, and its playbook has not told anybody."""
    NOT_STARTED = "not_started"
    """A guard keeps a playbook that reacts to an alert from acting."""
    TARGET_UNKNOWN = "target_unknown"
    """A playbook reacts to an alert whose labels name nothing known, or contradict each other."""
    UNDO_OVERDUE = "undo_overdue"
    """What a run did could not be taken back for two minutes."""
    BREAKER = "breaker"
    """The breaker has opened, or was closed."""
    PAUSE = "pause"
    """Somebody has paused or resumed the server, or a part of what it does."""
    PLAYBOOK_BROKEN = "playbook_broken"
    """A playbook file has had a mistake for half a minute."""
    TAKEOVER = "takeover"
    """Of several servers another one works now."""
    FOLLOW_UP = "follow_up"
    """What has become of something that a message was about."""
    REPAIRED = "repaired"
    """A run has acted, and its alert is over."""
    GIVEN_BACK = "given_back"
    """What a run did is taken back."""


class MessageRule(Struct, frozen=True):
    """What is set of a kind: how severe its messages are, and to which channels they go."""

    severity: Severity
    is_on: bool = True
    channels: tuple[str, ...] = ()
    """Names of notification channels; empty for all that there are."""


_INFO, _WARNING, _CRITICAL = (MessageRule(severity) for severity in Severity)
DEFAULT_RULES: Mapping[MessageKind, MessageRule] = {
    MessageKind.APPROVAL: _WARNING,
    MessageKind.RUN_FAILED: _WARNING,
    MessageKind.NOT_STARTED: _WARNING,
    MessageKind.TARGET_UNKNOWN: _WARNING,
    MessageKind.UNDO_OVERDUE: _CRITICAL,
    MessageKind.BREAKER: _CRITICAL,
    MessageKind.PAUSE: _INFO,
    MessageKind.PLAYBOOK_BROKEN: _WARNING,
    MessageKind.TAKEOVER: _WARNING,
    MessageKind.FOLLOW_UP: _INFO,
    MessageKind.REPAIRED: replace(_INFO, is_on=False),
    MessageKind.GIVEN_BACK: replace(_INFO, is_on=False),
}


class Message(Struct, frozen=True):
    """One message to one channel. Times are aware UTC datetimes."""

    id: str
    """Follows from what it is about and from the channel, so that the same one is never kept twice."""
    channel: str
    kind: MessageKind
    severity: Severity
    topic: str
    """What is told together: the playbook's name, or what else the messages have in common."""
    title: str
    """One line, which says all by itself."""
    text: str
    """What is told where it stands alone: some lines; may be empty."""
    at: datetime
    """When it came to be."""
    due_at: datetime
    """When it may be sent; until then others of its topic join it, and what passes by itself is not told."""
    run_id: str | None = None
    link: str = ""
    """Where people can look; empty where the server's external URL is not set."""


_PAIR = re.compile(r"([a-z_]+)=([a-z]+)(?:@([A-Za-z0-9_.,-]+))?")


def parse_rules(text: str) -> Mapping[MessageKind, MessageRule]:
    """The rules that a text of ``kind=severity@channel,channel`` pairs makes of the default ones.

    In place of the severity stands ``on`` or ``off``, and in place of the kind ``all``; a later pair counts more.
    Raises ValueError.
    """
    rules = dict(DEFAULT_RULES)
    for pair in text.split():
        parts = _PAIR.fullmatch(pair)
        if parts is None:
            raise ValueError(f"{pair!r} is not kind=severity or kind=severity@channel, such as run_failed=critical")
        for kind in _kinds(parts[1]):
            rules[kind] = _changed(rules[kind], parts[2], parts[3])
    return rules


def _kinds(name: str) -> Iterator[MessageKind]:
    if name == "all":
        yield from MessageKind
    elif name in list(MessageKind):
        yield MessageKind(name)
    else:
        hint = did_you_mean(name, MessageKind) or f"; there are all, {', '.join(MessageKind)}"
        raise ValueError(f"there is no message {name!r}{hint}")


def _changed(rule: MessageRule, level: str, channels: str | None) -> MessageRule:
    if channels is not None:
        rule = replace(rule, channels=tuple(dict.fromkeys(filter(None, channels.split(",")))))
    if level in ("on", "off"):
        return replace(rule, is_on=level == "on")
    if level not in list(Severity):
        raise ValueError(f"{level!r} is none of on, off, {', '.join(Severity)}")
    return replace(rule, is_on=True, severity=Severity(level))


def minute(at: datetime | str) -> str:
    """A moment, or its ISO 8601, as a message has it: ``31 Jan 03:12Z``."""
    moment = datetime.fromisoformat(at) if isinstance(at, str) else at
    return f"{moment.astimezone(UTC):%d %b %H:%M}Z"
