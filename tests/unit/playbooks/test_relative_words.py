"""What a playbook calls lower, smaller or fewer is so, or is left out, whatever its variables are set to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.playbooks.test_shipped_playbooks import FILES
from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader
from trainmedic_server.domain.playbook import ActionStep

ACTIONS = registry.specs_only()
SCALING = {"job.scale_lr": "learning_rate_factor", "job.scale_batch": "batch_factor"}
"""What is multiplied, and the variable with the factor."""


def steps(path: Path, action: str) -> list[ActionStep]:
    (book,) = loader.load_file(path, ACTIONS).playbooks
    return [step for step in book.definition.steps if isinstance(step, ActionStep) and step.action == action]


def test_loader_workers_are_only_ever_lowered() -> None:
    """By no playbook is their number set, which would raise that of a job with fewer."""
    found = [step for path in FILES for step in steps(path, "job.dataloader_workers")]
    assert len(found) == 3
    assert all(step.with_.keys() == {"at_most"} for step in found)


@pytest.mark.parametrize("action", SCALING)
def test_what_is_scaled_is_made_smaller_or_left_alone(action: str) -> None:
    """Each step asks for a factor below one itself, for people set the variable; or its change is taken back where it
    did not help."""
    found = [(path, step) for path in FILES for step in steps(path, action)]
    assert found
    for path, step in found:
        assert step.with_["factor"] == f"{{{{ vars.{SCALING[action]} }}}}", path
        assert f"vars.{SCALING[action]} < 1" in (step.when or "") or step.undo == "on_failure", path


def scope(**variables: Any) -> dict[str, Any]:
    step = {"status": "timed_out", "output": {}, "error": None}
    return {
        "vars": variables, "labels": {}, "alert": {"name": "X"}, "job": {"verdict": {"cause": "gpu_memory"}},
        "steps": {"calms_down": step, "enough": step, "go_back": {**step, "status": "succeeded"}},
    }  # fmt: skip


@pytest.mark.parametrize("factor", [0.25, 0.999, 1, 1.0, 1.5, 4])
@pytest.mark.parametrize("name", ["training-loss-spike", "gradient-explosion", "training-loss-unstable"])
def test_a_factor_of_one_or_more_slows_no_training_down(name: str, factor: float) -> None:
    """At the edge and beyond it."""
    path = next(path for path in FILES if path.stem == name)
    (book,) = loader.load_file(path, ACTIONS).playbooks
    place = next(i for i, step in enumerate(book.definition.steps) if getattr(step, "action", "") == "job.scale_lr")
    assert book.when("steps", place, scope(learning_rate_factor=factor)) is (factor < 1)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_second_power_limit_is_below_the_first(path: Path) -> None:
    """And both are below what the card has by default."""
    limits = [step.with_["percent"] for step in steps(path, "gpu.power_limit")]
    assert limits == sorted(limits, reverse=True)
    assert all(limit < 100 for limit in limits)
