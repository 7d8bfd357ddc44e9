"""A server's verdicts hold apart what belongs together: of other jobs, of earlier attempts, of the same failure."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.diagnosis.test_job_diagnoses import World
from trainmedic.wire.ids import new_id
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.finding import CauseClass, Origin, Role
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.ports.outside import Presence


async def test_kernel_messages_from_before_the_job_belong_to_another_job() -> None:
    """A card lost by another job within the last hour names no node when this job fails by itself."""
    world = World()
    await world.lose_a_card("llm-0")
    world.clock.sleep(1200)
    now = world.clock.now()
    process = new_id(int(now.timestamp() * 1000))
    await world.store.transact(lambda tx: tx.save_job_lives([JobLife("llm-1", LifeState.PRESENT, now, process)]))
    world.present_jobs = [Presence("llm-1", now, {"placement": [{"rank": 1, "node": "node-2", "gpu": "GPU-5f3a"}]})]
    await world.look(30)
    origin = Origin("training", "node-2", job="llm-1", attempt=1, rank=1)
    members: dict[str, Any] = {"rule": "python-exception", "role": Role.ROOT, "cause": CauseClass.CODE}
    await world.find("error", **members, origin=origin, line="KeyError: 'labels'", ranks=frozenset({1}))
    line = "failed (exitcode: 1) local_rank: 0 (pid: 12) of binary: /usr/bin/python"
    await world.find("f1", origin=Origin("launcher", "node-2", job="llm-1", attempt=1), line=line)
    await world.look(11)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert (verdict.cause, verdict.node, verdict.plain["ranks"]) == ("code", None, [1])


async def kill_for_memory(world: World, name: str, before: float, **members: Any) -> None:
    """The kernel of node-1 has killed a process of a training, so many seconds ago."""
    at = world.clock.now() - timedelta(seconds=before)
    line = "Out of memory: Killed process 7 (python)"
    told: dict[str, Any] = {"fields": {"pid": "7", "process": "python"}, "line": line, **members}
    await world.find(
        name,
        rule="host-oom",
        role=Role.ROOT,
        cause=CauseClass.HOST_MEMORY,
        target=Target(TargetKind.NODE, node="node-1"),
        origin=Origin("kernel", "node-1"),
        is_printed=False,
        **told,
        first_at=at,
        last_at=at,
    )


async def test_an_oom_kill_long_before_the_launcher_saw_one_is_not_of_its_processes() -> None:
    """Of a job without the SDK nobody says when it began; but who starts processes sees at once that one is killed. The
    numbers of the processes differ, as they do in a container, and between neighbours."""
    for before, expected in (
        (600, ("unknown", "low")),
        (12, ("host_memory", "low")),
        (3, ("host_memory", "high")),
    ):
        world = World()
        await kill_for_memory(world, "oom", before)
        await world.find("f1")
        await world.look(11)
        (verdict,) = await world.store.verdicts_of("llm-1", 5)
        assert (verdict.cause, verdict.confidence) == expected


async def test_a_kernel_out_of_memory_line_counts_only_at_that_time() -> None:
    """The line at which the kernel starts to look for a process does not state whose that is."""
    for before, expected in ((12, ("host_memory", "low")), (3, ("host_memory", "high"))):
        world = World()
        await kill_for_memory(world, "oom", before, fields={}, line="python3 invoked oom-killer: gfp_mask=0xcc0")
        await world.find("f1")
        await world.look(11)
        (verdict,) = await world.store.verdicts_of("llm-1", 5)
        assert (verdict.cause, verdict.confidence) == expected


@pytest.mark.parametrize(("doubt", "cause"), [(None, "hang"), ("its signature is wrong", "host_memory")])
async def test_an_oom_kill_before_the_launcher_started_belongs_to_another_job(doubt: str | None, cause: str) -> None:
    """A job without the SDK hangs half an hour after a kill; its launcher states when the job began."""
    world = World()
    await kill_for_memory(world, "oom", 1800)
    now = world.clock.now()
    began = new_id(int(now.timestamp() * 1000) - 60_000)
    world.present_launchers = [Presence("llm-1", now, {"instance": began}, doubt=doubt)]
    await world.store.transact(lambda tx: tx.save_job_lives([JobLife("llm-1", LifeState.PRESENT, now)]))
    await world.look(5)
    await world.time_out("timeout", frozenset({0, 1, 3}))
    await world.look(11)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert verdict.cause == cause


@pytest.mark.parametrize(("pid", "cause"), [("7", "hang"), ("8", "host_memory")])
async def test_a_process_that_another_job_lost_does_not_belong_to_this_job(pid: str, cause: str) -> None:
    """Both run on node-1; the kernel kills 7 while this one hangs."""
    world = World()
    await kill_for_memory(world, "oom", 5)
    await world.find("f1", job="llm-0", fields={"pid": pid, "exitcode": "-9"})
    await world.time_out("timeout", frozenset({0, 1, 3}))
    await world.look(11)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert verdict.cause == cause


async def test_a_rank_ended_after_another_was_killed_had_run_until_then() -> None:
    """What rank 0 printed before may not be why it failed, and is less likely so where rank 2 was killed."""
    found = []
    for codes in ((1, -15, -15), (-15, -15, -9)):
        world = World()
        origin = Origin("training", "node-1", job="llm-1", attempt=1, rank=0)
        members: dict[str, Any] = {"rule": "cuda-oom", "role": Role.ROOT, "cause": CauseClass.GPU_MEMORY}
        await world.find("oom", **members, origin=origin, line="CUDA out of memory. Tried to allocate 20.00 MiB")
        await world.end(*codes)
        await world.look(11)
        (verdict,) = await world.store.verdicts_of("llm-1", 5)
        found.append(verdict.confidence)
    assert found == ["high", "low"]


async def test_an_oom_kill_explains_one_failure_and_not_the_next() -> None:
    """The next attempt, a minute later, is killed by a person."""
    world = World()
    await kill_for_memory(world, "oom", 1)
    await world.find("f1")
    await world.look(11)
    known = await world.store.transact(lambda tx: tx.findings.with_ids(["f1"]))
    over = replace(known["f1"], ended_at=world.clock.now())
    await world.store.transact(lambda tx: tx.findings.save([over]))
    world.clock.sleep(115)
    await world.find("f2", origin=Origin("launcher", "node-1", job="llm-1", attempt=2))
    await world.look(11)
    newest, oldest = await world.store.verdicts_of("llm-1", 5)
    assert (newest.cause, oldest.cause) == ("unknown", "host_memory")


async def test_an_oom_kill_after_the_error_does_not_explain_it() -> None:
    """Another job runs out of memory half a minute later. Before the error, a kill lowers the confidence only."""
    for before, confidence, against in ((-25, "high", 0), (40, "medium", 1)):
        world = World()
        origin = Origin("training", "node-1", job="llm-1", attempt=1, rank=0)
        members: dict[str, Any] = {"rule": "disk-full", "role": Role.ROOT, "cause": CauseClass.STORAGE}
        line = "OSError: [Errno 28] No space left on device"
        await world.find("error", **members, origin=origin, line=line, ranks=frozenset({0}))
        await world.find("f1", line="failed (exitcode: 1) local_rank: 0 (pid: 12) of binary: /usr/bin/python")
        await kill_for_memory(world, "oom", before)
        await world.look(31)
        (verdict,) = await world.store.verdicts_of("llm-1", 5)
        assert (verdict.cause, verdict.confidence, len(verdict.plain["against"])) == ("storage", confidence, against)
        assert not any("Out of memory" in each["line"] for each in verdict.plain["evidence"])


async def test_attempts_that_fail_soon_after_each_other_have_a_verdict_each() -> None:
    """Three end by the same error within two minutes: what the first printed is no line that healthy attempts print
    too."""
    world = World()
    members: dict[str, Any] = {"rule": "python-exception", "role": Role.ROOT, "cause": CauseClass.CODE, "shape": "5f3a"}
    for attempt in (1, 2, 3):
        world.clock.sleep(40)
        ids = [f"error-{attempt}", f"exit-{attempt}"]
        origin = Origin("training", "node-1", job="llm-1", attempt=attempt, rank=0)
        await world.find(ids[0], **members, origin=origin, line="KeyError: 'labels'", ranks=frozenset({0}))
        line = "failed (exitcode: 1) local_rank: 0 (pid: 12) of binary: /usr/bin/python"
        await world.find(ids[1], origin=Origin("launcher", "node-1", job="llm-1", attempt=attempt), line=line)
        await world.look(3)
        await world.look(8)
        # The next one makes progress.
        known = await world.store.transact(lambda tx, ids=ids: tx.findings.with_ids(ids))
        over = [replace(each, ended_at=world.clock.now()) for each in known.values()]
        await world.store.transact(lambda tx, over=over: tx.findings.save(over))
    newest_first = await world.store.verdicts_of("llm-1", 5)
    assert [(verdict.attempt, verdict.cause) for verdict in newest_first] == [(3, "code"), (2, "code"), (1, "code")]
    assert [verdict.plain["same_before"] for verdict in newest_first] == [2, 1, 0]
