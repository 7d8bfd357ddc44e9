"""Times on the command line. Who uses it: ``history`` and ``report``."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import click

_DURATION = re.compile(r"(\d+(ms|[ywdhms]))+")


class TimeParam(click.ParamType[str]):
    """A time, or a Prometheus duration, which the server subtracts from its own clock."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if _DURATION.fullmatch(value):
            return str(value)
        try:
            time_given = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is neither a time (2026-01-31T12:00:00Z) nor how long ago it was (90m, 7d)")
        return time_given.astimezone(UTC).isoformat()  # a time without a zone is in the zone of this machine
