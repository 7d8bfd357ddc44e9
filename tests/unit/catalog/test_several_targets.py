"""Playbooks with a node and the jobs on it as targets, when they are loaded."""

from __future__ import annotations

import pytest

from trainmedic_server import errors
from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.domain.playbook import ActionStep

ACTIONS = registry.Registry({action.name: action for action in registry.BUILT_IN})
NODE = "{node: '{{ labels.node }}', jobs: on_node}"
PAUSE = "{action: job.pause}"


def compiled(*steps: str, target: str = NODE, more: str = "") -> YamlPlaybook:
    written = "".join(f"  - {step}\n" for step in steps)
    text = f"playbook: p\non: {{alert: A}}\ntarget: {target}\nsteps:\n{written}{more}"
    return loader.load_one(text, "p.yaml", ACTIONS)


@pytest.mark.parametrize(
    ("step", "target"),
    [
        (PAUSE, "jobs"),
        ("{action: job.pause, target: jobs}", "jobs"),
        ("{action: k8s.cordon}", None),
        ("{action: k8s.cordon, target: node}", None),
        ("{action: node.facts}", None),
        ("{action: notify, with: {message: '{{ target.jobs }} on {{ target.node }}'}}", None),
        ("{action: notify, target: jobs, with: {message: a}}", "jobs"),
        ("{action: slurm.requeue, target: jobs}", "jobs"),
        ("{action: slurm.requeue, target: node}", None),
    ],
)
def test_a_target_comes_from_the_step_or_its_action(step: str, target: str | None) -> None:
    """None is the first target."""
    last = compiled(PAUSE, step).definition.steps[-1]
    assert isinstance(last, ActionStep)
    assert last.target == target


@pytest.mark.parametrize("target", ["{gpus: all, jobs: on_node}", "{node: a, gpu: '0', jobs: on_node}"])
def test_gpus_and_groups_have_jobs_on_their_node_too(target: str) -> None:
    """A group's members have them, its parent has not."""
    steps = ("{action: gpu.power_limit, target: gpu, with: {percent: 80}}", PAUSE)
    assert compiled(*steps, target=target).definition.has_jobs
    message = "on_success: [{action: notify, with: {message: '{{ target.jobs }}'}}]"
    with pytest.raises(errors.PlaybookError, match="a target of kind group has no 'jobs'"):
        compiled(*steps, target="{gpus: all, jobs: on_node}", more=message)


@pytest.mark.parametrize(
    ("target", "steps", "why"),
    [
        (NODE, ["{action: slurm.requeue}"], "could work on the node or on the jobs; write target: node, or jobs"),
        (NODE, ["{action: slurm.requeue, target: gpu}"], "write node or jobs"),
        (NODE, ["{action: k8s.cordon, target: jobs}"], "works on a gpu or node, not on a job"),
        (NODE, ["{action: job.pause, target: node}"], "works on a job, not on a node"),
        (
            NODE,
            ["{action: node.facts, target: jobs}"],
            "on all nodes of one job, not on several jobs; write target: node",
        ),
        (NODE, ["{action: k8s.cordon}"], "target.jobs: no step works on the jobs"),
        (NODE, [PAUSE, "{approve: a, target: jobs}"], "with several, a step that acts says which"),
        (
            NODE,
            ["{action: job.command, with: {name: a.b}, undo: {action: node.facts}}"],
            "node.facts works on the nodes of one job",
        ),
        ("node", ["{action: k8s.cordon, target: node}"], "the steps have one target here; leave it out"),
        ("{nodes: all}", ["{action: k8s.cordon, target: node}"], "the steps have one target here"),
        ("{job: a, jobs: on_node}", [PAUSE], "on_node needs a node"),
        ("{node: a, jobs: all}", [PAUSE], "write jobs: on_node"),
        ("{nodes: on_node}", [PAUSE], "on_node is for jobs, next to a node"),
        ("{nodes: all, jobs: all}", [PAUSE], "jobs on its nodes are jobs: on_node"),
        ("node", ["{action: notify, with: {message: '{{ target.jobs }}'}}"], "a target of kind node has no 'jobs'"),
    ],
)
def test_ambiguous_targets_are_rejected_with_the_remedy(target: str, steps: list[str], why: str) -> None:
    """The error is at the line of the step or target."""
    with pytest.raises(errors.PlaybookError, match=why):
        compiled(*steps, target=target)
