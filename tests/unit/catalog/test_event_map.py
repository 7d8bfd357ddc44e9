"""Events in an alert map: what an entry may say, what is wrong with it, and what becomes of a body."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.unit.catalog.actions import TestActions, library
from trainmedic_server import errors
from trainmedic_server.catalog import alert_map, alert_map_compiler
from trainmedic_server.catalog.alert_map import CompiledFile
from trainmedic_server.ports.alert_map import MappedEvent

RACKS = """\
events:
  - event: rack
    when: body.state == "raised"
    key: "{{ body.id }}"
    labels:
      rack: "{{ body.place.rack }}"
      severity: "{{ body.level | default('warning') }}"
      hot: "{{ body.hot }}"
      fan: "{{ body.fan }}"
      site: north
  - event: rack
    when: body.state == "all"
    alerts: "{{ body.alerts }}"
"""


def mapped(body: Any, text: str = RACKS) -> MappedEvent | None:
    made = alert_map_compiler.compile_text(dedent(text), "map.yaml")
    assert isinstance(made, CompiledFile), made
    return alert_map.map_event(made.events, body)


def wrong(body: Any) -> dict[str, str]:
    with pytest.raises(errors.PayloadError) as raised:
        mapped(body)
    return dict(raised.value.problems)


def test_a_request_body_becomes_labels() -> None:
    """Numbers and truth values are written out; null and empty text set no label."""
    body = {"state": "raised", "id": 7, "place": {"rack": 12}, "hot": True, "fan": None}
    labels = {"rack": "12", "severity": "warning", "hot": "true", "site": "north"}
    assert mapped(body) == MappedEvent(labels, "7")


def test_the_first_entry_whose_condition_holds_counts() -> None:
    """If none holds, the event means nothing."""
    assert mapped({"state": "all", "alerts": [{"labels": {}}]}) == MappedEvent(alerts=[{"labels": {}}])
    assert mapped({"state": "cleared"}) is None


def test_a_body_without_a_field_is_rejected_with_the_names_of_all_fields() -> None:
    """The message contains nothing of the body."""
    found = wrong({"state": "raised", "id": [1], "place": {"secret": "s3"}, "hot": {}, "fan": ""})
    assert set(found) == {"labels.rack", "labels.hot", "key"}
    assert found["labels.hot"] == "is an object; must be text or a number"
    assert "body.place.rack" in found["labels.rack"]
    assert "s3" not in str(found)
    assert set(wrong({"state": "all", "alerts": {}})) == {"alerts"}
    assert set(wrong([])) == {"when"}
    assert wrong({"state": "raised", "id": "", "place": {"rack": 1}, "hot": 1, "fan": 1}) == {"key": "is empty"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("body.place.rack", "bdy.place.rack", "labels.rack: there is no name 'bdy' here"),
        ("event: rack", "evnt: rack", "map.yaml:2:5: unknown key 'evnt'; did you mean 'event'?"),
        ("      hot:", "      alertname:", "is not set as a label"),
        ("      hot:", "      trainmedic_rule:", "is the proof of a shipped rule"),
        ("      hot:", "      event:", "'event' is the event's name"),
        ('"{{ body.alerts }}"', "alerts", "alerts: must be a template for a list, such as '{{ body.alerts }}'"),
        ("    alerts:", "    key: a\n    alerts:", "leave out labels and key"),
        ("state ==", "state =", "when: "),
    ],
)
def test_a_mistake_is_reported_where_it_is(old: str, new: str, message: str) -> None:
    """The message states the correction, if there is one."""
    assert old in RACKS
    made = alert_map_compiler.compile_text(RACKS.replace(old, new, 1), "map.yaml")
    assert isinstance(made, list)
    assert any(message in str(each) for each in made), made


def test_names_without_a_counterpart_are_warnings(tmp_path: Path) -> None:
    """Both are reported: an event without a playbook, and a playbook without an event."""
    made = alert_map_compiler.compile_text(RACKS, "map.yaml")
    assert isinstance(made, CompiledFile)
    (tmp_path / "p.yaml").write_text(
        "playbook: p\non: {event: rak}\ntarget: cluster\nsteps:\n  - {action: test.tell, with: {message: x}}\n"
    )
    playbooks = list(library(tmp_path).all())
    found = [each.message for each in alert_map_compiler.warnings([made], playbooks, TestActions())]
    assert found == [
        "warning: no playbook begins with the event 'rack'; did you mean 'rak'?",
        "warning: on.event: no alert map here has labels for 'rak'; did you mean 'rack'?",
    ]
