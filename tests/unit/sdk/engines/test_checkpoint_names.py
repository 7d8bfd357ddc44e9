"""The node agent recognizes the checkpoint directories of every framework that writes them itself."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import trainmedic
from trainmedic.trainer.self_saving import SelfSavingFramework
from trainmedic_agent.disk import checkpoint_names


def frameworks() -> list[type[SelfSavingFramework]]:
    """Return all of the package, also those that a later release adds."""
    packages = [f"trainmedic.{each.name}" for each in pkgutil.iter_modules(trainmedic.__path__) if each.ispkg]
    for module in [f"{package}.training" for package in packages if find_spec(f"{package}.training")]:
        importlib.import_module(module)
    return SelfSavingFramework.__subclasses__()


@pytest.mark.parametrize("framework", frameworks(), ids=lambda framework: framework.__name__)
def test_the_agent_knows_the_names_of_checkpoints(framework: type[SelfSavingFramework]) -> None:
    """Else it would take none of them for a checkpoint, and delete or keep its files by their own."""
    name = framework.layout.path_of(Path("runs"), 150).name
    is_known = checkpoint_names.is_name_of_checkpoint(name)
    assert is_known, f"add the form of {name} ({framework.__name__}) to trainmedic_agent/disk/checkpoint_names.py"
    assert checkpoint_names.step_of(name) == 150


def test_the_frameworks_are_found() -> None:
    assert {framework.__name__ for framework in frameworks()} >= {"MegatronTraining", "TitanTraining"}
