"""Cron schedules and windows of time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trainmedic_core.fields import Duration

_FIRST_DAY = datetime(1, 1, 2, tzinfo=UTC)  # the first whose times exist in all zones
_ANY_DAY = datetime(2024, 1, 1, tzinfo=UTC)  # a valid schedule has a time after it
_LONGEST_WINDOW = timedelta(days=50 * 365)  # every schedule comes within it: CronSim refuses rarer ones
_FIELDS = "write minute, hour, day of month, month and day of week, such as 0 2 * * 2"


def next_after(expression: str, timezone: str, instant: datetime) -> datetime:
    """Return the schedule's first time after `instant`, in UTC. Raises ValueError.

    As in Debian's cron, a time that the clock skips comes right after the change, and a repeated time comes once,
    unless minute or hour begin with ``*``.
    """
    if len(expression.split()) != 5:
        raise ValueError(f"{expression!r} does not have the five fields of a schedule; {_FIELDS}")
    zone = _zone(timezone)
    try:
        for time in CronSim(expression, max(instant, _FIRST_DAY).astimezone(zone)):
            # In an hour that comes twice, the library starts at the first, which may be before `instant`.
            if time.astimezone(UTC) > instant:
                return time.astimezone(UTC)
    except CronSimError as error:
        raise ValueError(f"{expression!r} is not a schedule: {str(error).lower()}; {_FIELDS}") from None
    except OverflowError:  # after the year 9999
        pass
    raise ValueError(f"{expression!r} never comes")


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (LookupError, OSError, ValueError):  # unknown; a folder of zones; a path
        raise ValueError(f"there is no time zone {name!r}; write it as Europe/Berlin or UTC") from None


def _checked_schedule(text: str) -> str:
    next_after(text, "UTC", _ANY_DAY)
    return text


def _checked_timezone(text: str) -> str:
    _zone(text)
    return text


Schedule = Annotated[
    str,
    AfterValidator(_checked_schedule),
    Field(max_length=200, description="Five fields as in crontab: minute, hour, day of month, month, day of week."),
]
TimeZone = Annotated[
    str, AfterValidator(_checked_timezone), Field(max_length=100, description="Such as Europe/Berlin.")
]


class CronWindow(BaseModel):
    """A window of time after each time of a schedule."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schedule: Schedule
    duration: Annotated[Duration, Field(gt=timedelta(0))]
    timezone: TimeZone = "UTC"

    def __str__(self) -> str:
        return f"{self.schedule} ({self.timezone})"


def opened_at(window: CronWindow, instant: datetime) -> datetime | None:
    """Return the start of the open window, which excludes its end; None if closed."""
    length = min(window.duration, _LONGEST_WINDOW)  # a window of this length is always open already
    begin = instant - length if instant - _FIRST_DAY > length else _FIRST_DAY
    try:
        opened = next_after(window.schedule, window.timezone, begin)
    except ValueError:  # never again
        return None
    return opened if opened <= instant else None


def holds_at(window: CronWindow, instant: datetime) -> bool:
    return opened_at(window, instant) is not None
