"""Times of the command line."""

from __future__ import annotations

import click
import pytest

from trainmedic_server.cli.params import TimeParam


@pytest.mark.parametrize("written", ["yesterday", "0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00"])
def test_an_invalid_time_is_rejected(written: str) -> None:
    """So is one that has no equivalent in UTC."""
    with pytest.raises(click.BadParameter, match="is not a time, such as"):
        TimeParam(ago=False).convert(written, None, None)
