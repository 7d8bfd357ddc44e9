"""How many cores a process and its children keep busy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainmedic.job.process_usage import CpuMeter, cpu_seconds


class MadeProc:
    """A /proc that a test writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self" / "task" / "1").mkdir(parents=True)

    def write(self, own: int, ended: int = 0, **children: int) -> None:
        for pid in children:
            (self.root / pid).mkdir(exist_ok=True)
        for pid, ticks, of_children in [("self", own, ended), *((pid, ticks, 0) for pid, ticks in children.items())]:
            (self.root / pid / "stat").write_text(f"9 (a ) b) R 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 {of_children} 0 20 0 1")
        (self.root / "self" / "task" / "1" / "children").write_text(" ".join(children))


def test_worker_time_still_counts_after_workers_end(tmp_path: Path) -> None:
    """Their time is then in the process's own figures, and is neither lost nor counted twice."""
    proc = MadeProc(tmp_path)
    proc.write(0, p7=0, p8=0)
    meter = CpuMeter(0.0, tmp_path)
    assert meter.cores(0.5) is None
    proc.write(1000, p7=500, p8=500)
    assert meter.cores(10.0) == pytest.approx(2.0)
    proc.write(2000, ended=1000, p8=1000)
    assert meter.cores(20.0) == pytest.approx(2.0)


def test_decreasing_or_unreadable_values_are_unknown(tmp_path: Path) -> None:
    """A child that was handed to another process takes its time with it; the next reading counts again."""
    proc = MadeProc(tmp_path)
    proc.write(100, p7=5000)
    meter = CpuMeter(0.0, tmp_path)
    proc.write(200)
    assert meter.cores(10.0) is None
    proc.write(300)
    assert meter.cores(20.0) == pytest.approx(0.1)
    (tmp_path / "self" / "stat").unlink()
    assert meter.cores(30.0) is None
    assert cpu_seconds(tmp_path / "nowhere") is None


def test_readings_match_what_this_machine_reports() -> None:
    """An ended child and a running one have each worked for half a second."""
    before = cpu_seconds()
    work = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-S", "-c", work], check=True)
    alive = subprocess.Popen([sys.executable, "-S", "-c", f"{work}\nprint(flush=True)\ntime.sleep(60)"], stdout=-1)
    assert alive.stdout is not None
    alive.stdout.readline()
    after = cpu_seconds()
    alive.kill()
    alive.wait()
    alive.stdout.close()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(1.0, abs=0.25)
