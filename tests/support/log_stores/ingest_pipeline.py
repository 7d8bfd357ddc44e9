"""Ingest pipelines of Elasticsearch and OpenSearch, as far as the shipped one uses them, in Python.

It knows the processors set, gsub, grok (named groups, no %{…}), urldecode, json, lowercase, date, convert and remove,
with ``ignore_missing``, ``ignore_failure`` and ``override``, and two forms of ``if``. What it does not model: Painless,
Joni's and Java's own regular expressions where they differ from Python's, dotted names of flat fields, ``on_failure``,
and dates in other formats than the three below. An unknown processor, option or condition fails the test.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote_plus
from zoneinfo import ZoneInfo

Document = dict[str, Any]
_COMMON = {"field", "if", "ignore_missing", "ignore_failure"}
_KNOWN = {
    "set": {"value", "override"},
    "gsub": {"pattern", "replacement"},
    "grok": {"patterns"},
    "urldecode": set(),
    "json": {"target_field"},
    "lowercase": set(),
    "date": {"formats", "timezone", "output_format"},
    "convert": {"type"},
    "remove": set(),
}
_OUTPUT = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


class ProcessorError(Exception):
    """A processor could not do its work, and does not ignore that."""


def run(pipeline: Mapping[str, Any], document: Mapping[str, Any], now: datetime) -> Document:
    """Return the document as the pipeline makes it. `now` says the year of a date without one."""
    made: Document = copy.deepcopy(dict(document))
    for processor in pipeline["processors"]:
        ((kind, body),) = processor.items()
        unknown = body.keys() - _KNOWN[kind] - _COMMON
        assert not unknown, f"{kind}: {unknown}"
        if not _holds(body.get("if", ""), made):
            continue
        try:
            _PROCESSORS[kind](body, made, now)
        except ProcessorError:
            if not body.get("ignore_failure"):
                raise
    return made


def _holds(condition: str, document: Document) -> bool:
    if not condition:
        return True
    if match := re.fullmatch(r"ctx\.(\w+) == '(\w+)'", condition):
        return bool(document.get(match[1]) == match[2])
    match = re.fullmatch(r"ctx\.(\w+(?:\?\.\w+)?) != null", condition)
    assert match, condition
    return _value(document, match[1].replace("?", "")) is not None


def _value(document: Document, path: str) -> Any:
    value: Any = document
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text(body: Mapping[str, Any], document: Document) -> str | None:
    """Return the field's text; None where it may be missing and is."""
    value = _value(document, body["field"])
    if value is None and body.get("ignore_missing"):
        return None
    if not isinstance(value, str):
        raise ProcessorError(f"field {body['field']} is not a text")
    return value


def _rendered(template: str, document: Document) -> str:
    def value(match: re.Match[str]) -> str:
        found = _value(document, match[1])
        return "" if found is None else str(found)

    return re.sub(r"\{\{\{([\w.]+)\}\}\}", value, template)


def _set(body: Mapping[str, Any], document: Document, now: datetime) -> None:
    if body.get("override", True) or document.get(body["field"]) is None:
        document[body["field"]] = _rendered(body["value"], document)


def _gsub(body: Mapping[str, Any], document: Document, now: datetime) -> None:
    text = _text(body, document)
    if text is not None:
        document[body["field"]] = re.sub(body["pattern"], re.sub(r"\$(\d)", r"\\\1", body["replacement"]), text)


def _grok(body: Mapping[str, Any], document: Document, now: datetime) -> None:
    text = _text(body, document)
    if text is None:
        return
    for pattern in body["patterns"]:
        assert "%{" not in pattern
        match = re.search(re.sub(r"\(\?<(\w+)>", r"(?P<\1>", pattern), text)
        if match is not None:
            document.update({name: value for name, value in match.groupdict().items() if value is not None})
            return
    raise ProcessorError("no pattern matches")


def _urldecode(body: Mapping[str, Any], document: Document, now: datetime) -> None:
    text = _text(body, document)
    if text is None:
        return
    if re.search(r"%(?![0-9A-Fa-f]{2})", text):
        raise ProcessorError("not percent-encoded")
    document[body["field"]] = unquote_plus(text)


def _json(body: Mapping[str, Any], document: Document, now: datetime) -> None:
    try:
        document[body["target_field"]] = json.loads(_text(body, document) or "")
    except ValueError as error:
        raise ProcessorError(str(error)) from error


def _lowercase(body: Mapping[str, Any], document: Document, now: datetime) -> None:
    text = _text(body, document)
    if text is not None:
        document[body["field"]] = text.lower()


def _date(body: Mapping[str, Any], document: Document, now: datetime) -> None:
    assert body["output_format"] == _OUTPUT
    text, zone = _text(body, document), _zone(_rendered(body["timezone"], document))
    assert text is not None
    for form in body["formats"]:
        try:
            at = _FORMATS[form](text, now.year)
        except ValueError:
            continue
        at = at if at.tzinfo else at.replace(tzinfo=zone)
        document["@timestamp"] = at.astimezone(zone).isoformat(timespec="microseconds")
        return
    raise ProcessorError(f"{text} is in none of the formats")


def _zone(name: str) -> Any:
    if match := re.fullmatch(r"[+-]\d\d:\d\d", name):
        return datetime.fromisoformat(f"2026-01-01T00:00:00{match[0]}").tzinfo
    return UTC if name == "UTC" else ZoneInfo(name)


def _iso(text: str, year: int) -> datetime:
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", text)
    if match is None:
        raise ValueError("not ISO 8601")
    zone = (match[4] or "").replace("Z", "+00:00")
    return datetime.fromisoformat(f"{match[1]}T{match[2]}.{(match[3] or '0')[:6]:0<6}{zone}")


_FORMATS: Mapping[str, Callable[[str, int], datetime]] = {
    "ISO8601": _iso,
    "MMdd HH:mm:ss.SSSSSS": lambda text, year: datetime.strptime(f"{year} {text}", "%Y %m%d %H:%M:%S.%f"),
    "MMM d HH:mm:ss": lambda text, year: datetime.strptime(f"{year} {text}", "%Y %b %d %H:%M:%S"),
}


def _convert(body: Mapping[str, Any], document: Document, now: datetime) -> None:
    value = document.get(body["field"])
    if value is None and body.get("ignore_missing"):
        return
    try:
        document[body["field"]] = int(str(value))
    except ValueError as error:
        raise ProcessorError(str(error)) from error


def _remove(body: Mapping[str, Any], document: Document, now: datetime) -> None:
    for name in body["field"]:
        document.pop(name, None)


_PROCESSORS: Mapping[str, Callable[[Mapping[str, Any], Document, datetime], None]] = {
    "set": _set,
    "gsub": _gsub,
    "grok": _grok,
    "urldecode": _urldecode,
    "json": _json,
    "lowercase": _lowercase,
    "date": _date,
    "convert": _convert,
    "remove": _remove,
}
