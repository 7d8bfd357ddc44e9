"""What can go wrong: each fault is done to the cluster and taken back, and lasts a random time in between.

A fault is a function of the cluster and a source of random numbers that returns when all is as before, but for what
has to recover by itself. Each belongs to one part, so that faults of two parts can come at once.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from tests.attack.chaos.cluster import JOBS, PATIENCE, Cluster
from tests.attack.effort import trials
from tests.driver.driver import SET_LIMIT, TIMEOUT
from tests.support.programs import eventually

Fault = Callable[[Cluster, random.Random], None]
LONGEST = trials(4, 10)
"""Seconds: longer than the lease of a power cap, so that some leases run out."""

JUMPS = (-7200, -60, 60, 7200, 100 * 24 * 3600)
"""Seconds."""


def pause(chance: random.Random) -> None:
    """As long as a fault lasts: often a moment, sometimes longer than a lease."""
    time.sleep(chance.choice((0.0, chance.uniform(0, 0.5), chance.uniform(0, LONGEST))))


# --- processes --------------------------------------------------------------------------------------------


def kill(name: str, cluster: Cluster, chance: random.Random) -> None:
    """SIGKILL; sometimes once more while it starts."""
    with cluster.left_down(name):
        process = cluster.program(name).process
        process.kill()
        process.wait()
        pause(chance)
    if chance.random() < 0.3:
        starting = eventually(lambda: _other(cluster, name, process.pid), PATIENCE, f"{name} is started again", 0.02)
        time.sleep(chance.uniform(0, 1))
        starting.kill()


def _other(cluster: Cluster, name: str, pid: int) -> Any:
    process = cluster.program(name).process
    return process if process.pid != pid else None


def stop(name: str, cluster: Cluster, chance: random.Random) -> None:
    """SIGSTOP, as a machine that swaps, then SIGCONT."""
    process = cluster.program(name).process
    process.send_signal(signal.SIGSTOP)
    pause(chance)
    process.send_signal(signal.SIGCONT)


def terminate(name: str, cluster: Cluster, chance: random.Random) -> None:
    """SIGTERM, as for an upgrade."""
    with cluster.left_down(name):
        process = cluster.program(name).process
        process.terminate()
        process.wait(PATIENCE)
        pause(chance)


def fill_the_disk(cluster: Cluster, chance: random.Random) -> None:
    """The disk on which server and agent keep their state."""
    cluster.disk.fill()
    pause(chance)
    cluster.disk.free()


def move_the_clock(cluster: Cluster, chance: random.Random) -> None:
    """The wall clock of one machine jumps, and is put right again."""
    clock = cluster.clocks[chance.choice(sorted(cluster.clocks))]
    clock.set(timedelta(seconds=chance.choice(JUMPS)))
    pause(chance)
    clock.set(timedelta(0))


def fail_the_driver(cluster: Cluster, chance: random.Random) -> None:
    """Setting a limit fails, takes long, or kills the agent before or after it has taken effect."""
    kind = chance.choice(("error", "slow", "kill"))
    how: Mapping[str, Any] = {
        "error": {"code": TIMEOUT, "times": chance.randrange(1, 4)},
        "slow": {"times": 1, "delay": chance.uniform(0, LONGEST)},
        "kill": {"times": 1, "kill": True, "after": chance.random() < 0.5},
    }[kind]
    cluster.driver.fail(SET_LIMIT, **how)
    pause(chance)
    cluster.driver.heal()


# --- Redis ------------------------------------------------------------------------------------------------


def kill_redis(cluster: Cluster, chance: random.Random) -> None:
    cluster.redis.kill()
    pause(chance)
    cluster.redis.start()


def stop_redis(cluster: Cluster, chance: random.Random) -> None:
    assert cluster.redis.process is not None
    cluster.redis.process.send_signal(signal.SIGSTOP)
    pause(chance)
    cluster.redis.process.send_signal(signal.SIGCONT)


def empty_redis(cluster: Cluster, chance: random.Random) -> None:
    cluster.flush()


@contextmanager
def _configured(cluster: Cluster, name: str, value: int) -> Iterator[None]:
    cluster.insistently(f"{name} is set", lambda client: client.config_set(name, value))
    try:
        yield
    finally:
        cluster.insistently(f"{name} is back", lambda client: client.config_set(name, 0))


def fill_redis(cluster: Cluster, chance: random.Random) -> None:
    """Every write is refused for want of memory."""
    with _configured(cluster, "maxmemory", 1):
        pause(chance)


def make_redis_read_only(cluster: Cluster, chance: random.Random) -> None:
    """Every write is refused for want of replicas."""
    with _configured(cluster, "min-replicas-to-write", 1):
        pause(chance)


def slow_redis(cluster: Cluster, chance: random.Random) -> None:
    """It answers nobody for a while, but takes what is sent."""
    milliseconds = int(chance.uniform(100, LONGEST * 1000))
    cluster.insistently("Redis pauses", lambda client: client.client_pause(milliseconds, all=True))
    time.sleep(milliseconds / 1000)


def cut_redis(cluster: Cluster, chance: random.Random) -> None:
    """Every connection ends."""
    cluster.insistently("connections are cut", lambda client: client.client_kill_filter(_type="normal", skipme=True))


# --- PostgreSQL -------------------------------------------------------------------------------------------


def cut_postgresql(cluster: Cluster, chance: random.Random) -> None:
    assert cluster.postgres is not None
    cluster.postgres.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")


def crash_postgresql(cluster: Cluster, chance: random.Random) -> None:
    """It ends without a checkpoint, and recovers from its log."""
    assert cluster.postgres is not None
    cluster.postgres.stop(signal.SIGQUIT)
    pause(chance)
    cluster.postgres.start()


def restart_postgresql(cluster: Cluster, chance: random.Random) -> None:
    assert cluster.postgres is not None
    cluster.postgres.stop(signal.SIGINT)
    pause(chance)
    cluster.postgres.start()


def make_postgresql_read_only(cluster: Cluster, chance: random.Random) -> None:
    """As a database that was switched over to a standby. It also holds for sessions that there are."""
    postgres = cluster.postgres
    assert postgres is not None
    postgres.ask("ALTER SYSTEM SET default_transaction_read_only = on")
    postgres.ask("SELECT pg_reload_conf()")
    try:
        pause(chance)
    finally:
        postgres.ask("ALTER SYSTEM RESET default_transaction_read_only")
        postgres.ask("SELECT pg_reload_conf()")


def stop_postgresql(cluster: Cluster, chance: random.Random) -> None:
    """The sessions of the server hang."""
    assert cluster.postgres is not None
    ask = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    pids = [int(pid) for (pid,) in cluster.postgres.ask(ask)]
    _signal_all(pids, signal.SIGSTOP)
    pause(chance)
    _signal_all(pids, signal.SIGCONT)


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # its client has gone


def _on_processes(*names: str) -> dict[str, Fault]:
    return {f"{act.__name__} {name}": partial(act, name) for name in names for act in (kill, stop, terminate)}


ON_REDIS: Mapping[str, Fault] = {
    act.__name__.replace("_", " "): act
    for act in (kill_redis, stop_redis, empty_redis, fill_redis, make_redis_read_only, slow_redis, cut_redis)
}
ON_POSTGRESQL: Mapping[str, Fault] = {
    act.__name__.replace("_", " "): act
    for act in (
        cut_postgresql,
        crash_postgresql,
        restart_postgresql,
        make_postgresql_read_only,
        stop_postgresql,
    )
}


def faults(with_postgresql: bool) -> dict[str, dict[str, Fault]]:
    """The faults by part: what one part does to itself never comes at once with another of the same."""
    parts = {
        "server": _on_processes("server"),
        "agent": _on_processes("agent"),
        "jobs": _on_processes(*JOBS),
        "redis": dict(ON_REDIS),
        "disk": {"fill the disk": fill_the_disk},
        "driver": {"fail the driver": fail_the_driver},
        "clock": {"move the clock": move_the_clock},
    }
    if with_postgresql:
        parts["postgresql"] = dict(ON_POSTGRESQL)
    return parts
