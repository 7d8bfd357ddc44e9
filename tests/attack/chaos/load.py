"""The alerts of the chaos: each of a few targets has one after the other, sent as Alertmanager sends them.

A delivery is sent again until it is answered 200, sometimes twice although it was, and what was answered 200 is
noted: it must be kept. Not here: whether it was (``promises``).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.attack.chaos.cluster import GPUS, JOBS, PATIENCE, Cluster
from tests.support.live import OPEN
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually

_WATTS = (360.0, 690.0)


@dataclass(frozen=True)
class Accepted:
    """One alert of a delivery that was answered 200."""

    fingerprint: str
    starts_at: str
    is_resolved: bool
    run_ids: tuple[str, ...]


@dataclass
class Load:
    """Everything that sends alerts, each in a thread, until `stop`."""

    cluster: Cluster
    chance: random.Random
    accepted: list[Accepted] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        targets: list[tuple[str, Callable[[random.Random, int], dict[str, Any]]]] = [
            *((f"gpu-{gpu}", lambda chance, n, gpu=gpu: self._hot(chance, n, gpu)) for gpu in range(GPUS)),
            *((job, lambda chance, n, job=job: self._spike(chance, n, job)) for job in JOBS),
        ]
        for name, make in targets:
            chance = random.Random(self.chance.random())
            thread = threading.Thread(
                daemon=True, target=self._carefully, args=(make, chance), name=f"alerts of {name}"
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Let each alert that has fired resolve; then it is quiet."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _carefully(self, make: Callable[[random.Random, int], dict[str, Any]], chance: random.Random) -> None:
        try:
            for number in self._numbers():
                self._go_through(make(chance, number), chance)
        except Exception as error:
            self.failures.append(f"{threading.current_thread().name}: {error!r}")

    def _numbers(self) -> Iterator[int]:
        number = 0
        while not self._over.is_set():
            yield number
            number += 1

    # --- the alerts ---------------------------------------------------------------------------------------

    def _hot(self, chance: random.Random, number: int, gpu: int) -> dict[str, Any]:
        """Every cap has a limit of its own, so that the driver's log tells whose it was."""
        low, high = sorted(round(chance.uniform(*_WATTS), 3) for _ in range(2))
        fired = delivery("Hot", f"{gpu}-{number}")
        named = {"node": self.cluster.node.name, "gpu": str(gpu), "watts": str(high), "harder": str(low)}
        fired["alerts"][0]["labels"] = {"alertname": "Hot", **named}
        return fired

    def _spike(self, chance: random.Random, number: int, job: str) -> dict[str, Any]:
        fired = delivery(chance.choice(["Spike", "Spike", "Slow", "Odd", "Seen"]), job)
        fired["alerts"][0]["fingerprint"] += f"-{number}"
        return fired

    # --- sending ------------------------------------------------------------------------------------------

    def _go_through(self, fired: dict[str, Any], chance: random.Random) -> None:
        (run_id,) = self._send(fired)
        if fired["alerts"][0]["labels"]["alertname"] == "Odd" and chance.random() < 0.7:
            self._approve(run_id)
        time.sleep(chance.uniform(0, 3))
        if chance.random() < 0.2:
            self._send(fired)  # the other Alertmanager of a pair, or the repeat interval
        gone = resolved(fired)
        self._send(gone)
        if chance.random() < 0.2:
            self._send(gone)
        until = time.monotonic() + 20
        while time.monotonic() < until and not self._is_over(run_id) and not self._over.is_set():
            time.sleep(0.2)

    def _send(self, body: Mapping[str, Any]) -> tuple[str, ...]:
        """Post until it is accepted; the ids of the runs that it led to."""

        def accepted() -> Mapping[str, Any] | None:
            answer = self.cluster.server.ask("/webhook", body, timeout=10)
            assert answer.status in (0, 200, 503), answer  # only these make an Alertmanager try again
            return answer.body if answer.status == 200 else None

        answer = eventually(accepted, PATIENCE * 2, "the webhook", 0.2)
        run_ids = tuple(run["run_id"] for run in answer["runs"])
        for alert in body["alerts"]:
            is_resolved = alert["status"] == "resolved"
            self.accepted.append(Accepted(alert["fingerprint"], alert["startsAt"], is_resolved, run_ids))
        return run_ids

    def _approve(self, run_id: str) -> None:
        """As a person who tries for a few seconds."""
        until = time.monotonic() + 5
        while time.monotonic() < until:
            if self.cluster.server.ask(f"/runs/{run_id}/approve", {}, timeout=5).status == 200:
                return
            time.sleep(0.2)

    def _is_over(self, run_id: str) -> bool:
        run = self.cluster.server.ask(f"/history/{run_id}", timeout=5)
        return run.status == 200 and run.body["status"] not in OPEN and not run.body["owes_undo"]
