"""Memory and processor share of an idle node agent with eight GPUs, a scraped exporter and Redis.

The agent is a process of its own, with the example policy. A stand-in (``tests/driver``) replaces NVIDIA's driver,
whose library takes further memory.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
import urllib.request
from pathlib import Path

from benchmarks.alert_storm import redis_server
from tests.driver.driver import Driver, cards
from tests.support.gpu_node import GpuNode
from tests.support.programs import ROOT

SETTLING = 5.0
"""Seconds for the start, which does not count."""


def memory(pid: int) -> dict[str, float]:
    """Return megabytes: ``VmRSS`` now, ``VmHWM`` at most, ``Pss`` with a share of shared mappings."""
    lines = (Path(f"/proc/{pid}/status").read_text() + Path(f"/proc/{pid}/smaps_rollup").read_text()).splitlines()
    found = (re.match(r"(VmRSS|VmHWM|Pss):\s+(\d+) kB", line) for line in lines)
    return {one[1]: int(one[2]) / 1024 for one in found if one}


def processor_seconds(pid: int) -> float:
    """Return used processor seconds, of ended threads too: fields 14 and 15 of proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def scrape(url: str) -> None:
    with urllib.request.urlopen(url, timeout=10) as reply:
        assert b"gpu_power_limit_watts" in reply.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--scrape-every", type=float, default=15, help="seconds, Prometheus's usual ones")
    options = parser.parse_args()
    policy = (ROOT / "packaging" / "agent" / "policy.yaml").read_text()
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name)) as url:
        driver = Driver(Path(name) / "gpus", cards(options.gpus))
        with GpuNode(Path(name) / "node", url, driver, policy) as node:
            pid, metrics = node.agent.process.pid, node.exporter()
            for _ in range(2):
                scrape(metrics)
            assert node.do("node.facts")[0] == "applied"
            time.sleep(min(SETTLING, options.seconds))
            began, used = time.monotonic(), processor_seconds(pid)
            while (left := began + options.seconds - time.monotonic()) > 0:
                time.sleep(min(options.scrape_every, left))
                scrape(metrics)
            took = time.monotonic() - began
            share = (processor_seconds(pid) - used) / took
            told, threads = memory(pid), len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
    print(
        f"idle agent: {told['VmRSS']:.1f} MB resident ({told['Pss']:.1f} MB with shared pages divided, at most"
        f" {told['VmHWM']:.1f} MB), {share * 100:.3f} % of one core ({options.gpus} GPUs, {took:.0f} s,"
        f" a scrape every {options.scrape_every:g} s, {threads} threads)"
    )


if __name__ == "__main__":
    main()
