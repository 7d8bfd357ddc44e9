"""Playbooks with acts that a person should approve."""

from __future__ import annotations

import pytest

from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader
from trainmedic_server.domain.modes import Mode
from trainmedic_server.errors import PlaybookError

ACTIONS = registry.specs_only()
ASKING = {
    "gpu.reset",
    "node.power",
    "node.power_cycle",
    "node.reboot",
    "node.restart_container",
    "node.restart_unit",
    "slurm.reboot",
}


def mode_of(steps: str, more: str = "") -> Mode:
    text = f"playbook: p\non: {{alert: A}}\ntarget: gpu\n{more}\nsteps:\n{steps}\n"
    return loader.load_one(text, "p.yaml", ACTIONS).definition.mode


def test_disruptive_actions_ask_first() -> None:
    """These are all actions that interrupt a node and cannot be undone by Trainmedic."""
    assert {spec.name for spec in registry.BUILT_IN if getattr(spec, "asks_first", False)} == ASKING


@pytest.mark.parametrize(
    "steps",
    [
        "  - {action: gpu.reset}",
        "  - {action: node.facts}\non_failure:\n  - {action: node.reboot}",
        "  - action: node.restart_unit\n    with: {unit: a.service}",
        "  - action: http.request\n    with: {method: POST, url: https://a}\n"
        "    undo: {action: node.power, with: {do: on, url: https://bmc}}",
    ],
)
def test_a_playbook_with_a_disruptive_action_asks_unless_it_names_a_mode(steps: str) -> None:
    """The action may be anywhere in the playbook."""
    assert mode_of(steps) is Mode.APPROVE
    assert mode_of(steps, "mode: enforce") is Mode.ENFORCE
    assert mode_of(steps, "mode: observe") is Mode.OBSERVE


def test_a_timeout_too_short_for_a_reboot_is_rejected_with_the_remedy() -> None:
    """The agent restarts the node after one minute."""
    for timeout in ("30s", "1m"):
        with pytest.raises(PlaybookError, match=rf"6:36: timeout: .*cannot succeed in {timeout}; write 2m or more"):
            mode_of(f"  - {{action: node.reboot, timeout: {timeout}}}")
    mode_of("  - {action: node.reboot, timeout: 2m}")


def test_other_playbooks_act_as_before() -> None:
    """Reading facts asks no one."""
    assert mode_of("  - {action: node.facts}\n  - {action: gpu.power_limit, with: {percent: 80}}") is Mode.ENFORCE
