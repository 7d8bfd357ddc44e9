"""A training job of one rank as a program for tests. It says that it works on the GPU that ``GPU`` names, as a
rank does that has CUDA; notes each checkpoint as a line in ``checkpoints``; and ends with SIGTERM. With
``METRICS_PORT`` it reports its steps and an evaluation, and offers metrics there.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import trainmedic


class Store:
    """What ranks share, for one rank: the four calls, as PyTorch's stores answer them."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self._kept[key] = value

    def add(self, key: str, amount: int, /) -> int:
        self._kept[key] = str(int(self._kept.get(key, "0")) + amount)
        return int(self._kept[key])

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        present = self._kept.get(key)
        if present == expected or (present is None and expected == ""):
            self._kept[key] = desired
        return self._kept.get(key, expected).encode()

    def delete_key(self, key: str, /) -> bool:
        return self._kept.pop(key, None) is not None


def main() -> None:
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    port = int(os.environ["METRICS_PORT"]) if "METRICS_PORT" in os.environ else None
    with (
        trainmedic.connect(rank=0, world_size=1, metrics_port=port) as medic,
        Path("checkpoints").open("a", buffering=1) as log,
    ):

        @medic.on("job.checkpoint")
        def save(command: trainmedic.JobCommand) -> dict[str, Any]:
            log.write(f"{command.id}\n")
            return {"step": medic.step}

        medic.join_ranks(Store(), lambda: os.environ["GPU"], every=1, patience=10.0, call_patience=10.0)
        for step in itertools.count():
            if port is not None:
                medic.report(step=step, loss=2.0, samples=8)
                if step == 20:
                    medic.report_evaluation(accuracy=0.625, **{"mmlu/acc": float("nan")})
            medic.commands(step)
            if over.wait(0.01):
                break


if __name__ == "__main__":
    main()
