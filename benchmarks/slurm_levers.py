"""Seconds from an alert on a broken node to the training's next step without it, for each way to move a Slurm job.

``python -m benchmarks.slurm_levers`` as root, with Slurm 24.11 and 26.05 from ``scripts/fetch-slurm``. The training is
small and starts at once; a real one adds its own start and the steps since its checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.support.slurm_repair import LEVERS, repaired


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lever", choices=LEVERS, action="append", help="Only this one; repeatable.")
    given = options.parse_args()
    print(f"{'lever':<12} {'Slurm':<6} {'seconds':>8} {'lost steps':>11}")
    for lever in LEVERS.values():
        for release in lever.releases if not given.lever or lever.name in given.lever else ():
            with tempfile.TemporaryDirectory() as directory:
                repair = repaired(lever, release, Path(directory) / "work")
            print(f"{lever.name:<12} {release:<6} {repair.seconds:>8.1f} {repair.lost_steps:>11}", flush=True)


if __name__ == "__main__":
    main()
