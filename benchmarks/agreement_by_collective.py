"""Gain and loss if a job's ranks agreed by a collective instead of through their shared store.

`ByCollective` is a prototype: on a gloo group of its own, rank 0 broadcasts the commands at each sync point. Both ways
run in the same processes: idle and with commands within the same steps, then one after the other with a rank that is
late, ends early, calls at another pace, or dies. A step is a sleep. Printed is the rank delayed longest, except the one
that a case concerns.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainmedic
import trainmedic.distributed
from tests.conftest import RedisServer
from tests.support.command_sender import Commander

STEP, SECOND = 0.005, 200  # seconds of a step, and how many of them make a second
STEPS, EVERY, PATIENCE = 100, 20, 0.5  # of a case: its steps, those between two sync points, seconds to wait for a rank
ACTION, COMMANDS_EVERY, WAYS = "job.scale_lr", 50, ("store", "collective")


class ByCollective:
    """Prototype: every ``every`` calls, all ranks execute rank 0's ``pending`` commands."""

    def __init__(self, every: int) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))
        self._every, self._calls, self.pending = every, 0, ""

    def commands(self, step: int) -> bool:
        """Return whether a command was executed on all ranks; on none if they are at different steps."""
        self._calls += 1
        if (self._calls - 1) % self._every:
            return False
        size = torch.tensor(len(self.pending))
        dist.broadcast(size, 0, group=self._group)
        if not size:
            return False
        command = torch.tensor(list(self.pending.encode()) or [0] * int(size), dtype=torch.uint8)
        dist.broadcast(command, 0, group=self._group)
        steps = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(steps, torch.tensor(step), group=self._group)
        self.pending = ""
        return len({int(each) for each in steps}) == 1


class ByStore:
    def __init__(self, every: int, url: str, job: str) -> None:
        self.medic = trainmedic.connect(job, redis_url=url, rank=dist.get_rank(), world_size=dist.get_world_size())
        self.carried_out: list[trainmedic.JobCommand] = []
        self.medic.on(ACTION)(self.carried_out.append)
        trainmedic.distributed.share(self.medic, every=every, patience=PATIENCE, call_patience=PATIENCE)

    def commands(self, step: int) -> bool:
        before = len(self.carried_out)
        self.medic.commands(step)
        return len(self.carried_out) > before


def idle(url: str, seconds: float) -> dict[str, list[float]]:
    """Return the seconds of each call, by way and by calls between two sync points; all ways take turns within the same
    steps.
    """
    ways: dict[str, Any] = {}
    for every in (SECOND, 1):
        ways |= {f"store {every}": ByStore(every, url, f"idle-{every}"), f"collective {every}": ByCollective(every)}
    for way in ways.values():
        way.commands(0)
    commander = Commander(url, "idle-1") if dist.get_rank() == 0 else None
    taken: dict[str, list[float]] = {name: [] for name in (*ways, "store command", "collective command")}
    for step in range(1, int(seconds * SECOND) + 1):
        time.sleep(STEP)
        if commander is not None and step % COMMANDS_EVERY == 0:
            commander.send(ACTION, factor=0.5)
            ways["collective 1"].pending = ACTION
        dist.all_reduce(torch.ones(1000))  # as the training does: all ranks begin together
        for name in [*list(ways)[step % len(ways) :], *list(ways)[: step % len(ways)]]:
            began = time.perf_counter()
            has_command = ways[name].commands(step)
            taken[f"{name.split()[0]} command" if has_command else name].append(time.perf_counter() - began)
    dist.barrier()
    for every in (SECOND, 1):
        ways[f"store {every}"].medic.close()
    return taken


def train(
    way: Any, steps: int = STEPS, late: float = 0.0, stride: int = 1, dies: bool = False, batches: int = 0
) -> tuple[float, float, str]:
    """Return seconds in the calls, seconds in all, and the error that ended the calls.

    With ``batches`` the ranks meet once in so many steps, each of random duration.
    """
    chance, began, held, error = random.Random(dist.get_rank()), time.perf_counter(), 0.0, ""
    for step in range(1, steps + 1):
        time.sleep((chance.expovariate(1 / STEP) if batches else STEP) + (late if step == STEPS // 3 else 0.0))
        if dies and step == STEPS // 3:
            os._exit(0)
        if step % stride == 0 and not error:
            called = time.perf_counter()
            try:
                way.commands(step)
            except RuntimeError as fault:
                error = f", then {type(fault).__name__} at step {step}"
            held += time.perf_counter() - called
        if batches and step % batches == 0:
            dist.all_reduce(torch.ones(1000))
    return held, time.perf_counter() - began, error


def cases(last: int) -> dict[str, tuple[int, dict[str, Any], dict[str, Any]]]:
    """Return the settings of one rank and of all, by case. From the last case one rank does not return."""
    return {
        "tied at each step, the last rank late by 0.4 s": (last, {"late": 0.4}, {"batches": 1}),
        "tied at each 8th, nobody late": (-1, {}, {"batches": 8}),
        "tied at each 8th, nobody late, sync points at each step": (-1, {}, {"batches": 8, "every": 1}),
        "the last rank late by 0.05 s": (last, {"late": 0.05}, {}),
        "rank 0 in a checkpoint for 0.4 s": (0, {"late": 0.4}, {}),
        "the last rank in a checkpoint for 0.4 s": (last, {"late": 0.4}, {}),
        "rank 0 out of data": (0, {"steps": STEPS // 2}, {}),
        "the last rank out of data": (last, {"steps": STEPS // 2}, {}),
        "the last rank calls at every other step": (last, {"stride": 2}, {}),
        "the last rank dies": (last, {"dies": True}, {}),
    }


def run_rank(rank: int, world: int, port: int, url: str, seconds: float, results: Any) -> None:
    """Measure everything on one rank, in the same order on each."""
    logging.getLogger("trainmedic").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    results.put((rank, "idle", idle(url, seconds)))
    for number, (name, (odd, fault, common)) in enumerate(cases(world - 1).items()):
        every = common.pop("every", EVERY)
        by_store, by_collective = ByStore(every, url, f"case-{number}"), ByCollective(every)
        outcomes: list[Any] = []
        by_store.commands(0)  # the first sync point, for which the ranks have to find each other
        by_collective.commands(0)
        for way in (by_store, by_collective):
            if not ("dies" in fault and outcomes):  # then a barrier would wait for a rank that is dead
                dist.barrier()
            outcomes.append(train(way, **common, **(fault if rank == odd else {})))
        results.put((rank, name, outcomes))
        if "dies" not in fault:
            dist.barrier()
            by_store.medic.close()
    results.close()
    results.join_thread()
    os._exit(0)  # a group that has lost a rank does not end in order


def measure(world: int, url: str, seconds: float) -> dict[str, dict[int, Any]]:
    """Return the figures of each rank, by case."""
    # The store is in this process, as under torchrun it is in the launcher's: it outlives every rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (world, store.port, url, seconds, results)
    processes = [context.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    figures: dict[str, dict[int, Any]] = {}
    for _ in range(world * (1 + len(cases(world - 1))) - 1):  # one does not tell of its death
        rank, name, outcome = results.get(timeout=60)
        figures.setdefault(name, {})[rank] = outcome
    return figures


def tell(world: int, figures: dict[str, dict[int, Any]]) -> None:
    print(f"{world} ranks, by collective over by store:")
    for name, kind, middle in (
        ("a step, sync points once a second", SECOND, statistics.fmean),
        ("a step, sync points at each", 1, statistics.median),
        ("a sync point with a command", "command", statistics.median),
    ):
        taken = {way: max(middle(each[f"{way} {kind}"]) for each in figures["idle"].values()) for way in WAYS}
        ratio = taken["collective"] / taken["store"]
        print(f"  {name}: {ratio:.2f} x, {taken['store'] * 1e6:,.0f} and {taken['collective'] * 1e6:,.0f} us")
    for name, (odd, _, _) in cases(world - 1).items():
        rest = [outcomes for rank, outcomes in figures[name].items() if rank != odd]
        (held, total, _), (held_by_it, total_by_it, error) = (max(each[way] for each in rest) for way in (0, 1))
        print(f"  {name}: {total_by_it / total:.2f} x, held up for {held:.3f} and {held_by_it:.3f} s{error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=2.5, help="for how long the cost of a step is measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory))
        server.start()
        try:
            for world in options.ranks:
                tell(world, measure(world, server.url, options.seconds))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
