"""Each action that a node's agent performs is known at every place that lists them.

A failure names the file to edit. Other tests compare the references, the prefixes and the list of those that ask first.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from pathlib import Path

import msgspec
import pytest

import trainmedic_agent
from trainmedic_agent import policy
from trainmedic_agent.wiring import agent as agent_wiring
from trainmedic_agent.wiring import agent_check
from trainmedic_server.actions import node_repairs, registry
from trainmedic_server.actions.commands import CommandAction
from trainmedic_server.catalog import written_actions
from trainmedic_server.presentation import steps

ROOT = Path(__file__).parents[3]
COMMANDS = {spec.name: spec for spec in registry.BUILT_IN if issubclass(spec, CommandAction)}
OF_NODES = [name for name in COMMANDS if not name.startswith(("job.", "launcher."))]
REPAIRS = [spec.name for spec in node_repairs.ACTIONS]
FREE_OUTPUT = {"disk.clean", "disk.prune_containers"}
"""Their outputs have the policy's rules as keys."""


@functools.cache
def executors() -> dict[str, str]:
    """The agent's classes with the name of an action, some of them as the default of a field."""
    names = [each.name for each in pkgutil.walk_packages(trainmedic_agent.__path__, "trainmedic_agent.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    found: dict[str, str] = {}
    for each in {each for module in modules for _, each in inspect.getmembers(module, inspect.isclass)}:
        action = getattr(each, "action", None)
        if issubclass(each, msgspec.Struct) and "action" in each.__struct_fields__:
            action = next(field.default for field in msgspec.structs.fields(each) if field.name == "action")
        if isinstance(action, str):
            found[action] = each.__name__
    return found


@pytest.mark.parametrize("name", [name for name in OF_NODES if written_actions.can_be_undone(COMMANDS[name])])
def test_an_undo_by_the_same_action_is_always_allowed(name: str) -> None:
    """A policy that became stricter must not keep an effect active."""
    inverse = COMMANDS[name].inverse.__qualname__
    assert name in policy._REVERTIBLE, f"edit agent/trainmedic_agent/policy.py: _REVERTIBLE ({inverse} undoes {name})"


@pytest.mark.parametrize("name", OF_NODES)
def test_a_command_to_a_node_is_complete(name: str) -> None:
    """It has its sentence, output, policy and executor."""
    assert name in steps._PHRASES, "edit app/trainmedic_server/presentation/steps.py: _PHRASES (and _PAST)"
    outputs = getattr(COMMANDS[name], "outputs", ())
    assert outputs or name in FREE_OUTPUT, "edit app/trainmedic_server/actions/agent_outputs.py, and set `outputs`"
    known = policy.READING | set(policy.CHANGING)
    assert name in known, "edit agent/trainmedic_agent/policy.py: CHANGING, or READING if it only reads"
    executor = executors().get(name)
    assert executor is not None, f"add an executor with action = {name!r} to agent/trainmedic_agent"
    assert executor in inspect.getsource(agent_wiring), "edit agent/trainmedic_agent/wiring/agent.py"


@pytest.mark.parametrize("name", REPAIRS)
def test_a_repair_has_its_permissions(name: str) -> None:
    """`trainmedic-agent check` looks for them, and the manual names them."""
    is_checked = f'"{name}"' in inspect.getsource(agent_check)
    assert is_checked, "edit agent/trainmedic_agent/wiring/agent_check.py"
    has_row = f"\n| `{name}` |" in (ROOT / "docs/how-to/agent.md").read_text()
    assert has_row, "edit docs/how-to/agent.md"
