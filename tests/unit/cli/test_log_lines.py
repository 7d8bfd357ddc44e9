"""Showing the lines of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest

from trainmedic_core.cli import exits
from trainmedic_server.cli.client import Client
from trainmedic_server.cli.log_lines import show_lines


class SlowServer:
    """Its answer does not come."""

    def lines(self, path: str, params: Mapping[str, Any]) -> Iterator[str]:
        yield from ()
        raise exits.NoAnswerYet("http://127.0.0.1:8080 did not answer in time.")


def test_a_search_that_takes_too_long_reports_how_to_narrow_it() -> None:
    """It fails in the same way as a server that does not answer."""
    with pytest.raises(exits.Unreachable, match=r"did not answer in time\. Narrow the search with a later --since, "):
        show_lines(cast("Client", SlowServer()), "llm-1", "text", False, False, grep="(nan)")
