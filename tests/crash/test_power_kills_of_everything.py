"""Alerts cap GPUs through a real server, Redis and agent, and any of these is killed meanwhile, at random moments.

Whatever dies, and for however long: no command takes effect twice, no cap outlives its lease, and in the end
every limit is back, every run is closed, and what it did is undone. The driver's own log is the judge.

``TRIALS`` in the environment says how many times it is tried, ``SEED`` repeats what was tried.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import RedisServer
from tests.driver.driver import SET_LIMIT, Driver, SetCall
from tests.integration.hasty_server import LEASE
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.live import OPEN, Server
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually

TRIALS = int(os.environ.get("TRIALS", "3"))
GPUS = 8
DEFAULT = 700.0
LEASE_SECONDS = LEASE.total_seconds()
ALIVE = 1.0
"""Seconds that an agent which lives may take to end a cap whose lease is over."""
PATIENCE = 60.0

PLAYBOOK = """
playbook: hot
on: {alert: Hot}
target: gpu
steps:
  - id: cap
    action: gpu.power_limit
    with: {watts: "{{ labels.watts | float }}"}
    timeout: 20s
    retry: {attempts: 5, delay: 100ms}
    undo: on_resolve
    on_error: continue
  - {id: cooled, wait_for: resolved, timeout: 1500ms, on_timeout: continue}
  - id: cap_harder
    when: steps.cooled.status == "timed_out"
    action: gpu.power_limit
    with: {watts: "{{ labels.harder | float }}"}
    timeout: 20s
    retry: {attempts: 5, delay: 100ms}
    undo: on_resolve
    on_error: continue
  - {id: recovered, wait_for: resolved, timeout: 1h}
"""


@dataclass
class Life:
    """When a process was there. The moments are Unix seconds, as in the driver's log."""

    deaths: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)

    def absences(self) -> list[tuple[float, float]]:
        return list(zip(self.deaths, [*self.returns, float("inf")], strict=False))

    def there_from(self, at: float) -> float:
        """The first moment from `at` on since which it was there for sure, until it died again."""
        for death, back in self.absences():
            if death - ALIVE < at < back:  # it may have died before it came to anything
                at = back
        return at


class Cluster:
    """The three processes, and what the test does to them."""

    def __init__(self, directory: Path, redis: RedisServer, driver: Driver) -> None:
        self.redis, self.driver = redis, driver
        redis.start()
        self.node = GpuNode(directory / "node", redis.url, driver, policy="allow: [gpu.power_limit]\n")
        hasty = Path(__file__).parents[1] / "integration" / "hasty_server.py"
        self.server = Server(directory / "server", PLAYBOOK, "--redis", redis.url, program=(hasty,))
        self.lives = {"agent": Life(), "server": Life(), "redis": Life()}

    def __enter__(self) -> Cluster:
        self.node.start(wait=False)
        self.server.start(TRAINMEDIC_SIGNING_KEY=KEY)
        return self

    def __exit__(self, *_: object) -> None:
        for program in (self.node.program, self.server.program):
            if program is not None:
                program.end()

    def kill(self, who: str) -> None:
        died = time.time()
        {"agent": self.node.kill, "server": self.server.kill, "redis": self.redis.kill}[who]()
        self.lives[who].deaths.append(died)

    def begin(self, who: str) -> None:
        if who == "redis":
            self.redis.start()
        elif who == "server":
            self.server.start(wait=False, TRAINMEDIC_SIGNING_KEY=KEY)
        else:
            self.node.start(wait=False)

    def came_back(self, who: str) -> None:
        """Wait until it serves."""
        if who == "server":
            eventually(lambda: self.server.ask("/health").status == 200, PATIENCE, "the server", 0.02)
        elif who == "agent":
            eventually(self._agent_is_ready, PATIENCE, "the agent", 0.02)
        self.lives[who].returns.append(time.time())

    def _agent_is_ready(self) -> bool:
        assert self.node.agent.process.poll() is None, self.node.agent.tail()
        return '"ready"' in self.node.agent.log.read_text(errors="replace")

    def insist(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Post until it is accepted, as Alertmanager does; the runs."""

        def accepted() -> Mapping[str, Any] | None:
            answer = self.server.ask("/webhook", body)
            return answer.body if answer.status == 200 else None

        return list(eventually(accepted, PATIENCE, "the webhook", 0.05)["runs"])


class Killer(threading.Thread):
    """Kills one of the processes at a random moment, perhaps once more while it starts, and brings it back."""

    def __init__(self, cluster: Cluster, who: str, chance: random.Random) -> None:
        super().__init__(name=f"killer of {who}")
        self.cluster, self.who, self.chance = cluster, who, chance
        self.error: Exception | None = None
        self.in_a_call = who == "agent" and chance.random() < 0.6
        if self.in_a_call:  # in the middle of what matters most
            cluster.driver.fail(SET_LIMIT, times=1, kill=True, after=chance.random() < 0.5, gpu=chance.randrange(GPUS))
        self.begin_after = chance.uniform(0, 0.5)
        self.away = chance.choice((0.0, chance.uniform(0, 0.5), chance.uniform(1, 1.6) * LEASE_SECONDS))
        self.again = chance.random() < 0.25

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self.error = error

    def _run(self) -> None:
        if not self.in_a_call or not self._waited_for_the_call():
            time.sleep(self.begin_after)
            self.cluster.kill(self.who)
        time.sleep(self.away)
        self.cluster.begin(self.who)
        if self.again:
            time.sleep(self.chance.uniform(0, 0.6))
            self.cluster.kill(self.who)
            self.cluster.lives[self.who].deaths.pop()  # it was not back yet
            self.cluster.begin(self.who)
        self.cluster.came_back(self.who)

    def _waited_for_the_call(self) -> bool:
        """Whether the driver has killed the agent; if no call came, it never will."""
        process = self.cluster.node.agent.process
        until = time.monotonic() + 2
        while time.monotonic() < until:
            if process.poll() is not None:
                self.cluster.lives["agent"].deaths.append(time.time())
                return True
            time.sleep(0.005)
        self.cluster.driver.heal()
        return False


def alerts(watts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """One alert for each GPU, with the limits that its run shall set."""
    fired = delivery("Hot", *map(str, range(len(watts))))
    for gpu, (alert, (cap, harder)) in enumerate(zip(fired["alerts"], watts, strict=True)):
        named = {"node": "n1", "gpu": str(gpu), "watts": str(cap), "harder": str(harder)}
        alert["labels"] = {"alertname": "Hot", **named}
    return fired


def may_have_acted(attempt: Mapping[str, Any]) -> bool:
    """A cap whose lease ran out before anybody was told of it has failed; another attempt may make it anew."""
    return attempt["status"] not in ("failed", "rejected") or "has ended since" in attempt["error"]


class Trial:
    """Every GPU gets hot, is capped, perhaps capped harder, cools, and gets its power back; the processes are killed
    as the alerts come, as they resolve, both, or in between."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self.cluster, self.chance = cluster, chance
        caps = chance.sample(range(500, 690), GPUS)
        self.watts = list(zip(caps, chance.sample(range(360, 490), GPUS), strict=True))
        self.first = len(cluster.driver.attempts())
        self.began = time.time()
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        kill_at = self.chance.choice((["cap"], ["restore"], ["cap", "restore"], ["cap stands"]))
        fired = alerts(self.watts)
        with self._killing("cap" in kill_at):
            run_ids = [run["run_id"] for run in self.cluster.insist(fired)]
            assert len(run_ids) == GPUS
        if "cap stands" in kill_at:
            time.sleep(self.chance.uniform(0.5, 1) * LEASE_SECONDS)  # it has been renewed meanwhile
            with self._killing(True):
                pass
        time.sleep(self.chance.choice((0.0, self.chance.uniform(0, 1.5 * LEASE_SECONDS))))
        with self._killing("restore" in kill_at):
            self.cluster.insist(resolved(fired))
        runs = eventually(lambda: self._ended(run_ids), PATIENCE, "every run closed, and undone", 0.1)
        eventually(self._is_given_back, PATIENCE, "the limits from before", 0.02)
        self._judge(runs)

    @contextmanager
    def _killing(self, kills: bool) -> Iterator[None]:
        """Kill one, two or all of them meanwhile; they are back when this is over."""
        victims = self.chance.sample(sorted(self.cluster.lives), self.chance.choice((1, 1, 2, 3))) if kills else []
        killers = [Killer(self.cluster, who, random.Random(self.chance.random())) for who in victims]
        for killer in killers:
            killer.start()
        try:
            yield
        finally:
            for killer in killers:
                killer.join()
        for killer in killers:
            if killer.error is not None:
                raise AssertionError(f"{killer.name}: {killer.error}") from killer.error

    def _ended(self, run_ids: Sequence[str]) -> list[dict[str, Any]] | None:
        runs = [self.cluster.server.run(run_id) for run_id in run_ids]
        return runs if all(run["status"] not in OPEN and not run["owes_undo"] for run in runs) else None

    def _is_given_back(self) -> bool:
        return all(self.cluster.driver.watts(gpu) == DEFAULT for gpu in range(GPUS))

    # --- the judgement --------------------------------------------------------------------------------

    def _judge(self, runs: Sequence[Mapping[str, Any]]) -> None:
        calls = self.cluster.driver.attempts()[self.first :]
        by_gpu = {int(run["alerts"][0]["labels"]["gpu"]): run for run in runs}
        for gpu in range(GPUS):
            of_gpu = [call for call in calls if call.gpu == gpu]
            self._judge_gpu(by_gpu[gpu], of_gpu, self.watts[gpu])

    def _judge_gpu(self, run: Mapping[str, Any], calls: Sequence[SetCall], watts: tuple[int, int]) -> None:
        away = {who: [(d, b) for d, b in life.absences() if b > self.began] for who, life in self.cluster.lives.items()}
        told = f"{[(round(call.at, 3), call.pid, call.watts) for call in calls]}, away: {away}, {run}"
        before = [DEFAULT, *(call.watts for call in calls)]
        assert all(call.code == 0 and call.watts != last for call, last in zip(calls, before, strict=False)), told
        lowered = Counter(call.watts for call, last in zip(calls, before, strict=False) if call.watts < last)
        raised = Counter(call.watts for call, last in zip(calls, before, strict=False) if call.watts > last)
        assert lowered.keys() <= set(map(float, watts)), told
        assert raised.keys() <= {DEFAULT, float(watts[0])}, told
        for step, limit in zip((one for one in run["steps"] if one["action"]), watts, strict=True):
            commands = {one["command_id"] for one in step["attempts"] if may_have_acted(one)}
            assert lowered[limit] <= len(commands) + self._set_again(run, step["id"], away["server"]), told
            if step["status"] == "succeeded":
                assert lowered[limit] >= 1, told
                assert step["undo"]["status"] == "done", told
            self.seen[f"{step['id']} {step['status']}"] += 1
        assert run["status"] in ("succeeded", "failed"), told
        self._judge_leases(
            calls, [call.at for call, last in zip(calls, before, strict=False) if call.watts < last], told
        )

    def _set_again(self, run: Mapping[str, Any], step: str, away: Sequence[tuple[float, float]]) -> int:
        """How often the caps of a step may have been set again: as often as that was begun; and once more after each
        absence of the server that such a cap may not have outlived, for then the same intent is carried on."""
        begun = [e for e in run["events"] if e["kind"] == "set_again_started" and e["data"]["step"] == step]
        self.seen["set again"] += len(begun)
        return len(begun) + (sum(back - death > LEASE_SECONDS / 2 for death, back in away) if begun else 0)

    def _judge_leases(self, calls: Sequence[SetCall], lowered_at: Sequence[float], told: str) -> None:
        """While the server or Redis was away for long enough, no cap stood longer than its lease."""
        lives = self.cluster.lives
        for death, back in (*lives["server"].absences(), *lives["redis"].absences()):
            capped_at = max((at for at in lowered_at if at < back), default=None)
            if capped_at is None:
                continue
            by = lives["agent"].there_from(max(capped_at, death) + LEASE_SECONDS) + ALIVE
            if by < back:
                assert [DEFAULT, *(call.watts for call in calls if call.at <= by)][-1] == DEFAULT, told
                self.seen["leases that ran out"] += 1


def test_kills_of_any_process_repeat_no_command_and_prolong_no_cap(
    tmp_path: Path, own_redis: type[RedisServer], make_driver: Callable[..., Driver]
) -> None:
    """Agent, server and Redis, one or several at once, while alerts cap GPUs in two stages and resolve."""
    seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
    seen: Counter[str] = Counter()
    with Cluster(tmp_path, own_redis(tmp_path), make_driver(GPUS)) as cluster:
        for trial in range(TRIALS):
            one = Trial(cluster, random.Random(f"{seed}/{trial}"))
            try:
                one.run()
            except AssertionError as error:
                agent, server = cluster.node.agent.tail(20), cluster.server.program.tail(20)  # type: ignore[union-attr]
                raise AssertionError(f"trial {trial}, SEED={seed}: {error}\n{agent}\n{server}") from error
            seen += one.seen
    print(f"{TRIALS} trials, SEED={seed}: {dict(seen)}")
