"""How bad a line says it is, by the forms in which programs write that. A line that says nothing is `INFO`.

For searching alone: what a line means is for rules to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainmedic_logs.domain.log_search import LogLevel

_GLOG = re.compile(r"\[?([EWFI])\d{4} \d\d:\d\d:\d\d\.\d")
_WORD = re.compile(
    r"\b(?:(?P<error>ERROR|CRITICAL|FATAL|Traceback \(most recent call last\):)|(?P<warning>WARNING|WARN)"
    r"|(?P<debug>DEBUG)|(?P<info>INFO))(?:\b|$)"
)
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?::|$)")
_WARNED = re.compile(r"\b[A-Z]\w*Warning: ")
_KERNEL = re.compile(r"<(\d{1,3})>|(\d{1,4}),\d{1,20},\d{1,20},[^;]{0,40};|kern +:([a-z]{3,6}) *:")
_KERNEL_NAMES = {"emerg": 0, "alert": 1, "crit": 2, "err": 3, "warn": 4, "notice": 5, "info": 6, "debug": 7}
_NAMED = re.compile(r'"(?:level|levelname|log\.level|severity|lvl)" ?: ?"([A-Za-z]{1,10})"')
_NAMES: Mapping[str, LogLevel] = {
    **dict.fromkeys(("error", "err", "critical", "fatal", "panic", "exception", "emergency", "alert"), LogLevel.ERROR),
    **dict.fromkeys(("warning", "warn"), LogLevel.WARNING),
    **dict.fromkeys(("debug", "trace"), LogLevel.DEBUG),
}
"""Names of levels in JSON. Any other name means info."""
_BEGINNING = 200
"""Characters in which a program's own level stands; a word further on is a part of what it says."""
_OF_GLOG = {"E": LogLevel.ERROR, "F": LogLevel.ERROR, "W": LogLevel.WARNING, "I": LogLevel.INFO}


def level_of(text: str, record: Mapping[str, Any] | None = None) -> LogLevel:
    """Of a line without its prefixes; ``record`` is what it reports, where it does."""
    if record is not None:
        named = next((record[name] for name in ("level", "levelname", "severity") if name in record), "")
        return _NAMES.get(str(named).lower(), LogLevel.INFO)
    if text.startswith("{") and (match := _NAMED.search(text[:4096])):
        return _NAMES.get(match[1].lower(), LogLevel.INFO)
    beginning = text[:_BEGINNING]
    if match := _GLOG.match(beginning):
        return _OF_GLOG[match[1]]
    if match := _WORD.search(beginning):
        return LogLevel(str(match.lastgroup))
    if _RAISED.match(beginning):
        return LogLevel.ERROR
    return LogLevel.WARNING if _WARNED.search(beginning) else LogLevel.INFO


def level_of_kernel(raw: str) -> LogLevel:
    """Of a line of the kernel's log as it is kept, where that keeps the level."""
    match = _KERNEL.match(raw)
    if match is None:
        return LogLevel.INFO
    priority = _KERNEL_NAMES.get(match[3], 6) if match[3] else int(match[1] or match[2]) & 7
    if priority <= 3:
        return LogLevel.ERROR
    return {4: LogLevel.WARNING, 7: LogLevel.DEBUG}.get(priority, LogLevel.INFO)
