"""The changelog keeps the form of Keep a Changelog, with one line for an entry."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from trainmedic_server import __version__

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
LONGEST_ENTRY = 400


def test_the_newest_release_has_this_version_and_a_date() -> None:
    """The section for unreleased changes comes first. Packages and chart have the same version."""
    unreleased, released, *_ = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
    assert unreleased == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d{{2}}-\d{{2}}", released)
    chart = yaml.safe_load((ROOT / "helm" / "trainmedic" / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_a_changelog_entry_is_one_line_under_its_kind() -> None:
    """Every line is a heading, an entry, or a sentence under a release's heading."""
    assert set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE)) <= KINDS
    entries = [line for line in CHANGELOG.splitlines() if line.startswith("- ")]
    assert entries
    assert [entry for entry in entries if len(entry) > LONGEST_ENTRY] == []
    assert not re.search(r"^- .*\n(?!- |\n|\Z)", CHANGELOG, re.MULTILINE)
