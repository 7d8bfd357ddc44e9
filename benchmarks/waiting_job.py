"""Training job that only counts steps, and prints when each command reached the loop.

``receipt_to_handler`` starts it with the job's name and the length of a step in seconds.
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
