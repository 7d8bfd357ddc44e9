"""A name means one thing in the server and the SDK together, and says what it names; nothing grows too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.tree_figures import VAGUE, TreeFigures

SHARED_CLASS_NAMES = {
    "Callback": "public: each framework's users write trainmedic.<framework>.Callback",
    "Run": "on the server an execution of a playbook; public in trainmedic.torch, where it is the user's training run",
}
"""Class names that stand for several classes, and the reason for each."""

MOST_VAGUE = 0.01


@pytest.fixture(scope="module")
def figures() -> TreeFigures:
    return TreeFigures(Path(__file__).parents[2])


def test_a_class_name_denotes_one_class(figures: TreeFigures) -> None:
    """A name in a log, a traceback or another module identifies the class."""
    shared = figures.shared_class_names()
    assert {name: files for name, files in shared.items() if name not in SHARED_CLASS_NAMES} == {}
    assert SHARED_CLASS_NAMES.keys() <= shared.keys(), "an exception that is not needed any more"


def test_variable_names_are_descriptive(figures: TreeFigures) -> None:
    """Fewer than 1 % have a name such as ``found`` or ``one``."""
    names = figures.variables()
    vague = [name for name in names if name in VAGUE]
    assert len(vague) < MOST_VAGUE * len(names), f"{len(vague)} of {len(names)}"


def test_functions_and_files_stay_short(figures: TreeFigures) -> None:
    """A longer function or file does more than one thing."""
    assert (figures.long_functions(), figures.long_files()) == ([], [])


def test_no_module_imports_itself_indirectly(figures: TreeFigures) -> None:
    """Not even for type checkers: modules in a cycle can only be read together."""
    assert figures.cycle() == []


def test_broad_excepts_state_their_reason(figures: TreeFigures) -> None:
    """Each has a comment next to it that says which boundary it guards."""
    _, bare = figures.broad_excepts()
    assert bare == []
