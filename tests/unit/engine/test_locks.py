"""One change at a time per target."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.claim import Claim
from trainmedic_server.domain.topology import AgentTopology
from trainmedic_server.engine.locks import TargetLocks
from trainmedic_server.simulation import virtual_time

CLUSTER = Claim(Target(TargetKind.CLUSTER))
NODE = Claim(Target(TargetKind.NODE, node="n1"))
GPU = Claim(Target(TargetKind.GPU, node="n1", gpu="GPU-a"))
SAME_BY_INDEX = Claim(Target(TargetKind.GPU, node="n1", gpu="0"))
OTHER_GPU = Claim(Target(TargetKind.GPU, node="n1", gpu="GPU-b"))
JOB = Claim(Target(TargetKind.JOB, job="llm"))
DISKS = Claim.of_disks("n1")
DRAINED = Claim(NODE.target, leaves_disks=True)
OTHER_DISKS = Claim.of_disks("n2")


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
        (DISKS, GPU, True),
        (GPU, DISKS, True),
        (DISKS, SAME_BY_INDEX, True),
        (DISKS, DISKS, False),
        (DISKS, OTHER_DISKS, True),
        (DISKS, NODE, False),
        (NODE, DISKS, False),
        (DISKS, DRAINED, True),
        (DRAINED, DISKS, True),
        (DRAINED, DRAINED, False),
        (DRAINED, NODE, False),
        (GPU, DRAINED, False),
        (CLUSTER, DRAINED, False),
        (DISKS, CLUSTER, False),
        (CLUSTER, DISKS, False),
        (DISKS, JOB, True),
        (JOB, DISKS, True),
    ],
)
async def test_a_node_covers_its_gpus_and_disks_and_the_cluster_everything(
    held: Claim, wanted: Claim, free: bool
) -> None:
    """Without reports of agents, GPUs of one node that are named in different ways exclude each other. The disks of a
    node are no GPU of it."""
    locks = TargetLocks()
    assert locks.try_acquire("first", held)
    assert locks.try_acquire("second", wanted) is free


def _reported(*uuids: str) -> AgentTopology:
    gpus = [{"uuid": uuid, "index": at, "pci_bus_id": f"0000:{at:02}:00.0"} for at, uuid in enumerate(uuids)]
    return AgentTopology.of({"n1": {"gpus": gpus}})


def _gpu(name: str, node: str = "n1") -> Claim:
    return Claim(Target(TargetKind.GPU, node=node, gpu=name))


@pytest.mark.parametrize(
    ("held", "wanted", "free"),
    [
        (_gpu("GPU-a"), _gpu("0"), False),
        (_gpu("GPU-a"), _gpu("1"), True),
        (_gpu("1"), _gpu("GPU-a"), True),
        (_gpu("0000:01:00.0"), _gpu("0"), True),
        (_gpu("0000:01:00.0"), _gpu("GPU-b"), False),
        (_gpu("7"), _gpu("GPU-a"), False),
        (_gpu("GPU-other"), _gpu("0"), False),
        (_gpu("0"), NODE, False),
        (_gpu("1"), Claim(NODE.target, nothing=True, also=(GPU.target,)), True),
        (_gpu("0"), Claim(NODE.target, nothing=True, also=(GPU.target,)), False),
    ],
)
async def test_agents_tell_the_names_of_their_gpus_apart(held: Claim, wanted: Claim, free: bool) -> None:
    """A name that no agent reports may be that of any GPU of the node."""
    agents = _reported("GPU-a", "GPU-b")
    locks = TargetLocks(lambda: agents)
    assert locks.try_acquire("first", held)
    assert locks.try_acquire("second", wanted) is free
    assert locks.holder(wanted) == ("second" if free else "first")


async def test_an_index_that_has_moved_to_another_gpu_excludes_both() -> None:
    """A run has acted on the first, and its next command would reach the second."""
    agents = _reported("GPU-a", "GPU-b")
    locks = TargetLocks(lambda: agents)
    assert locks.try_acquire("index", _gpu("0"))
    agents = _reported("GPU-b")
    assert not locks.try_acquire("second", _gpu("GPU-b"))
    agents = _reported("GPU-b", "GPU-a")
    assert not locks.try_acquire("first", _gpu("GPU-a"))
    assert locks.is_certain(_gpu("GPU-a"), "index")


async def test_a_run_no_longer_waits_once_agents_report_that_its_gpu_is_another() -> None:
    """Until then the lock is not certain to be on its GPU. A name that stays unknown keeps waiting."""
    agents = AgentTopology()
    locks = TargetLocks(lambda: agents)
    assert locks.try_acquire("index", _gpu("0"))
    other, same, unknown = (locks.wait(name, _gpu(name)) for name in ("GPU-b", "GPU-a", "GPU-x"))
    assert not locks.is_certain(_gpu("GPU-b"), "index")
    locks.look_again()
    assert not other.done()
    agents = _reported("GPU-a", "GPU-b")
    locks.look_again()
    assert (other.done(), same.done(), unknown.done()) == (True, False, False)
    assert locks.is_certain(_gpu("GPU-a"), "index")


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


async def test_a_run_is_told_whom_it_waits_for() -> None:
    """The one that has what it wants; where nobody has that, the one that waits for it and came earlier."""
    locks = TargetLocks()
    assert locks.try_acquire("gpu", GPU)
    locks.wait("node", NODE)
    locks.wait("other", OTHER_GPU)
    locks.wait("disks", DISKS)
    assert [locks.blocker(*waiter) for waiter in (("node", NODE), ("other", OTHER_GPU), ("disks", DISKS))] == [
        "gpu",
        "node",
        "node",
    ]
    locks.release("node")
    assert locks.blocker("disks", DISKS) is None


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


async def test_an_attempt_excludes_the_gpu_to_which_its_index_moved_while_it_waited() -> None:
    agents = _reported("GPU-a", "GPU-b")
    locks = TargetLocks(lambda: agents)
    by_index, by_uuid = locks.acting("index", _gpu("0")), locks.acting("uuid", _gpu("GPU-b"))
    async with locks.acting("reboot", NODE):
        index = asyncio.ensure_future(by_index.__aenter__())
        await asyncio.sleep(0)
        agents = _reported("GPU-b", "GPU-a")
    assert await index
    uuid = asyncio.ensure_future(by_uuid.__aenter__())
    await asyncio.sleep(0)
    assert not uuid.done()
    await by_index.__aexit__()
    assert await uuid


async def test_giving_back_costs_no_more_where_thousands_wait_elsewhere() -> None:
    """A storm in which two playbooks want each target: only those who wait near by are looked at."""
    looked = 0

    class Counting(Claim):
        def overlaps(self, other: Claim) -> bool:
            nonlocal looked
            looked += 1
            return super().overlaps(other)

    locks = TargetLocks()
    for number in range(2000):
        locks.try_acquire(f"holder-{number}", Counting(Target(TargetKind.NODE, node=f"n{number}")))
        locks.wait(f"waiter-{number}", Counting(Target(TargetKind.NODE, node=f"n{number}")))
    looked = 0
    locks.release("holder-1000")
    assert looked < 10


CLAIMS = st.sampled_from(
    [
        CLUSTER,
        NODE,
        GPU,
        SAME_BY_INDEX,
        OTHER_GPU,
        JOB,
        DISKS,
        DRAINED,
        OTHER_DISKS,
        Claim(Target(TargetKind.GPU, node="n2", gpu="GPU-a")),
    ]
)


MOVES = st.sampled_from(["take", "give back", "keep", "pass on", "let go"])


@given(st.lists(st.tuples(MOVES, CLAIMS), max_size=40))
def test_no_two_holders_ever_overlap_and_nobody_waits_for_nothing(moves: list[tuple[str, Claim]]) -> None:
    """Over any order of taking and giving back, and of keeping for a run that is then admitted or not."""

    async def play() -> None:
        locks = TargetLocks()
        held: dict[str, Claim] = {}
        kept: dict[str, Claim] = {}
        refused: dict[str, Claim] = {}
        queue: dict[str, tuple[Claim, asyncio.Future[None]]] = {}
        for number, (move, claim) in enumerate(moves):
            run, keeper = f"run-{number}", f"keeper-{number}"
            if move == "take" and locks.try_acquire(run, claim):
                held[run] = claim
            elif move == "take":
                queue[run] = (claim, locks.wait(run, claim))
            elif move == "give back" and held:
                locks.release(run := next(iter(held)))
                del held[run]
            elif move == "keep":
                ahead = [*held.values(), *kept.values(), *refused.values(), *(wanted for wanted, _ in queue.values())]
                is_free = not any(claim.overlaps(other) for other in ahead)
                assert locks.try_keep(keeper, claim) is is_free
                (kept if is_free else refused)[keeper] = claim
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
            named = locks.holder(claim)
            assert (named in held) if any(claim.overlaps(other) for other in held.values()) else (named is None)
            ahead_of: dict[str, Claim] = {}
            for run, (wanted, _) in queue.items():
                assert any(wanted.overlaps(other) for other in claims)
                claims = [*claims, wanted]
                blocker = locks.blocker(run, wanted)
                blocking = [name for name, other in {**held, **ahead_of}.items() if wanted.overlaps(other)]
                assert blocker in blocking if blocking else blocker is None
                ahead_of[run] = wanted

    virtual_time.run(play())


def _both(node: str, *jobs: str) -> Claim:
    also = tuple(Target(TargetKind.JOB, job=job) for job in jobs)
    return Claim(Target(TargetKind.NODE, node=node), also=also)


@pytest.mark.parametrize(
    ("held", "wanted", "free"),
    [
        (_both("n1", "llm"), JOB, False),
        (JOB, _both("n1", "llm"), False),
        (_both("n1", "llm"), GPU, False),
        (_both("n1", "llm"), _both("n2", "llm"), False),
        (_both("n1", "llm"), _both("n2", "other"), True),
        (_both("n1", "llm"), CLUSTER, False),
        (Claim(NODE.target, nothing=True, also=(JOB.target,)), NODE, True),
        (Claim(NODE.target, nothing=True, also=(JOB.target,)), JOB, False),
        (Claim(NODE.target, disks_only=True, also=(JOB.target,)), GPU, True),
        (Claim(NODE.target, disks_only=True, also=(JOB.target,)), DISKS, False),
    ],
)
async def test_a_claim_with_several_targets_overlaps_by_any(held: Claim, wanted: Claim, free: bool) -> None:
    """Each part as if it were alone; releasing frees all."""
    locks = TargetLocks()
    assert locks.try_acquire("first", held)
    assert locks.try_acquire("second", wanted) is free
    locks.release("first")
    assert locks.try_acquire("second", wanted)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sets(st.sampled_from("jklm"), max_size=3)), max_size=9), st.data())
def test_no_order_of_claims_deadlocks_or_starves(wanted: list[tuple[str, set[str]]], data: st.DataObject) -> None:
    """No two holders overlap; a claim passes earlier ones only if it overlaps none; once holders end, each waiter is
    granted."""

    async def play() -> None:
        locks, claims = TargetLocks(), [_both(node, *sorted(jobs)) for node, jobs in wanted]
        waiting: dict[str, asyncio.Future[None]] = {}
        arrived: list[str] = []
        holding: set[str] = set()
        names = {str(number): claim for number, claim in enumerate(claims)}

        def settle() -> None:
            for name in [name for name, granted in waiting.items() if granted.done()]:
                del waiting[name]
                holding.add(name)
            for one in holding:
                assert not any(names[one].overlaps(names[other]) for other in holding if other != one)
            for name in waiting:
                before = [other for other in arrived[: arrived.index(name)] if other in holding or other in waiting]
                behind = [other for other in holding if arrived.index(other) > arrived.index(name)]
                assert any(names[name].overlaps(names[other]) for other in before), "it waits for one before it"
                assert not any(names[name].overlaps(names[other]) for other in behind), "none has overtaken it"

        while len(arrived) < len(claims) or holding or waiting:
            can_come, can_end = len(arrived) < len(claims), bool(holding or waiting)
            if can_come and (not can_end or data.draw(st.booleans())):
                name = str(len(arrived))
                arrived.append(name)
                if locks.try_acquire(name, names[name]):
                    holding.add(name)
                else:
                    waiting[name] = locks.wait(name, names[name])
            else:
                assert holding, "waiters without a holder"
                gives_up = waiting and data.draw(st.integers(0, 4)) == 0
                name = data.draw(st.sampled_from(sorted(waiting if gives_up else holding)))
                holding.discard(name)
                waiting.pop(name, None)
                locks.release(name)
            settle()

    virtual_time.run(play())
