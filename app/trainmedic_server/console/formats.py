"""Filters and tests of the console's templates. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlsplit

from markupsafe import Markup, escape

from trainmedic_core import words
from trainmedic_core.plain_text import visible
from trainmedic_server.presentation import runs, sentences, targets, times
from trainmedic_server.presentation.sentences import At, Piece, RunName, Sentence, Values
from trainmedic_server.presentation.targets import IndexOf

_MARKS = {  # symbol and CSS class by status
    "running": ("●", "going"),
    "waiting": ("◐", "going"),
    "awaiting_approval": ("◆", "asks"),
    "succeeded": ("✓", "good"),
    "failed": ("✕", "bad"),
    "timed_out": ("✕", "bad"),
    "unknown": ("?", "bad"),
    "cancelled": ("■", "calm"),
    "rejected": ("■", "calm"),
    "observed": ("○", "calm"),
    "not_started": ("⊘", "calm"),
    "skipped": ("–", "calm"),
    "pending": ("·", "calm"),
    "applied": ("✓", "good"),
    "done": ("✓", "good"),
    "armed": ("↶", "going"),
    "available": ("↶", "calm"),
    "firing": ("▲", "bad"),
    "resolved": ("✓", "good"),
}
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[._/:])(?=\w)")
_RUN_ID = re.compile(r"(?<![\w-])([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?![\w-])")


def moment(value: Any) -> datetime | None:
    """Return None without a zone, or outside the range of dates."""
    # Jobs may report any text as a time.
    at = times.read(value)
    try:
        return at.astimezone(UTC) if at is not None and at.tzinfo is not None else None
    except OverflowError:
        return None


def span(value: float | timedelta | None) -> str:
    return "–" if value is None else times.span(value)


def age(value: Any, now: datetime) -> str:
    at = moment(value)
    if at is None:
        return "–"
    length = times.between(at, now)
    return f"in {length}" if (now - at).total_seconds() <= -1 else length


def clock_time(value: Any, now: datetime | None = None) -> str:
    at = moment(value)
    if at is None:
        return "–"
    is_today = now is None or at.date() == now.astimezone(UTC).date()
    return at.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M")


def precise(value: Any, now: datetime) -> Markup:
    """Format a time to the millisecond, with the date unless it is today."""
    at = moment(value)
    if at is None:
        return Markup("–")
    shown = f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}"
    text = shown if at.date() == now.astimezone(UTC).date() else f"{at:%Y-%m-%d} {shown}"
    return Markup('<time datetime="{}" title="{} {} UTC">{}</time>').format(
        at.isoformat(), f"{at:%Y-%m-%d}", shown, text
    )


def local_field(value: Any, up: bool = False) -> str:
    """Format a time in UTC for an input ``datetime-local``, in whole seconds. `up` rounds up."""
    at = moment(value)
    if at is None:
        return ""
    if up and at.microsecond:
        at += timedelta(seconds=1)
    return at.strftime("%Y-%m-%dT%H:%M:%S")


def loss(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, int | float) and not isinstance(value, bool) else plain(value)


def day(value: Any) -> str:
    at = moment(value)
    return at.strftime("%Y-%m-%d %H:%M") if at else "–"


def when(value: Any, now: datetime) -> Markup:
    """Format the age of a time, which `console.js` updates."""
    at = moment(value)
    if at is None:
        return Markup("–")
    exact = at.strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" title="{}" data-age>{}</time>').format(at.isoformat(), exact, age(at, now))


def status_mark(value: Any) -> Markup:
    text = str(value)
    shape, kind = _MARKS.get(text, ("·", "calm"))
    return Markup('<span class="st {}"><span aria-hidden="true">{}</span> {}</span>').format(
        kind, shape, words.words(text)
    )


def target(key: Any, index_of: IndexOf) -> Markup:
    if not key:
        return Markup('<span class="dim">–</span>')
    name = targets.words(str(key), index_of)
    behind = Markup(' title="{}"').format(finish(name.behind)) if name.behind else Markup("")
    return Markup('<span class="target"{}>{}{}</span>').format(
        behind, Markup('<span class="dim">{}</span> ').format(name.noun) if name.noun else "", breaks(name.name)
    )


def breaks(value: Any) -> Markup:
    """Allow breaks between words: ``GPU|Temperature|High``, ``rack-07.|example``."""
    return Markup("<wbr>").join(_WORDS.split(str(finish(value))))


def safe_link(value: Any) -> str | None:
    """Return None unless the text is an HTTP URL."""
    text = str(value or "")
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    return text if parts.scheme in ("http", "https") and parts.netloc else None


def segment(value: Any) -> str:
    return quote(str(value), safe="")


def shell(value: Any) -> str:
    return shlex.quote(str(value))


def as_json(address: str) -> str:
    path, mark, query = address.partition("?")
    return f"{path}.json{mark}{query}"


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def pairs(value: Any, limit: int = 200) -> Markup:
    if not isinstance(value, Mapping) or not value:
        return Markup('<span class="dim">–</span>')
    pieces = [
        Markup('<span class="kv"><span class="k">{}</span>={}</span>').format(
            finish(str(name)), finish(words.cut(plain(held), limit))
        )
        for name, held in value.items()
    ]
    return Markup(" ").join(pieces)


def without(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: held for key, held in value.items() if key != name}


def finish(value: Any) -> Any:
    """Escape invisible characters of external text."""
    if value is None:
        return ""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value, keep="\n\t")
    return value


def linked_runs(value: Any, base: str = "") -> Markup:
    pieces = _RUN_ID.split(str(finish(value)))
    link = Markup('<a href="{0}/runs/{1}">{1}</a>')
    return Markup("").join(link.format(base, piece) if place % 2 else piece for place, piece in enumerate(pieces))


def sentence(value: Sentence, now: datetime, base: str = "") -> Markup:
    def write(piece: Piece) -> str:
        match piece:
            case At(time):
                return Markup("{} ({})").format(clock_time(time, now), when(time, now))
            case RunName(run_id):
                return Markup('<a href="{}/runs/{}">{}</a>').format(base, run_id, runs.short_id(run_id))
            case Values(values):
                return pairs(values)
        return escape(finish(piece))

    return Markup(sentences.joined(value, write))  # noqa: S704 - every piece is escaped


def coded(value: Any) -> Markup:
    """Format text between backticks as code."""
    pieces = str(finish(value)).split("`")
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(piece) if place % 2 else piece for place, piece in enumerate(pieces))
