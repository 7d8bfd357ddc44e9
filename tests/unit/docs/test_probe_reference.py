"""The page about ``trainmedic-probe`` has its options."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from trainmedic.probe.__main__ import parser

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "probe.md").read_text()
OPTIONS = [action for action in parser()._actions if not isinstance(action, argparse._HelpAction)]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.dest)
def test_every_option_is_on_the_page(option: argparse.Action) -> None:
    """It has its value placeholder, as in ``--help``."""
    name = option.option_strings[-1] + (f" {option.metavar}" if option.metavar else "")
    assert f"| `{name}` |" in PAGE
