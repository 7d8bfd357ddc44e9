"""Modes of parts of the cluster: a canary pool acts while the rest only observes, or the other way round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.engine.world import World
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.catalog import modes_file
from trainmedic_server.domain import inventory
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.run import Decision, Status
from trainmedic_server.domain.target_modes import TargetModes
from trainmedic_server.domain.topology import Topology
from trainmedic_server.errors import ConfigurationError

MakeWorld = Callable[..., World]
POOLS = {
    "attributes:n[1-2]": "pool=canary",
    "attributes:n[3-4]": "pool=prod",
    "gpus:n[1-4]": "1",
    "told:node:n1": "job-c",
    "told:node:n2": "job-both",
    "told:node:n3": "job-both",
    "told:node:n4": "job-p",
}
CANARY = "modes:\n  - {nodes: {pool: canary}, mode: enforce}\n"
BOOK = """
playbook: cap
on: {alert: Hot}
target: node
steps:
  - {action: test.cap}
"""
GROUP = BOOK.replace("target: node", "target: {nodes: all}\nrollout: {serial: 100%}")


def loaded(path: Path, text: str) -> TargetModes:
    (path / "modes.yaml").write_text(text)
    return modes_file.load(path / "modes.yaml")


def node(name: str) -> Target:
    return Target(TargetKind.NODE, node=name)


def job(name: str) -> Target:
    return Target(TargetKind.JOB, job=name)


@pytest.mark.parametrize(
    ("target", "mode"),
    [
        (node("n1"), Mode.ENFORCE),
        (node("n3"), Mode.OBSERVE),
        (Target(TargetKind.GPU, node="n2", gpu="0"), Mode.ENFORCE),
        (job("job-c"), Mode.ENFORCE),
        (job("job-both"), Mode.OBSERVE),
        (job("nobody"), Mode.OBSERVE),
        (Target(TargetKind.CLUSTER), Mode.OBSERVE),
        (None, Mode.OBSERVE),
    ],
)
def test_an_entry_replaces_the_mode_of_its_targets(tmp_path: Path, target: Target | None, mode: Mode) -> None:
    """A job on nodes of both pools has the strictest mode, as has one whose nodes are not known."""
    modes = loaded(tmp_path, CANARY)
    assert modes.of(target, Mode.OBSERVE, Topology(inventory.parse(POOLS)))[0] is mode


def test_where_it_is_not_known_which_entries_fit_the_strictest_counts(tmp_path: Path) -> None:
    """A misspelt attribute, a silent source or a job without known nodes never loosens the mode."""
    modes = loaded(tmp_path, "modes: [{nodes: {pol: prod}, mode: observe}, {nodes: all, mode: enforce}]\n")
    known = Topology(inventory.parse(POOLS))
    mode, why = modes.of(node("n1"), Mode.ENFORCE, known)
    assert (mode, why) == (
        Mode.OBSERVE,
        "the modes file says: nodes:pol=prod observe (no node has an attribute 'pol')",
    )
    modes = loaded(tmp_path, "modes: [{nodes: {pool: prod}, mode: observe}]\n")
    assert modes.of(node("n1"), Mode.ENFORCE, known) == (Mode.ENFORCE, "")
    assert modes.of(job("new"), Mode.ENFORCE, known)[0] is Mode.OBSERVE
    silent = Topology(inventory.parse(POOLS), agents_answer=False)
    assert modes.of(node("n1"), Mode.ENFORCE, silent)[0] is Mode.OBSERVE


def test_the_first_entry_that_fits_counts(tmp_path: Path) -> None:
    """Jobs by name come before their nodes; host lists name nodes."""
    modes = loaded(
        tmp_path,
        "modes:\n"
        "  - {jobs: {name: [job-p]}, mode: approve}\n"
        "  - {nodes: {name: 'n[3-4]', pool: prod}, mode: approve}\n"
        "  - {nodes: all, mode: observe}\n",
    )
    known = Topology(inventory.parse(POOLS))
    found = [modes.of(each, Mode.ENFORCE, known)[0] for each in (job("job-p"), node("n3"), node("n1"), job("job-both"))]
    assert found == [Mode.APPROVE, Mode.APPROVE, Mode.OBSERVE, Mode.OBSERVE]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("modes: []", "1:8"),
        ("modes:\n  - {gpus: all, mode: enforce}\n", "2:6"),
        ("modes:\n  - {nodes: all, mode: on}\n", "mode"),
        ("modes:\n  - {mode: observe}\n", "name one of nodes and jobs"),
        ("modes:\n  - {jobs: {pool: a}, mode: observe}\n", "jobs are selected by name"),
        ("modes:\n  - {nodes: {name: 'n[1-'}, mode: observe}\n", "']'"),
        ("modes:\n  - {nodes: {}, mode: observe}\n", "or write all"),
        (
            "modes:\n  - {nodes: {pool: '{{ labels.pool }}'}, mode: observe}\n",
            "pool: write a name for '{{ labels.pool }}'",
        ),
        ("a: 1\n---\nb: 2\n", "one YAML document"),
        ("", "one YAML document"),
        ("modes: [", "modes.yaml"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """With file and place."""
    with pytest.raises(ConfigurationError) as refused:
        loaded(tmp_path, text)
    assert told in str(refused.value)
    assert "modes.yaml" in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A server without it would act, or not act, unlike what its operator thinks."""
    with pytest.raises(ConfigurationError, match=r"--modes: cannot read .*none\.yaml: No such file"):
        modes_file.load(tmp_path / "none.yaml")


async def test_the_canary_acts_and_the_rest_is_observed(world: MakeWorld, tmp_path: Path) -> None:
    """The stricter of the entry and the playbook counts; what was not done says why."""
    at = world(BOOK, inventory=POOLS, mode=Mode.OBSERVE, target_modes=loaded(tmp_path, CANARY))
    await at.engine.start()
    for name in ("n1", "n3"):
        await at.post(at.alert("Hot", node=name))
    await at.pass_time(1)
    runs = {run.target_key: (run.decision, run.status) for run in await at.runs()}
    assert runs == {
        "node:n1": (Decision.STARTED, Status.SUCCEEDED),
        "node:n3": (Decision.OBSERVE_ONLY, Status.OBSERVED),
    }
    assert at.calls() == {"cap": 1}
    strict = world(BOOK + "mode: observe\n", inventory=POOLS, target_modes=loaded(tmp_path, CANARY))
    await strict.engine.start()
    await strict.post(strict.alert("Hot", node="n1"))
    assert (await strict.run()).decision is Decision.OBSERVE_ONLY


async def test_observed_members_of_a_group_are_not_acted_on(world: MakeWorld, tmp_path: Path) -> None:
    """The others are; each by its own node."""
    text = "modes: [{nodes: {pool: prod}, mode: observe}]\n"
    at = world(GROUP, inventory=POOLS, target_modes=loaded(tmp_path, text), breaker_min_nodes=50)
    await at.engine.start()
    await at.post(at.alert("Hot"))
    await at.pass_time(1)
    parent = await at.run()
    assert (parent.status, parent.message) == (Status.SUCCEEDED, "4 members: 2 succeeded, 2 observed")
    assert at.calls() == {"cap": 2}


async def test_a_group_asks_where_one_member_needs_it(world: MakeWorld, tmp_path: Path) -> None:
    """The question is about the whole list."""
    text = "modes: [{nodes: {pool: prod}, mode: approve}]\n"
    at = world(GROUP, inventory=POOLS, target_modes=loaded(tmp_path, text), breaker_min_nodes=50)
    await at.engine.start()
    await at.post(at.alert("Hot"))
    await at.pass_time(1)
    assert (await at.run()).status is Status.AWAITING_APPROVAL
    assert at.calls() == {}


async def test_a_group_of_observed_members_says_why(world: MakeWorld, tmp_path: Path) -> None:
    """With the entry."""
    text = "modes: [{nodes: all, mode: observe}]\n"
    at = world(GROUP, inventory=POOLS, target_modes=loaded(tmp_path, text), breaker_min_nodes=50)
    await at.engine.start()
    await at.post(at.alert("Hot"))
    await at.pass_time(1)
    parent = await at.run()
    assert parent.status is Status.OBSERVED
    assert parent.message.endswith("the modes file says: nodes:all observe")
