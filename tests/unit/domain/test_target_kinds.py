"""Each place that names the kinds of targets, or their parts, knows all of them.

A failure names the file to edit. mypy finds more places, such as ``domain/places``: a ``match`` over kinds has no
default.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.contract import test_findings
from tests.contract.run_store_values import at, run
from trainmedic.wire.envelope import Command
from trainmedic_core.target import MEMBER_KINDS, PARTS, Target, TargetKind
from trainmedic_server.actions.commands import CommandAction
from trainmedic_server.actions.registry import BUILT_IN
from trainmedic_server.adapters import redis_bus
from trainmedic_server.adapters.grafana_annotations import GrafanaAnnotations
from trainmedic_server.adapters.sql_store import finding_rows, mapping
from trainmedic_server.adapters.sql_store.finding_tables import findings
from trainmedic_server.adapters.sql_store.schema import runs
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.api import history as history_api
from trainmedic_server.api.finding_views import FindingView
from trainmedic_server.api.views import HistoryItem
from trainmedic_server.catalog import definition_check
from trainmedic_server.cli.history import history
from trainmedic_server.console import playbook_pages
from trainmedic_server.domain import beginnings, component, inventory, places, selectors
from trainmedic_server.domain.claim import Claim
from trainmedic_server.domain.playbook import Playbook
from trainmedic_server.domain.playbook_target import GroupTarget, TargetParts
from trainmedic_server.domain.selectors import Selector
from trainmedic_server.domain.target_resolution import resolve
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine.locks import TargetLocks
from trainmedic_server.errors import PayloadError
from trainmedic_server.ports.store import HistoryFilter

ROOT = Path(__file__).parents[3]
SERVER = "app/trainmedic_server/"
TOPOLOGY = Topology(inventory.parse({"attributes:n1": "rack=r1", "gpus:n1": "GPU-a", "told:node:n1": "llm"}))
COMMANDED = frozenset(kind for each in BUILT_IN if issubclass(each, CommandAction) for kind in each.targets)
NAMED = pytest.mark.parametrize("kind", [kind for kind in TargetKind if kind.parts])


def a_target(kind: TargetKind) -> Target:
    group = "nodes:rack=r1" if kind is TargetKind.GROUP else None
    return Target(kind, group=group, **{part: f"{part}-1" for part in kind.parts})


PLACES: dict[str, Collection[Any]] = {
    "domain/playbook_target.py: TargetParts": TargetParts.model_fields,
    "ports/store.py: HistoryFilter; adapters/sql_store/history_page.py": HistoryFilter.__struct_fields__,
    "api/history.py: _filter": inspect.signature(history_api._filter(SystemClock())).parameters,
    "adapters/sql_store/schema.py: runs; a migration": runs.c.keys(),
    "adapters/sql_store/finding_tables.py; a migration": findings.c.keys(),
    "api/views.py: HistoryItem": HistoryItem.model_fields,
    "api/finding_views.py: FindingView": FindingView.model_fields,
    "cli/history.py: _FILTERS": [parameter.name for parameter in history.params],
}


@pytest.mark.parametrize("place", PLACES)
def test_each_part_has_its_member(place: str) -> None:
    """A part is a name, such as the node's."""
    assert set(PARTS) <= set(PLACES[place]), f"edit {SERVER}{place}"


def test_groups_have_their_selector() -> None:
    """A kind with a plural can be a member of a group."""
    assert set(GroupTarget.model_fields) == set(MEMBER_KINDS), f"edit {SERVER}domain/playbook_target.py: GroupTarget"


@pytest.mark.parametrize("kind", MEMBER_KINDS.values())
def test_members_of_a_group_are_selected(kind: TargetKind) -> None:
    """In a topology with one node, one GPU and one job."""
    selection = selectors.resolve(Selector(kind), TOPOLOGY)
    assert isinstance(selection, selectors.Selection), f"edit {SERVER}domain/selectors.py and this test's topology"
    assert {member.kind for member in selection.members} == {kind}, f"edit {SERVER}domain/selectors.py: resolve"
    assert selectors.vanished(a_target(kind), TOPOLOGY), f"edit {SERVER}domain/selectors.py: vanished"


@pytest.mark.parametrize("kind", TargetKind)
def test_a_kind_has_its_key_and_its_rows(kind: TargetKind) -> None:
    """The text form names the same target, and so do the database's rows."""
    target = a_target(kind)
    assert Target.of_key(target.key) == target
    assert mapping.run_of(mapping.run_row(run(target=target)), ()).target == target, (
        f"edit {SERVER}adapters/sql_store/mapping.py"
    )


@pytest.mark.parametrize("kind", [kind for kind in TargetKind if kind is not TargetKind.GROUP])
def test_a_kind_is_named_by_labels(kind: TargetKind) -> None:
    """Labels of the end of a run name its target again."""
    target = a_target(kind)
    assert resolve(kind, beginnings.labels_of(target), TOPOLOGY) == target, (
        f"edit {SERVER}domain/beginnings.py: labels_of; trainmedic_core/target_labels.py; "
        "domain/target_resolution.py: resolve"
    )
    finding = replace(test_findings.EVERYTHING, target=target)
    assert finding_rows.finding_of(finding_rows.finding_row(finding)).target == target, (
        f"edit {SERVER}adapters/sql_store/finding_rows.py"
    )


@NAMED
def test_a_kind_overlaps_or_is_apart_from_each_other(kind: TargetKind) -> None:
    """Runs on a whole and on its part exclude each other."""
    apart = {frozenset({TargetKind.NODE, TargetKind.JOB}), frozenset({TargetKind.GPU, TargetKind.JOB})}
    for other in (one for one in TargetKind if one.parts):
        overlap, reverse = a_target(kind).overlaps(a_target(other)), a_target(other).overlaps(a_target(kind))
        assert overlap == reverse
        assert overlap is (frozenset({kind, other}) not in apart), (
            f"edit logs/trainmedic_core/target.py: Target.overlaps, if {kind} and {other} can contain each other, else "
            "this test's `apart`"
        )
        locks = TargetLocks()
        assert locks.try_acquire("a", Claim(a_target(kind)))
        assert locks.try_acquire("b", Claim(a_target(other))) is not overlap, (
            f"edit {SERVER}engine/locks.py: _groups_near finds overlapping claims by `Target.whole`"
        )


@pytest.mark.parametrize("kind", TargetKind)
def test_a_kind_has_a_component(kind: TargetKind) -> None:
    """Of a run without another sign."""
    assert kind in component._BY_TARGET, f"edit {SERVER}domain/component.py: _BY_TARGET"


@pytest.mark.parametrize("kind", [kind for kind in TargetKind if kind.parts and kind in COMMANDED])
def test_commands_have_an_address(kind: TargetKind) -> None:
    """Of the job or the agent that performs them."""
    target = {"kind": str(kind), **dict.fromkeys(kind.parts, "x")}
    command = Command("c", "a", target, {}, "r", "p", "", at(0), at(1))
    where = (
        f"edit {SERVER}actions/commands.py: _command, _presence; adapters/redis_bus.py: _address_of; for a receiver of "
        "its own sdk/trainmedic/wire/envelope.py, signing.py and trainmedic_server/cli/key.py"
    )
    try:
        assert redis_bus._address_of(command).stream, where
    except Exception as error:
        pytest.fail(f"{where} ({error})")


@NAMED
def test_a_history_is_filtered_by_its_key(kind: TargetKind) -> None:
    history_api._check([a_target(kind).key])
    with pytest.raises(PayloadError, match="is not a target"):
        history_api._check([f"{kind}:"])


@NAMED
def test_a_schedule_names_its_target(kind: TargetKind) -> None:
    """There is no alert whose labels could."""
    written = {
        "playbook": "p",
        "on": {"schedule": "0 3 * * *"},
        "target": str(kind),
        "steps": [{"id": "a", "wait": "1m"}],
    }
    problems = [text for _, text in definition_check.problems(Playbook.model_validate(written))]
    assert any("is named by an alert's labels" in text for text in problems), (
        f"edit {SERVER}catalog/definition_check.py: _without_alert"
    )


@pytest.mark.parametrize("kind", [kind for kind in TargetKind if kind is not TargetKind.GROUP])
def test_a_minimum_needs_a_kind_whose_nodes_count(kind: TargetKind) -> None:
    """``min_available`` counts what ``counted_nodes`` returns."""
    written = {
        "playbook": "p",
        "on": {"alert": "A"},
        "target": str(kind),
        "guards": {"min_available": 1},
        "steps": [{"id": "a", "wait": "1m"}],
    }
    problems = [text for _, text in definition_check.problems(Playbook.model_validate(written))]
    is_refused = any(text.startswith("min_available: ") for text in problems)
    assert is_refused is not bool(places.counted_nodes(a_target(kind))), (
        f"edit {SERVER}catalog/definition_check.py: _durations"
    )


@NAMED
def test_an_annotation_has_each_name_as_a_tag(kind: TargetKind) -> None:
    target = a_target(kind)
    tags = GrafanaAnnotations(cast(Any, None), cast(Any, None), "")._annotation(
        run(target=target), at(0), None, "run:1"
    )["tags"]
    assert {f"{part}:{getattr(target, part)}" for part in kind.parts} <= set(tags), (
        f"edit {SERVER}adapters/grafana_annotations.py: _annotation"
    )


@NAMED
def test_targets_are_offered_in_the_console(kind: TargetKind) -> None:
    """In the form that starts a playbook."""
    assert kind in playbook_pages._LISTED, f"edit {SERVER}console/playbook_pages.py: _LISTED"


@pytest.mark.parametrize("kind", [kind for kind in TargetKind if kind is not TargetKind.GROUP])
def test_a_kind_is_in_the_reference(kind: TargetKind) -> None:
    """With the labels that name it."""
    assert f"\n- **{kind}**: " in (ROOT / "docs/reference/playbooks.md").read_text(), "edit docs/reference/playbooks.md"
