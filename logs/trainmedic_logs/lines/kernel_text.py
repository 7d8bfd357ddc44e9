"""Kernel log lines without the prefixes of ``dmesg``, ``/dev/kmsg``, pstore, the journal or syslog."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from msgspec import Struct

from trainmedic_logs.lines import times

# Level, sequence number and microseconds since boot.
_KMSG = re.compile(r"(\d{1,4}),(\d{1,20}),(\d{1,20}),[^;]{0,40};")
_LEVEL = re.compile(r"<(\d{1,3})>")
_FACILITY = re.compile(r"(?:kern|user|mail|daemon|auth|syslog|local\d) {0,3}:[a-z]{3,6} {0,3}: ")
_CALLER = r"(?: ?\[ {0,12}[TC]\d{1,9}\])? ?"
_SINCE_BOOT = re.compile(r"\[ {0,12}(\d{1,12}\.\d{1,9})\]" + _CALLER)
# Local time of `dmesg -T`, ignored because it states no zone.
_HUMAN = re.compile(r"\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]?\d \d\d:\d\d:\d\d \d{4}\]" + _CALLER)
_SYSLOG = re.compile(
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,6})?|(?P<iso>\d{4}-\d\d-\d\dT[\d:.,+Z-]{8,24})) "
)
_HOST_AND_KERNEL = re.compile(r"[\w.:-]{1,255} kernel: ")
_KERNEL = re.compile(r"kernel: ?")
_OTHER_PREFIX = re.compile(
    r"(?:<\d{1,3}>\d? ?)?(?:(?:[A-Z][a-z]{2}|[A-Z]{2,5}|\[? {0,8}\d[\d:.,TZ+-]{0,40}\]?) {1,3}){0,6}"
    r"[A-Za-z0-9][\w.:-]{0,254} kernel(?:\[\d{1,10}\])?(?:: ?| - - - )"
)


class KernelText(Struct, frozen=True):
    text: str
    at: datetime | None = None
    is_more: bool = False
    """Property of the ``/dev/kmsg`` record above."""


def split(text: str, booted_at: datetime | None = None) -> KernelText:
    """Remove prefixes. Times since boot need `booted_at`."""
    if match := _KMSG.match(text):
        seconds = int(match[3]) / 1_000_000
        return KernelText(text[match.end() :], _since(booted_at, seconds))
    if text.startswith(" ") and re.match(r" [A-Z_]{3,20}=", text):
        return KernelText(text, is_more=True)
    at, rest = _without_syslog_prefix(text)
    if match := _SINCE_BOOT.match(rest):
        return KernelText(rest[match.end() :], at or _since(booted_at, float(match[1])))
    if match := _HUMAN.match(rest):
        return KernelText(rest[match.end() :], at)
    return KernelText(rest, at)


def _without_syslog_prefix(text: str) -> tuple[datetime | None, str]:
    at = None
    if match := _LEVEL.match(text):
        text = text[match.end() :]
    if match := _FACILITY.match(text):
        text = text[match.end() :]
        at = times.with_zone(text)
        if at is not None:
            text = text.partition(" ")[2]
    elif (match := _SYSLOG.match(text)) and (match["iso"] or _HOST_AND_KERNEL.match(text, match.end())):
        named = _HOST_AND_KERNEL.match(text, match.end())
        at = times.with_zone(match["iso"]) if match["iso"] else None
        text = text[named.end() if named else match.end() :]
    elif " kernel" in text[:256] and (match := _OTHER_PREFIX.match(text)):
        text = text[match.end() :]
    if match := _KERNEL.match(text):
        text = text[match.end() :]
    return at, text


def _since(booted_at: datetime | None, seconds: float) -> datetime | None:
    if booted_at is None:
        return None
    try:
        return booted_at + timedelta(seconds=seconds)
    except OverflowError:
        return None
