"""View of a job's log by a page's address, with the API's names of filters. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Self
from urllib.parse import urlencode

from msgspec import Struct, field

from trainmedic_logs.domain.log_search import read_time, written
from trainmedic_server.api.times import time_of
from trainmedic_server.live.log_lines import LONGEST_SINCE
from trainmedic_server.presentation import times

NEWEST, OLDEST = "newest", "oldest"
OWN = "own"  # the window has explicit limits
LASTS = ("1m", "5m", "10m", "1h", "24h")
USUAL_LAST = "10m"
AROUND = timedelta(minutes=1)
FILTERS = ("rank", "local_rank", "node_rank", "node", "attempt", "level", "kernel")
_MOST_PASSED = 50_000  # lines of one time
_PLACE = re.compile(r"(?P<at>.{1,40})~(?P<passed>\d{1,6})")


class LogPlace(Struct, frozen=True):
    at: datetime
    passed: int = 0
    """Number of lines of this time that earlier pages have shown."""

    def __str__(self) -> str:
        return f"{written(self.at)}~{self.passed}"

    @classmethod
    def read(cls, text: str) -> Self:
        match = _PLACE.fullmatch(text)
        if match is None or int(match["passed"]) > _MOST_PASSED:
            raise ValueError("is not a place in a log; omit it to start at the newest lines")
        return cls(_aware(read_time(match["at"])), int(match["passed"]))


class LogView(Struct, frozen=True):
    job: str
    since: datetime
    until: datetime | None = None
    filters: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    is_pattern: bool = False
    last: str = USUAL_LAST  # Window length up to now, or `OWN`
    order: str = NEWEST
    before: LogPlace | None = None
    after: LogPlace | None = None
    moment: datetime | None = None  # the line nearest to it is marked
    is_followed: bool = False

    @classmethod
    def read(cls, job: str, query: Mapping[str, str], now: datetime) -> tuple[Self, str]:
        """Return the view, and errors or "". Invalid parameters keep their defaults."""
        wrong: list[str] = []

        def parameter(name: str, read: Any, default: Any = None) -> Any:
            value = query.get(name, "").strip()
            try:
                return read(value) if value else default
            except ValueError as error:
                wrong.append(f"{name}: {error}")
                return default

        point = parameter("at", _point)
        last = query.get("last", "")
        is_own = last == OWN or (not last and any(query.get(name) for name in ("since", "until", "attempt", "at")))
        if is_own:
            usual = now - LONGEST_SINCE if query.get("attempt") else now - timedelta(minutes=10)
            usual = point - AROUND if point else usual
            since = parameter("since", lambda text: _time(text, now), usual)
            until = parameter("until", lambda text: _time(text, now), point + AROUND if point else None)
            last = OWN
        else:
            if last and last not in LASTS:
                wrong.append(f"last: must be one of {', '.join(LASTS)}, or {OWN}")
            last = last if last in LASTS else USUAL_LAST
            since, until = time_of(last, now), None
        if until is not None and until <= since:
            wrong.append("until: must be later than since")
            until = None
        usual_order = OLDEST if point else NEWEST
        view = cls(
            job=job,
            since=since,
            until=until,
            filters={name: query[name].strip() for name in FILTERS if query.get(name, "").strip()},
            text=query.get("text") or query.get("grep", ""),
            is_pattern=bool(query.get("pattern")) or ("grep" in query and not query.get("text")),
            last=last,
            order=query.get("order", "") if query.get("order") in (NEWEST, OLDEST) else usual_order,
            before=parameter("before", LogPlace.read),
            after=parameter("after", LogPlace.read),
            moment=point,
            is_followed=bool(query.get("live")) and until is None,
        )
        return view, "; ".join(wrong)

    @property
    def grep(self) -> str:
        if not self.text or self.is_pattern:
            return self.text
        return f"(?i){re.escape(self.text)}"

    @property
    def is_open(self) -> bool:
        return self.until is None and self.before is None

    def api_query(self, since: datetime | None = None, until: datetime | None = None, **others: Any) -> dict[str, Any]:
        names: dict[str, Any] = {**self.filters, "since": written(since or self.since)}
        end = until or self.until
        if end is not None:
            names["until"] = written(end)
        if self.grep:
            names["grep"] = self.grep
        return {**names, **others}

    @property
    def command(self) -> str:
        words = ["trainmedic", "logs", "--job", self.job]
        for name, value in self.api_query().items():
            words += ["--kernel"] if name == "kernel" else [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join(words)

    def query(self, **changes: Any) -> str:
        """Return the page's query with `changes`; None removes a parameter."""
        names: dict[str, Any] = {"text": self.text, "pattern": "1" if self.is_pattern else "", **self.filters}
        if self.last == OWN:
            names |= {"last": OWN, "since": written(self.since), "until": self.until and written(self.until)}
        elif self.last != USUAL_LAST:
            names["last"] = self.last
        names["at"] = self.moment and written(self.moment)
        names["order"] = self.order if self.order != (OLDEST if self.moment else NEWEST) else ""
        names["live"] = "1" if self.is_followed else ""
        names |= changes
        return urlencode({name: str(value) for name, value in names.items() if value not in (None, "")})

    def older(self, place: LogPlace) -> str:
        return self.query(**self._with_fixed_limits(), before=place)

    def newer(self, place: LogPlace) -> str:
        return self.query(**self._with_fixed_limits(), after=place)

    def permanent(self, now: datetime) -> str:
        """Return the query that shows the same lines later."""
        fixed = {**self._with_fixed_limits(), "until": written(self.until or now)}
        return self.query(**fixed, before=self.before, after=self.after)

    def _with_fixed_limits(self) -> dict[str, Any]:
        until = written(self.until) if self.until is not None else None
        return {"last": OWN, "since": written(self.since), "until": until, "live": None}


def around(at: Any, rank: Any = None, node: Any = None, source: Any = None) -> str:
    """Return the query of the lines around a moment, of a rank, else a node. "" without a time."""
    try:
        names: dict[str, Any] = {"at": written(_point(at))}
    except ValueError:
        return ""
    if source == "kernel":
        names |= {"node": node, "kernel": "true"}
    elif rank is not None:
        names["rank"] = rank
    else:
        names["node"] = node
    return urlencode({name: value for name, value in names.items() if value not in (None, "")})


def _point(value: Any) -> datetime:
    point = times.read(value)
    if point is None:
        raise ValueError("must be a time, such as 2026-01-31T12:00:05Z")
    return _aware(point)


def _time(text: str, now: datetime) -> datetime:
    try:
        point: datetime | None = time_of(text, now)
    except ValueError:
        point = times.read(text)
    if point is None:
        raise ValueError("must be a time in UTC (2026-01-31 12:00:05), a time with a zone, or a duration (90m)")
    return _aware(point)


def _aware(point: datetime) -> datetime:
    try:
        at = (point if point.tzinfo is not None else point.replace(tzinfo=UTC)).astimezone(UTC)
        _ = at - AROUND, at + AROUND  # the lines around it have limits
    except OverflowError:
        raise ValueError("is outside the range of dates") from None
    return at
