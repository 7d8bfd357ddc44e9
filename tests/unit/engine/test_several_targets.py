"""A run with a node and the jobs on it as targets: one claim, and steps that say which they work on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.support.examples import examples
from tests.unit.engine.world import Scripted, World
from trainmedic_core.target import TargetKind
from trainmedic_server import errors
from trainmedic_server.catalog import modes_file
from trainmedic_server.domain.pause import Scope
from trainmedic_server.domain.run import OrderKind, Run, Status, StepStatus, UndoStatus
from trainmedic_server.engine.pausing import PauseOrder
from trainmedic_server.ports.actions import Inverse
from trainmedic_server.ports.store import HistoryFilter
from trainmedic_server.simulation import virtual_time

MakeWorld = Callable[..., World]


class Hold(Scripted):
    name = "test.hold"
    targets = frozenset({TargetKind.JOB})
    is_hold = True
    silences = frozenset({TargetKind.JOB})

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        """The amount that the job reported before, if it did."""
        before = (output or {}).get("before", params.model_dump()["amount"])
        return Inverse("test.free", {"amount": before})


class Free(Scripted):
    name = "test.free"
    targets = frozenset({TargetKind.JOB})
    gives_back = True


BOTH = """
playbook: nvlink
on: {alert: NVLink}
target: {node: "{{ labels.node }}", jobs: on_node}
steps:
  - {id: hold, action: test.hold, undo: on_failure}
  - {id: sure, approve: "Fence {{ target.node }} with {{ target.jobs | join(' and ') }}?", timeout: 25m}
  - {id: fence, action: test.cap, undo: on_resolve}
  - {id: free, target: jobs, action: test.free}
"""
AT_ONCE = BOTH.replace(BOTH[BOTH.index("  - {id: sure") : BOTH.index("  - {id: fence")], "")
OF_JOB = """
playbook: slow
on: {alert: Slow}
target: job
steps: [{id: other, action: test.other, timeout: 1h}]
"""
OF_SLURM_JOB = """
playbook: stuck
on: {alert: Stuck}
target: {job: "slurm:{{ labels.slurm_job_id }}"}
steps: [{id: other, action: test.other, timeout: 1h}]
"""
TWO = {"told:node:n1": ["a", "b"], "told:node:n2": ["b"], "told:node:n3": ["c"]}
DOING = (Hold, Free)


def placed(world: World, name: str) -> list[str]:
    return [call.target.key for call in world.actions[name].calls]


async def approve(world: World, run: Run, kind: OrderKind = OrderKind.APPROVE) -> None:
    await world.engine.order(run.id, kind, "ann")
    await world.pass_time(0)


async def test_each_step_works_on_its_target(world: MakeWorld) -> None:
    """One attempt for both jobs, with a command of its own for each, and one question."""
    at = world(BOTH, inventory=TWO, more=DOING)
    await at.engine.start()
    await at.post(at.alert("NVLink", node="n1"))
    run = await at.run()
    assert (run.status, run.target_key, [each.key for each in run.also]) == (
        Status.AWAITING_APPROVAL, "node:n1", ["job:a", "job:b"]
    )  # fmt: skip
    assert run.message == "Fence n1 with a and b?"
    ids = [call.command_id for call in at.actions["hold"].calls]
    assert len({*ids, run.steps[0].attempts[0].command_id}) == 3
    assert at.actions["hold"].settled_ids == ids
    await approve(at, run)
    run = await at.run()
    assert run.status is Status.SUCCEEDED
    assert [placed(at, name) for name in ("hold", "cap", "free")] == [
        ["job:a", "job:b"],
        ["node:n1"],
        ["job:a", "job:b"],
    ]
    assert run.steps[0].output == {"done": True, "by_job": {"a": {"done": True}, "b": {"done": True}}}


@pytest.mark.parametrize("kind", [OrderKind.REJECT, OrderKind.CANCEL])
async def test_without_an_approval_the_jobs_are_let_go(world: MakeWorld, kind: OrderKind) -> None:
    """`undo: on_failure`, after a rejection too, on both jobs and by the IDs of their commands."""
    at = world(BOTH, inventory=TWO, more=DOING)
    await at.engine.start()
    await at.post(at.alert("NVLink", node="n1"))
    run = await at.run()
    await approve(at, run, kind)
    run = await at.run()
    assert run.steps[0].undo is not None
    assert (run.steps[0].undo.status, placed(at, "free"), placed(at, "cap")) == (
        UndoStatus.DONE,
        ["job:a", "job:b"],
        [],
    )
    held = [call.command_id for call in at.actions["hold"].calls]
    assert [call.undo_of for call in at.actions["free"].calls] == held


async def test_each_job_gets_back_what_it_reported(world: MakeWorld) -> None:
    """The undo's parameters follow from each job's own output."""
    at = world(BOTH, inventory=TWO, more=DOING)
    await at.engine.start()
    at.actions["hold"].outcomes.extend([{"before": 3.0}, {"before": 5.0}])
    await at.post(at.alert("NVLink", node="n1"))
    await approve(at, await at.run(), OrderKind.REJECT)
    assert [call.params.model_dump()["amount"] for call in at.actions["free"].calls] == [3.0, 5.0]


@pytest.mark.parametrize(
    ("outcomes", "status", "undone"),
    [
        ([{"done": True}, errors.TemporaryFailure("busy")], StepStatus.UNKNOWN, UndoStatus.DONE),
        ([errors.PermanentFailure("no"), {"done": True}], StepStatus.UNKNOWN, UndoStatus.DONE),
        ([errors.PermanentFailure("no"), errors.PermanentFailure("no")], StepStatus.FAILED, UndoStatus.DROPPED),
        ([errors.NotSetUp("not here"), errors.NotSetUp("not here")], StepStatus.SKIPPED, UndoStatus.DROPPED),
        ([{"done": True}, errors.EffectDisproved("wrong")], StepStatus.UNKNOWN, UndoStatus.DONE),
        ([errors.EffectDisproved("wrong"), errors.EffectDisproved("wrong")], StepStatus.FAILED, UndoStatus.DONE),
        ([RuntimeError("a bug"), {"done": True}], StepStatus.UNKNOWN, UndoStatus.DONE),
    ],
)
async def test_one_outcome_for_all_jobs(
    world: MakeWorld, outcomes: list[Any], status: StepStatus, undone: UndoStatus
) -> None:
    """Applied in part is unknown, so that the undo goes to all. Nothing applied is a failure without an undo."""
    at = world(AT_ONCE, inventory=TWO, more=DOING)
    await at.engine.start()
    at.actions["hold"].outcomes.extend(outcomes)
    await at.post(at.alert("NVLink", node="n1"))
    await at.pass_time(10)
    hold = (await at.run()).steps[0]
    assert hold.undo is not None
    assert (hold.status, hold.undo.status if status is not StepStatus.SKIPPED else undone) == (status, undone)


async def test_an_actions_bug_on_one_job_leaves_the_others(world: MakeWorld) -> None:
    at = world(AT_ONCE, inventory=TWO, more=DOING)
    await at.engine.start()
    at.actions["hold"].outcomes.extend([RuntimeError("a bug"), timedelta(seconds=3)])
    await at.post(at.alert("NVLink", node="n1"))
    await at.pass_time(10)
    hold = (await at.run()).steps[0]
    error = "applied in 1 of 2 places, but unexpected RuntimeError in the action; see the server's log"
    assert (hold.attempts[0].error, hold.output["by_job"]) == (error, {"b": {"done": True}})


async def test_an_unknown_outcome_is_asked_again_under_the_same_ids(world: MakeWorld) -> None:
    """After a kill in the attempt, each job gets its command again, and no job two."""
    at = world(AT_ONCE, inventory=TWO, more=DOING)
    await at.engine.start()
    at.actions["hold"].outcomes.extend(["hang", {"done": True}])
    await at.post(at.alert("NVLink", node="n1"))
    before = [call.command_id for call in at.actions["hold"].calls]
    at.inventory.clear()
    await at.restart()
    calls = at.actions["hold"].calls[2:]
    assert [call.command_id for call in calls] == before
    assert all(call.resumed for call in calls)
    assert (await at.run()).status is Status.SUCCEEDED


async def test_without_jobs_their_steps_are_skipped(world: MakeWorld) -> None:
    """With the reason; the steps of the node run."""
    at = world(AT_ONCE, inventory=TWO, more=DOING)
    await at.engine.start()
    await at.post(at.alert("NVLink", node="n9"))
    run = await at.run()
    assert [(step.id, step.status, step.message) for step in run.steps] == [
        ("hold", StepStatus.SKIPPED, "no job runs on n9"),
        ("fence", StepStatus.SUCCEEDED, None),
        ("free", StepStatus.SKIPPED, "no job runs on n9"),
    ]


async def test_all_targets_are_locked_before_the_first_step(world: MakeWorld) -> None:
    """A run on a job of the node waits, and so does one on another node of that job; another node's goes on."""
    at = world(BOTH, OF_JOB, inventory=TWO, more=DOING)
    await at.engine.start()
    await at.post(at.alert("NVLink", node="n1"))
    await at.post(at.alert("NVLink", node="n2"), at.alert("NVLink", node="n3"), at.alert("Slow", job_name="b"))
    waiting = {run.target_key: run.waiting_on for run in await at.runs()}
    assert waiting == {"node:n1": "approval", "node:n2": "target", "node:n3": "approval", "job:b": "target"}
    first = next(run for run in await at.runs() if run.target_key == "node:n1")
    await approve(at, first)
    waiting = {run.target_key: run.waiting_on for run in await at.runs()}
    assert waiting == {"node:n1": None, "node:n2": "approval", "node:n3": "approval", "job:b": "target"}


@pytest.mark.parametrize("first", ["own", "slurm"])
async def test_runs_on_the_two_names_of_a_job_wait_for_each_other(world: MakeWorld, first: str) -> None:
    """Also after a restart that finds the job gone; a job of another allocation does not wait."""
    at = world(OF_JOB, OF_SLURM_JOB, more=DOING)
    at.slurm_ids = {"a": "7", "b": "8"}
    await at.engine.start()
    at.actions["other"].outcomes.extend([timedelta(seconds=60)] * 4)
    alerts = {"own": at.alert("Slow", job_name="a"), "slurm": at.alert("Stuck", slurm_job_id="7")}
    await at.post(alerts.pop(first))
    await at.post(*alerts.values(), at.alert("Slow", job_name="b"))
    keys = {"own": "job:a", "slurm": "job:slurm:7"}
    second = "slurm" if first == "own" else "own"

    async def waiting_on() -> dict[str, str | None]:
        return {run.target_key: run.waiting_on for run in await at.runs()}

    assert await waiting_on() == {keys[first]: None, keys[second]: "target", "job:b": None}
    assert [each.key for run in await at.runs() for each in run.also if run.target_key == keys[first]] == [keys[second]]
    at.slurm_ids = {}
    await at.restart()
    assert await waiting_on() == {keys[first]: None, keys[second]: "target", "job:b": None}
    await at.pass_time(200)
    assert {run.status for run in await at.runs()} == {Status.SUCCEEDED}


@pytest.mark.parametrize(("known", "also"), [({}, ["job:slurm:7"]), ({"a": "9"}, ["job:slurm:9"])])
async def test_a_job_keeps_its_other_name_until_another_is_known(
    world: MakeWorld, known: Mapping[str, str], also: list[str]
) -> None:
    """A server that has just started knows none, and a run that still waits looks again."""
    waits = OF_JOB.replace("steps: [", "steps: [{id: calm, wait: 5m}, ")
    at = world(waits, OF_SLURM_JOB, more=DOING)
    at.slurm_ids = {"a": "7"}
    await at.engine.start()
    at.actions["other"].outcomes.extend([timedelta(seconds=600)] * 2)
    await at.post(at.alert("Slow", job_name="a"))
    await at.post(at.alert("Stuck", slurm_job_id="7"))
    at.slurm_ids = known
    await at.restart()
    await at.pass_time(350)
    assert at.actions["other"].in_flight == 1
    await at.pass_time(1300)
    runs = {run.target_key: run for run in await at.runs()}
    assert [each.key for each in runs["job:a"].also] == also
    assert {run.status for run in runs.values()} == {Status.SUCCEEDED}


async def test_an_undo_waits_for_an_attempt_on_the_jobs_other_name(world: MakeWorld) -> None:
    holds = OF_SLURM_JOB.replace(
        "{id: other, action: test.other, timeout: 1h}", "{action: test.hold, undo: on_resolve}"
    )
    at = world(OF_JOB, holds, more=DOING)
    at.slurm_ids = {"a": "7"}
    await at.engine.start()
    held = at.alert("Stuck", slurm_job_id="7")
    await at.post(held)
    at.actions["other"].outcomes.append(timedelta(seconds=60))
    await at.post(at.alert("Slow", job_name="a"))
    await at.resolve(held)
    assert (placed(at, "other"), placed(at, "free")) == (["job:a"], [])
    await at.pass_time(60)
    assert placed(at, "free") == ["job:slurm:7"]


async def test_jobs_that_changed_during_the_wait_are_locked_anew(world: MakeWorld) -> None:
    """When the targets are granted, the jobs are resolved again; if they differ, the run queues anew for them."""
    at = world(BOTH, OF_JOB, inventory=TWO, more=DOING)
    await at.engine.start()
    at.actions["other"].outcomes.extend([timedelta(seconds=60), timedelta(seconds=300)])
    await at.post(at.alert("Slow", job_name="b"), at.alert("Slow", job_name="d"))
    await at.post(at.alert("NVLink", node="n1"))
    at.inventory["told:node:n1"] = ["d"]  # type: ignore[assignment]
    await at.pass_time(60)
    run = (await at.runs())[-1]
    assert (run.waiting_on, [each.key for each in run.also]) == ("target", ["job:d"])
    await at.pass_time(240)
    run = (await at.runs())[-1]
    assert (run.waiting_on, placed(at, "hold")) == ("approval", ["job:d"])
    story = await at.story(run.id)
    assert [kind for kind in story if kind in ("waiting_for_target", "targets_changed")] == [
        "waiting_for_target", "targets_changed", "waiting_for_target"
    ]  # fmt: skip


async def test_a_run_that_has_acted_keeps_its_jobs(world: MakeWorld) -> None:
    """A job that leaves the node is still let go, and one that comes is not touched, after a restart too."""
    at = world(BOTH, inventory=TWO, more=DOING)
    await at.engine.start()
    await at.post(at.alert("NVLink", node="n1"))
    at.inventory["told:node:n1"] = ["z"]  # type: ignore[assignment]
    await at.restart()
    await approve(at, await at.run())
    assert placed(at, "free") == ["job:a", "job:b"]


@pytest.mark.parametrize("first", ["", "  - {id: calm, wait: 10m}\n"])
async def test_an_approval_counts_for_no_other_jobs(world: MakeWorld, first: str) -> None:
    """Those of the question stay, across a restart and a wait that follows."""
    text = AT_ONCE.replace("steps:\n", f"steps:\n{first}")
    at = world(f"{text}mode: approve\n", inventory=TWO, more=DOING)
    await at.engine.start()
    await at.post(at.alert("NVLink", node="n1"))
    at.inventory["told:node:n1"] = ["z"]  # type: ignore[assignment]
    await at.restart()
    await approve(at, await at.run())
    await at.pass_time(600)
    assert ((await at.run()).status, placed(at, "hold")) == (Status.SUCCEEDED, ["job:a", "job:b"])


async def test_a_run_that_begins_with_a_wait_locks_all_after_it(world: MakeWorld) -> None:
    """The jobs are those of the time after the wait."""
    waits = BOTH.replace("steps:\n", "steps:\n  - {id: calm, wait: 10m}\n")
    at = world(waits, OF_JOB, inventory=TWO, more=DOING)
    await at.engine.start()
    await at.post(at.alert("NVLink", node="n1"))
    await at.post(at.alert("Slow", job_name="a"))
    assert len(placed(at, "other")) == 1, "the wait locks nothing"
    at.inventory["told:node:n1"] = ["b", "c"]  # type: ignore[assignment]
    await at.pass_time(600)
    assert placed(at, "hold") == ["job:b", "job:c"]


async def test_a_pause_of_any_target_counts(world: MakeWorld) -> None:
    """A pause of one of the jobs, or of a node that it uses, holds the run."""
    at = world(AT_ONCE, inventory=TWO, more=DOING)
    await at.engine.start()
    await at.engine.pause("ann", PauseOrder(Scope(node="n2")))
    await at.post(at.alert("NVLink", node="n1"))
    assert [run.decision for run in await at.runs()] == ["paused"]


async def test_the_strictest_mode_of_all_targets_counts(world: MakeWorld, tmp_path: Path) -> None:
    """Of jobs that have come during the wait too: the run is decided anew at the alert's next report."""
    (tmp_path / "modes.yaml").write_text("modes:\n  - {jobs: {name: [c, d]}, mode: observe}\n")
    modes = modes_file.load(tmp_path / "modes.yaml")
    at = world(AT_ONCE, OF_JOB, inventory=TWO, more=DOING, target_modes=modes)
    await at.engine.start()
    at.actions["other"].outcomes.append(timedelta(seconds=60))
    await at.post(at.alert("Slow", job_name="b"))
    alert = at.alert("NVLink", node="n1")
    await at.post(alert, at.alert("NVLink", node="n3"))
    at.inventory["told:node:n1"] = ["d"]  # type: ignore[assignment]
    await at.pass_time(60)
    decided = {run.target_key: (run.decision, run.message.partition(";")[0]) for run in await at.runs()}
    assert decided["node:n3"][0] == "observe_only"
    assert decided["node:n1"][0] == "target_unknown"
    assert decided["node:n1"][1].startswith(
        "the further targets of node:n1 have changed, and the modes file says: jobs:name=c|d observe"
    )
    await at.post(alert)
    assert [run.decision for run in await at.runs() if run.target_key == "node:n1"] == [
        "target_unknown",
        "observe_only",
    ]
    assert placed(at, "hold") == []


async def test_a_search_by_a_job_finds_the_run(world: MakeWorld) -> None:
    """By its further targets too, and by no part of a name."""
    at = world(AT_ONCE, inventory={"told:node:n1": ["llm-1", 'a"b']}, more=DOING)
    await at.engine.start()
    await at.post(at.alert("NVLink", node="n1"))
    found = {}
    for name in ("llm-1", 'a"b', "llm", "LLM-1", "b"):
        page, _ = await at.store.page(HistoryFilter(job=(name,)), 10, None)
        found[name] = len(page)
    assert found == {"llm-1": 1, 'a"b': 1, "llm": 0, "LLM-1": 0, "b": 0}
    page, _ = await at.store.page(HistoryFilter(target=("job:llm-1",)), 10, None)
    assert page == [], "a job's own history has no runs on other targets"


async def test_members_of_a_group_have_the_jobs_on_their_nodes(world: MakeWorld) -> None:
    """Members with a common job follow each other."""
    text = AT_ONCE.replace('{node: "{{ labels.node }}", jobs: on_node}', "{nodes: {pool: h100}, jobs: on_node}")
    nodes = {"attributes:n[1-3]": "pool=h100"}
    at = world(text + "rollout: {serial: 3}\n", inventory={**TWO, **nodes}, more=DOING, breaker_min_nodes=50)
    await at.engine.start()
    at.actions["hold"].outcomes.extend([timedelta(seconds=5)] * 2)
    await at.post(at.alert("NVLink"))
    parent = await at.run()
    page, _ = await at.store.page(HistoryFilter(parent=parent.id), 10, None)
    members = {run.target_key: ([each.key for each in run.also], run.waiting_on) for run in page}
    assert members == {
        "node:n1": (["job:a", "job:b"], None), "node:n2": (["job:b"], "target"), "node:n3": (["job:c"], None)
    }  # fmt: skip
    await at.pass_time(20)
    assert (await at.run()).status is Status.SUCCEEDED
    assert sorted(placed(at, "hold")) == ["job:a", "job:b", "job:b", "job:c"]


async def test_a_question_between_batches_lists_the_jobs_of_the_next(world: MakeWorld) -> None:
    """The nodes of jobs count for the steps on them, also in an explanation."""
    text = AT_ONCE.replace('{node: "{{ labels.node }}", jobs: on_node}', "{nodes: {pool: h100}, jobs: on_node}")
    nodes = {"attributes:n[1-3]": "pool=h100"}
    rollout = "rollout: {serial: 1, max_unavailable: 2, check: [{id: sure, approve: '', timeout: 1h}]}\n"
    at = world(text + rollout, inventory={**TWO, **nodes}, more=DOING, breaker_min_nodes=50)
    await at.engine.start()
    (explained,) = await at.engine.explain([at.alert("NVLink")])
    told = [(step.phase, step.what) for step in explained.playbooks[0].steps]
    assert told == [
        ("steps", "action test.hold on job:a, job:b"), ("steps", "action test.cap"),
        ("steps", "action test.free on job:a, job:b"), ("check", "approve, at most 1h: "),
    ]  # fmt: skip
    await at.post(at.alert("NVLink"))
    ahead = (await at.run()).step(("check", 0)).params["steps"]
    assert [(each["id"], each["targets"], each["nodes"]) for each in ahead] == [
        ("hold", ["job:b"], ["n1", "n2"]),
        ("fence", ["node:n2"], ["n2"]),
        ("free", ["job:b"], ["n1", "n2"]),
    ]
    for _ in range(3):
        await at.pass_time(15)
        await at.engine.order((await at.run()).id, OrderKind.APPROVE, "ann")
    await at.pass_time(15)
    assert (await at.run()).message == "3 members: 3 succeeded"


async def test_mode_observe_names_what_it_would_do(world: MakeWorld) -> None:
    """Nothing is called."""
    at = world(AT_ONCE, inventory=TWO, more=DOING, mode="observe")
    await at.engine.start()
    await at.post(at.alert("NVLink", node="n1"), at.alert("NVLink", node="n9"))
    runs = await at.runs()
    assert [[step.status for step in run.steps] for run in runs] == [
        [StepStatus.OBSERVED] * 3, [StepStatus.SKIPPED, StepStatus.OBSERVED, StepStatus.SKIPPED]
    ]  # fmt: skip
    assert at.calls() == {}


async def test_a_question_lists_what_each_step_reaches(world: MakeWorld) -> None:
    """The jobs' nodes count for the steps on the jobs."""
    at = world(AT_ONCE + "mode: approve\n", inventory=TWO, more=DOING)
    await at.engine.start()
    await at.post(at.alert("NVLink", node="n1"))
    run = await at.run()
    ahead = run.steps[0].params["steps"]
    assert [(each["id"], each["targets"], each["nodes"]) for each in ahead] == [
        ("hold", ["job:a", "job:b"], ["n1", "n2"]),
        ("fence", ["node:n1"], ["n1"]),
        ("free", ["job:a", "job:b"], ["n1", "n2"]),
    ]
    assert run.message == "May nvlink act on node:n1, job:a, job:b?"


GUARDED = AT_ONCE + "guards: {cooldown: 2m}\n"
MOVES = st.one_of(
    st.tuples(st.just("node"), st.sampled_from(["n1", "n2", "n3"])),
    st.tuples(st.just("job"), st.sampled_from("abc")),
    st.tuples(st.just("place"), st.tuples(st.sampled_from(["n1", "n2", "n3"]), st.sets(st.sampled_from("abc")))),
    st.tuples(st.just("pass"), st.integers(1, 90)),
    st.tuples(st.just("restart"), st.integers(0, 30)),
)


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(MOVES, max_size=14), st.integers(1, 25))
def test_no_interleaving_of_runs_deadlocks_starves_or_overlaps(moves: list[tuple[str, Any]], lasts: int) -> None:
    """Jobs move, servers die; yet runs with a common target follow each other, guards hold, and each run ends."""

    async def play() -> list[Run]:
        at = World(GUARDED, OF_JOB, inventory=dict(TWO), more=DOING, breaker_min_nodes=50)  # type: ignore[arg-type]
        await at.engine.start()
        for name in ("hold", "cap", "free", "other"):
            at.actions[name].outcomes.extend([timedelta(seconds=lasts)] * 100)
        for number, (kind, what) in enumerate(moves):
            if kind in ("node", "job"):
                label = {"node": what} if kind == "node" else {"job_name": what}
                await at.post(at.alert("NVLink" if kind == "node" else "Slow", fingerprint=f"f{number}", **label))
            elif kind == "place":
                at.inventory[f"told:node:{what[0]}"] = sorted(what[1])  # type: ignore[assignment]
            elif kind == "pass":
                await at.pass_time(what)
            else:
                await at.restart(after=what)
        await at.pass_time(3600)
        runs = await at.runs()
        await at.engine.stop()
        return runs

    runs = virtual_time.run(play())
    assert not [run for run in runs if run.is_open]
    acted = [run for run in runs if run.acted_at is not None]
    for run in runs:
        if run.acted_at is None:
            is_refused = run.status is Status.NOT_STARTED
            assert is_refused or run.status is Status.SUCCEEDED, run.message
    for one, other in itertools.combinations(acted, 2):
        if any(mine.overlaps(yours) for mine in one.targets for yours in other.targets):
            first, second = sorted((one, other), key=lambda run: run.acted_at or run.created_at)
            assert first.ended_at is not None
            assert second.acted_at is not None
            assert first.ended_at <= second.acted_at
    by_target: dict[str, list[Run]] = {}
    for run in acted:
        if run.playbook == "nvlink":
            by_target.setdefault(run.target_key, []).append(run)
    for of_target in by_target.values():
        for earlier, later in itertools.pairwise(of_target):
            assert earlier.ended_at is not None
            assert later.created_at - earlier.ended_at >= timedelta(minutes=2)
