"""The page about ``trainmedic-run`` has its options, and their defaults."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from trainmedic.launch.program import parser

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "run-a-job.md").read_text()
OPTIONS = [action for action in parser()._actions if not isinstance(action, argparse._HelpAction)]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.dest)
def test_every_option_is_on_the_page(option: argparse.Action) -> None:
    """It has its value placeholder, as in ``--help``."""
    name = option.option_strings[-1] + (f" {option.metavar}" if option.metavar else "")
    assert f"`{name}`" in PAGE


def test_the_defaults_are_those_of_the_program() -> None:
    """They are in the units of the page."""
    options = parser().parse_args([])
    assert (options.retries, options.delay, options.grace) == (3, 60.0, 30.0)
    assert (options.hang_after, options.log_size) == (600.0, 64 << 20)
    rows = ["`--retries N` | 3 ", "`--delay TIME` | `60s`", "`--grace TIME` | `30s`", "`--hang-after TIME` | `10m`"]
    assert [row for row in rows if row not in PAGE] == []
