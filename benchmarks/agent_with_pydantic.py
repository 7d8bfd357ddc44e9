"""Cost of pydantic for the node agent: resident memory and processor time at start, with and without it.

Each measurement is an interpreter of its own that imports the agent's command, and may build the model that the agent's
settings would be. `docs/decisions.md` quotes the result.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from tests.support.programs import PYTHON_PATH

AGENT = "import trainmedic_agent.cli.agent"
MODEL = """
from pathlib import Path
import pydantic
class Settings(pydantic.BaseModel):
    node: str = pydantic.Field(min_length=1, max_length=253)
    policy: Path | None = None
    redis: str | None = None
    signing_key: bytes | None = None
    state_dir: Path
    exporter_host: str
    exporter_port: int = pydantic.Field(ge=0, le=65535)
    log_level: str
Settings(node="n1", state_dir="/tmp", exporter_host="127.0.0.1", exporter_port=9445, log_level="info")
"""
REPORT = """
import re, time
print(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1], time.process_time())
"""


def measured(program: str, runs: int) -> tuple[float, float]:
    """Return medians of many starts: resident megabytes, and milliseconds of processor time."""
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "-c", program + REPORT]
    outputs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(runs)
    ]
    kilobytes, seconds = zip(*(map(float, output.split()) for output in outputs), strict=True)
    return statistics.median(kilobytes) / 1024, statistics.median(seconds) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    memory, start = measured(AGENT, runs)
    memory_with, start_with = measured(AGENT + MODEL, runs)
    print(
        f"agent's imports: {memory:.1f} MB, {start:.0f} ms; with pydantic {memory_with:.1f} MB, {start_with:.0f} ms:"
        f" {memory_with - memory:.1f} MB ({100 * (memory_with / memory - 1):.0f} %) and"
        f" {start_with - start:.0f} ms ({100 * (start_with / start - 1):.0f} %) more"
    )


if __name__ == "__main__":
    main()
