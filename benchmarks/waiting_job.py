"""A training job that only counts steps, and prints when each of its commands reached the loop.

Started by ``receipt_to_handler`` with the job's name and the length of a step in seconds.
"""

from __future__ import annotations

import sys
import time

import trainmedic


def main() -> None:
    job, step_seconds = sys.argv[1], float(sys.argv[2])
    medic = trainmedic.connect(job=job)
    step = 0
    print("ready", flush=True)
    while True:
        step += 1
        time.sleep(step_seconds)
        for command in medic.commands(step):
            at = time.time()
            command.applied()
            print(f"{at:.6f}", flush=True)


if __name__ == "__main__":
    main()
