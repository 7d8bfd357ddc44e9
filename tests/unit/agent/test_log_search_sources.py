"""Searching what Slurm writes, and the journal of the kernel."""

from __future__ import annotations

import os
import resource
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.search_in_process import searcher_of
from tests.unit.agent.log_reading.journal import Journal
from tests.unit.agent.log_reading.reading import policy_of
from trainmedic_logs.domain.log_search import LogLevel, LogQuery

QUERY = LogQuery("llm-1", since=datetime.now(UTC) - timedelta(hours=1))


def test_slurm_output_is_searched_by_the_ranks_in_srun_prefixes(tmp_path: Path) -> None:
    """Slurm's own lines have none, and are left out where one is asked for."""
    now = datetime.now(UTC).isoformat()
    lines = [f"0: {now} step 1", f"7: {now} ERROR it broke", "slurmstepd: error: *** JOB 12 CANCELLED ***"]
    (tmp_path / "llm-1-12.out").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "other-13.out").write_text(f"7: {now} of another job\n")
    search = searcher_of(policy_of(slurm=[f"{tmp_path}/{{job}}-[0-9]*.out"]), "gpu-07")
    found = search.page(QUERY, {}).lines
    assert [(line.rank, line.source) for line in found] == [(0, "slurm"), (7, "slurm"), (None, "slurm")]
    (line,) = search.page(replace(QUERY, rank=7), {}).lines
    assert (line.text, line.level) == (f"{now} ERROR it broke", LogLevel.ERROR)


def test_the_kernel_journal_is_searched_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """journalctl returns what was logged since the boot, each line once, with its level and time."""
    journal = Journal(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    boot = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
    journal.add("c1", boot - 30_000_000, "NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.")
    journal.add("c2", boot - 20_000_000, "eth0: link becomes ready")
    search = searcher_of(policy_of(kernel="journal"), "gpu-07")
    query = replace(QUERY, kernel=True)
    first = search.page(query, {}, most=1)
    (line,) = first.lines
    assert line.text.startswith("NVRM: Xid")
    assert (line.source, line.level) == ("kernel", LogLevel.ERROR)
    assert abs((datetime.now(UTC) - line.at).total_seconds() - 30) < 60
    journal.add("c3", boot - 10_000_000, "mlx5_core: link down")
    second = search.page(query, first.places)
    assert [each.text for each in second.lines] == ["eth0: link becomes ready", "mlx5_core: link down"]
    assert search.page(query, second.places).lines == []
    assert search.page(QUERY, {}).lines == []


def test_the_journal_is_searched_by_a_reader_with_many_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has a descriptor above 1023 then, which select(2) does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process may not open so many files")
    journal = Journal(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    journal.add("c1", int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6) - 30_000_000, "eth0: link down")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        search = searcher_of(policy_of(kernel="journal"), "gpu-07")
        assert [line.text for line in search.page(replace(QUERY, kernel=True), {}).lines] == ["eth0: link down"]
