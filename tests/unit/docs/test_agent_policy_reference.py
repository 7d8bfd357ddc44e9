"""The reference of the agent's policy is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_agent.disk.rules import CleaningPolicy, CleaningRule
from trainmedic_agent.log_reading.log_policy import FilesOfSource, LogsPolicy
from trainmedic_agent.policy import CHANGING, Policy, PowerBounds
from trainmedic_agent.repairs.policy import RestartPolicy
from trainmedic_agent.slurm.policy import SlurmPolicy

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "agent-policy.md").read_text(encoding="utf-8")
NOT_IN_THE_FILE = {"name", "source", "digest"}
PARTS = (SlurmPolicy, Policy, PowerBounds, CleaningPolicy, CleaningRule, RestartPolicy, LogsPolicy, FilesOfSource)
KEYS = {key for part in PARTS for key in part.__struct_fields__} - NOT_IN_THE_FILE


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_has_its_row(key: str) -> None:
    """It stands in the first column of a table."""
    assert any(f"`{key}`" in line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| "))


def test_every_action_that_can_be_allowed_is_named() -> None:
    """They stand under ``allow``."""
    assert all(f"`{action}`" in PAGE for action in CHANGING)


def test_the_defaults_are_those_of_the_code() -> None:
    """They are floor, lease, files per command, files and lines that are read."""
    assert f"| `floor_percent` | `{PowerBounds().floor_percent:g}` |" in PAGE
    assert PowerBounds().max_lease.total_seconds() == 15 * 60
    assert f"| `max_files` | `{CleaningPolicy().max_files}` |" in PAGE
    assert f"| `max_files` | `{LogsPolicy().max_files}` |" in PAGE
    assert f"| `max_lines` | `{LogsPolicy().max_lines}` |" in PAGE
    for name in ("max_job_files", "max_job_lines", "max_job_entries", "max_job_findings"):
        assert f"| `{name}` | `{getattr(LogsPolicy(), name)}` |" in PAGE
