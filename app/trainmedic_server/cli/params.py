"""Types of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import click

_DURATION = re.compile(r"(\d+(ms|[ywdhms]))+")


class TimeParam(click.ParamType[str]):
    """A time, by default in this machine's zone. With `ago`, also a Prometheus duration, which the server subtracts
    from its clock.
    """

    name = "time"

    def __init__(self, *, ago: bool = True) -> None:
        self._ago = ago

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if self._ago and _DURATION.fullmatch(value):
            return str(value)
        try:
            return datetime.fromisoformat(value).astimezone(UTC).isoformat()
        except (ValueError, OverflowError):
            if self._ago:
                self.fail(f"{value!r} is neither a time (2026-01-31T12:00:00Z) nor a duration (90m, 7d)")
            self.fail(f"{value!r} is not a time, such as 2026-01-31T12:00:00Z")


def pairs_of(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> Sequence[tuple[str, str]]:
    pairs = [value.partition("=") for value in values]
    for value, (name, sign, _) in zip(values, pairs, strict=True):
        if not sign or not name:
            raise click.UsageError(f"{_flag(param)} {value!r} must be NAME=VALUE, such as job_name=llm-1", ctx=ctx)
    return [(name, value) for name, _, value in pairs]


def _flag(param: click.Parameter) -> str:
    return param.opts[0] if param.opts else "--label"


def labels_option(help: str | None = None, flag: str = "--label", name: str = "labels") -> Callable[[Any], Any]:

    def labels_of(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
        return dict(pairs_of(ctx, param, values))

    return click.option(flag, name, multiple=True, metavar="NAME=VALUE", callback=labels_of, help=help)
