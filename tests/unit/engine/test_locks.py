"""One change at a time per target."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmedic_server.domain.target import Target, TargetKind
from trainmedic_server.engine.locks import TargetLocks
from trainmedic_server.simulation import virtual_time

CLUSTER = Target(TargetKind.CLUSTER)
NODE = Target(TargetKind.NODE, node="n1")
GPU = Target(TargetKind.GPU, node="n1", gpu="GPU-a")
SAME_BY_INDEX = Target(TargetKind.GPU, node="n1", gpu="0")
OTHER_GPU = Target(TargetKind.GPU, node="n1", gpu="GPU-b")
JOB = Target(TargetKind.JOB, job="llm")


@pytest.mark.parametrize(
    ("held", "wanted", "free"),
    [
        (GPU, GPU, False),
        (GPU, OTHER_GPU, True),
        (GPU, SAME_BY_INDEX, False),
        (NODE, GPU, False),
        (GPU, NODE, False),
        (NODE, JOB, True),
        (CLUSTER, JOB, False),
        (JOB, CLUSTER, False),
    ],
)
async def test_a_node_covers_its_gpus_and_the_cluster_everything(held: Target, wanted: Target, free: bool) -> None:
    """Two GPUs of one node that are named in different ways cannot be told apart, so they exclude each other."""
    locks = TargetLocks()
    assert locks.try_acquire("first", held)
    assert locks.try_acquire("second", wanted) is free


async def test_who_came_first_goes_first() -> None:
    """A late GPU does not overtake the node that waits for its neighbour."""
    locks = TargetLocks()
    assert locks.try_acquire("gpu", GPU)
    node = locks.wait("node", NODE)
    assert not locks.try_acquire("other", OTHER_GPU)
    other = locks.wait("other", OTHER_GPU)
    locks.release("gpu")
    assert (node.done(), other.done()) == (True, False)
    locks.release("node")
    assert other.done()


async def test_what_is_passed_on_is_never_free_in_between() -> None:
    """Who waits gets it only once the run that it was held for is done."""
    locks = TargetLocks()
    assert locks.try_keep("admission", GPU)
    assert locks.holder(GPU) is None, "no run has it"
    node = locks.wait("node", NODE)
    locks.pass_on("admission", "run")
    locks.release("admission")
    assert (locks.holder(GPU), node.done()) == ("run", False)
    assert locks.try_acquire("run", GPU), "it has it"
    locks.release("run")
    assert node.done()


async def test_leaving_the_queue_lets_those_behind_go_on() -> None:
    """A waiter that gives up holds nobody back."""
    locks = TargetLocks()
    assert locks.try_acquire("gpu", GPU)
    locks.wait("node", NODE)
    other = locks.wait("other", OTHER_GPU)
    locks.release("node")
    assert other.done()


async def test_an_undo_waits_for_the_attempt_in_flight_and_no_longer() -> None:
    """It takes no lock, so a run that holds the target for hours does not hold it back."""
    locks = TargetLocks()
    assert locks.try_acquire("run", GPU)
    order: list[str] = []

    async def act(name: str, seconds: float) -> None:
        async with locks.acting(name, GPU):
            order.append(f"{name} begins")
            await asyncio.sleep(seconds)
            order.append(f"{name} ends")

    await asyncio.gather(act("attempt", 10), act("undo", 1))
    assert order == ["attempt begins", "attempt ends", "undo begins", "undo ends"]


async def test_giving_back_costs_no_more_where_thousands_wait_elsewhere() -> None:
    """A storm in which two playbooks want each target: only those who wait near by are looked at."""
    looked = 0

    class Counting(Target):
        def overlaps(self, other: Target) -> bool:
            nonlocal looked
            looked += 1
            return super().overlaps(other)

    locks = TargetLocks()
    for number in range(2000):
        locks.try_acquire(f"holder-{number}", Counting(TargetKind.NODE, node=f"n{number}"))
        locks.wait(f"waiter-{number}", Counting(TargetKind.NODE, node=f"n{number}"))
    looked = 0
    locks.release("holder-1000")
    assert looked < 10


TARGETS = st.sampled_from(
    [
        CLUSTER,
        NODE,
        GPU,
        SAME_BY_INDEX,
        OTHER_GPU,
        JOB,
        Target(TargetKind.GPU, node="n2", gpu="GPU-a"),
    ]
)


MOVES = st.sampled_from(["take", "give back", "keep", "pass on", "let go"])


@given(st.lists(st.tuples(MOVES, TARGETS), max_size=40))
def test_no_two_holders_ever_overlap_and_nobody_waits_for_nothing(moves: list[tuple[str, Target]]) -> None:
    """Over any order of taking and giving back, and of keeping for a run that is then admitted or not."""

    async def play() -> None:
        locks = TargetLocks()
        held: dict[str, Target] = {}
        kept: dict[str, Target] = {}
        refused: dict[str, Target] = {}
        queue: dict[str, tuple[Target, asyncio.Future[None]]] = {}
        for number, (move, target) in enumerate(moves):
            run, keeper = f"run-{number}", f"keeper-{number}"
            if move == "take" and locks.try_acquire(run, target):
                held[run] = target
            elif move == "take":
                queue[run] = (target, locks.wait(run, target))
            elif move == "give back" and held:
                locks.release(run := next(iter(held)))
                del held[run]
            elif move == "keep":
                ahead = [*held.values(), *kept.values(), *refused.values(), *(wanted for wanted, _ in queue.values())]
                is_free = not any(target.overlaps(other) for other in ahead)
                assert locks.try_keep(keeper, target) is is_free
                (kept if is_free else refused)[keeper] = target
            elif move == "pass on" and kept:
                locks.pass_on(keeper := next(iter(kept)), run)
                held[run] = kept.pop(keeper)
            elif move == "let go" and (kept or refused):
                locks.release(keeper := next(iter(kept or refused)))
                del (kept or refused)[keeper]
            for run, (wanted, granted) in list(queue.items()):
                if granted.done():
                    held[run] = wanted
                    del queue[run]
            claims = [*held.values(), *kept.values()]
            assert not any(a.overlaps(b) for at, a in enumerate(claims) for b in claims[at + 1 :])
            named = locks.holder(target)
            assert (named in held) if any(target.overlaps(other) for other in held.values()) else (named is None)
            for wanted, _ in queue.values():
                assert any(wanted.overlaps(other) for other in claims)
                claims = [*claims, wanted]

    virtual_time.run(play())
