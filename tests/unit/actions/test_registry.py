"""The registry of actions."""

from __future__ import annotations

import sys
from datetime import timedelta
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
from pydantic import BaseModel
from structlog.testing import capture_logs

from trainmedic_core.target import TargetKind
from trainmedic_server.actions import jobs, messages, registry
from trainmedic_server.actions.commands import CommandAction
from trainmedic_server.errors import PermanentFailure
from trainmedic_server.ports.actions import Services


class NoParams(BaseModel):
    """Of an action that takes none."""


class Page:
    """An action of another package."""

    name = "acme.page"
    summary = "Page somebody."
    targets = frozenset({TargetKind.NODE})
    harmful = False
    default_timeout = timedelta(seconds=1)
    Params = NoParams

    def __init__(self, services):
        self.services = services

    async def perform(self, call):
        return {}

    def outcome_saved(self, command_id):
        """Nothing."""

    @classmethod
    def inverse(cls, params, output):
        return None


@pytest.fixture
def offered(monkeypatch):
    """Entry points of another package, by the object that each names."""
    module = ModuleType("acme_actions")
    monkeypatch.setitem(sys.modules, "acme_actions", module)

    def offer(**objects):
        for name, made in objects.items():
            setattr(module, name, made)
        return [EntryPoint(name, f"acme_actions:{name}", registry.GROUP) for name in objects]

    return offer


def _variant(**members):
    return type("Variant", (Page,), members)


def test_every_built_in_action_is_well_formed():
    """The built-in actions pass the same checks as those of other packages, and no two share a name."""
    assert [registry._why_invalid(spec) for spec in registry.BUILT_IN] == [None] * len(registry.BUILT_IN)
    names = [spec.name for spec in registry.BUILT_IN]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("spec", registry.BUILT_IN, ids=lambda spec: spec.name)
def test_every_parameter_is_described_and_unknown_ones_are_rejected(spec):
    """An editor can show what each parameter is for, and a misspelt one is an error."""
    assert all(field.description for field in spec.Params.model_fields.values())
    assert spec.Params.model_config.get("extra") == "forbid"
    assert spec.Params.model_config.get("frozen") is True


def test_a_jobs_own_command_cannot_have_an_actions_prefix():
    """Each action that is itself a command has a prefix that `job.command` rejects."""
    prefixes = {spec.name.partition(".")[0] for spec in registry.BUILT_IN if issubclass(spec, CommandAction)}
    assert prefixes == set(jobs._OWN_PREFIXES), "edit app/trainmedic_server/actions/jobs.py: _OWN_PREFIXES"


def test_checking_needs_no_services():
    """Every class is available offline, and executing one is refused."""
    actions = registry.specs_only()
    assert actions.action_class("notify") is messages.Notify
    assert actions.action_class("notfy") is None
    with pytest.raises(PermanentFailure, match="notify can be checked here, not performed"):
        actions.get("notify")


def test_an_unknown_action_fails_permanently():
    """The error names the action."""
    with pytest.raises(PermanentFailure, match=r"there is no action gpu\.overclock"):
        registry.specs_only().get("gpu.overclock")


def test_another_package_adds_an_action(offered):
    """An action named by an entry point is found and created like a built-in one."""
    specs, problems = registry.combine([messages.Notify], offered(Page=Page))
    actions = registry.Registry(specs, Services(clock=None, bus=None, http=None), problems)
    assert actions.names() == ["acme.page", "notify"]
    assert isinstance(actions.get("acme.page"), Page)
    assert actions.problems == []


def test_a_broken_entry_point_does_not_affect_other_actions(offered):
    """It is reported with the package's own error, and the others are available."""
    points = [EntryPoint("gone", "acme_gone:Gone", registry.GROUP), *offered(Page=Page)]
    specs, problems = registry.combine([messages.Notify], points)
    assert sorted(specs) == ["acme.page", "notify"]
    assert problems == [
        "entry point gone = acme_gone:Gone (of an unknown package) cannot be loaded: "
        "ModuleNotFoundError: No module named 'acme_gone'"
    ]


def test_an_action_with_unreadable_parameters_does_not_affect_other_actions(tmp_path, monkeypatch):
    """pydantic reports it at import of the package, not when the first playbook uses the action."""
    (tmp_path / "acme_unread.py").write_text(
        "from trainmedic_server.extending import ActionParams\n"
        "class Team: ...\n"
        "class Page:\n"
        "    class Params(ActionParams):\n"
        "        team: Team\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("acme.page", "acme_unread:Page", registry.GROUP)
    specs, [problem] = registry.combine([messages.Notify], [point])
    assert sorted(specs) == ["notify"]
    named = "entry point acme.page = acme_unread:Page (of an unknown package) cannot be loaded: "
    assert problem.startswith(named + "PydanticSchemaGenerationError: Unable to generate pydantic-core schema for ")


def test_an_action_that_cannot_be_created_does_not_affect_other_actions():
    """Its class is still available for checking."""

    def refuse(self, services):
        raise RuntimeError("no licence")

    broken = _variant(__init__=refuse)
    services = Services(clock=None, bus=None, http=None)
    with capture_logs() as logged:
        actions = registry.Registry({"notify": messages.Notify, "acme.page": broken}, services)
    assert (logged[0]["event"], logged[0]["exc_info"]) == ("cannot create action", True)
    assert isinstance(actions.get("notify"), messages.Notify)
    assert actions.action_class("acme.page") is broken
    assert actions.problems == ["action acme.page cannot be created: RuntimeError: no licence"]
    with pytest.raises(PermanentFailure, match="page could not be created; see the log"):
        actions.get("acme.page")
    with pytest.raises(PermanentFailure):
        actions.get("acme.page")


def test_no_package_replaces_an_existing_action(offered):
    """This holds for built-in actions and those of other packages."""
    points = offered(Impostor=_variant(name="notify"), One=Page, Two=_variant())
    specs, problems = registry.combine([messages.Notify], points)
    assert specs == {"notify": messages.Notify, "acme.page": Page}
    assert [problem.rpartition(": ")[2] for problem in problems] == [
        "there is an action notify already",
        "there is an action acme.page already",
    ]


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        ({"name": "Page!"}, "a name is lower-case words"),
        ({"name": None}, "a name is lower-case words"),
        ({"summary": None}, "no summary"),
        ({"targets": frozenset()}, "targets"),
        ({"targets": frozenset({"node"})}, "targets"),
        ({"harmful": "no"}, "harmful"),
        ({"default_timeout": 3}, "default_timeout"),
        ({"Params": dict}, "pydantic"),
        ({"perform": None}, "no method perform"),
        ({"perform": lambda self, call: {}}, "perform is not async"),
    ],
)
def test_a_class_that_is_no_action_is_rejected_with_its_fault(offered, members, fault):
    """The message says what the class lacks."""
    _, (problem,) = registry.combine([], offered(Page=_variant(**members)))
    assert fault in problem


def test_an_entry_point_that_names_no_class_is_rejected(offered):
    """A function or a module is not an action."""
    _, (problem,) = registry.combine([], offered(page=print))
    assert "it is not a class" in problem
