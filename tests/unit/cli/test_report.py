"""The report as text."""

from __future__ import annotations

from typing import Any

import pytest

from trainmedic_server.cli.report import _fleet_lines


@pytest.mark.parametrize(
    ("seconds", "not_back", "shown"),
    [(None, 2, "2 not back"), (900.0, 1, "15 min, 1 not back"), (900.0, 0, "15 min")],
)
def test_jobs_that_never_recovered_do_not_count_as_zero_downtime(
    seconds: float | None, not_back: int, shown: str
) -> None:
    """How long jobs that are still down will stay down is unknown."""
    cause: dict[str, Any] = {"cause": "gpu", "failures": 3, "jobs": 3, "down_seconds": seconds, "not_back": not_back}
    lines = list(_fleet_lines({"failures": 3, "causes": [cause | {"lost_gpu_hours": None, "uncounted": 3}]}))
    header, row = next((lines[at], lines[at + 1]) for at, line in enumerate(lines) if line.startswith("CAUSE"))
    begin, end = header.index("DOWN"), header.index("GPU-HOURS")
    assert row[begin:end].strip() == shown
    assert "0 ms" not in row
