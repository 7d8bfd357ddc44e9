"""The shipped alert maps: what the alerts of public rule sets come to, name by name."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainmedic_core.command import main
from trainmedic_server.actions import registry
from trainmedic_server.catalog import alert_map_compiler
from trainmedic_server.catalog.alert_map import CompiledAlertMap
from trainmedic_server.catalog.alert_map_library import AlertMapLibrary
from trainmedic_server.catalog.library import Library
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.simulation import rule_outcomes
from trainmedic_server.simulation.rule_outcomes import RuleOutcome

ROOT = Path(__file__).parents[3]
MAPS = ROOT / "alert-maps"
LIST = MAPS / "public-rules_test.yaml"
PLAYBOOKS = ROOT / "playbooks"


@pytest.fixture(scope="module")
def library() -> Library:
    made = Library([PLAYBOOKS], registry.specs_only())
    made.reload()
    return made


@pytest.fixture(scope="module")
def shipped() -> AlertMapLibrary:
    made = AlertMapLibrary([MAPS])
    made.reload()
    return made


def outcomes(library: Library, alert_map: CompiledAlertMap) -> list[RuleOutcome]:
    alerts, problems = rule_outcomes.read(LIST)
    assert problems == []
    return rule_outcomes.outcomes(alerts, alert_map, library.all())


def test_the_shipped_maps_have_no_mistake_and_no_warning(library: Library, shipped: AlertMapLibrary) -> None:
    """Each name is renamed once, to one that a playbook reacts to."""
    assert shipped.problems == ()
    warnings = alert_map_compiler.warnings(shipped.contents, library.all(), registry.specs_only())
    assert [str(warning) for warning in warnings] == []
    assert len(shipped.contents) == 6


@pytest.mark.parametrize("name", ["HighMemoryUsage", "DiskFull"])
@pytest.mark.parametrize(
    ("job", "instance", "is_of_node"),
    [
        ("node", "gpu-7", True),
        ("monitoring/prometheus-node-exporter", "10.42.7.9:9796", True),
        ("gpu-node", "gpu-7:9100", True),
        ("postgres-node", "gpu-7:5432", False),
        ("supernode", "gpu-7:9100", False),
        ("checkout", "gpu-7:9100", False),
    ],
)
def test_a_general_name_is_taken_from_node_exporters_only(
    shipped: AlertMapLibrary, name: str, job: str, instance: str, is_of_node: bool
) -> None:
    """A database's job may be called after its nodes."""
    labels = {"alertname": name, "job": job, "instance": instance}
    alert = Alert("f", AlertStatus.FIRING, labels, {}, datetime(2026, 3, 5, tzinfo=UTC))
    assert (shipped.current.apply(alert).alert.name in ("MemoryUsageHigh", "DiskSpaceLow")) is is_of_node


def test_two_thirds_of_the_names_of_public_rule_sets_start_the_right_playbook(
    library: Library, shipped: AlertMapLibrary
) -> None:
    """None starts a wrong one, and each of the rest has its reason."""
    found = outcomes(library, shipped.current)
    assert len({outcome.alert.name for outcome in found}) >= 40
    assert len({outcome.alert.source for outcome in found}) >= 4
    assert [outcome.as_data() for outcome in found if not outcome.is_as_expected] == []
    starting = [outcome for outcome in found if outcome.playbooks]
    assert len(starting) * 3 >= len(found) * 2, f"{len(starting)} of {len(found)}"
    assert all(outcome.reason for outcome in found if not outcome.playbooks)


def test_the_right_rename_is_suggested_without_any_map(library: Library, shipped: AlertMapLibrary) -> None:
    """For nine in ten of the names that a map has to rename; a wrong one, or one where none is right, for none."""
    mapped = {outcome.alert.line: outcome for outcome in outcomes(library, shipped.current)}
    plain = [each for each in outcomes(library, CompiledAlertMap()) if not each.playbooks]
    right = wrong = needed = 0
    for outcome in plain:
        wanted = mapped[outcome.alert.line].renamed_to
        suggested = outcome.suggestion.name if outcome.suggestion else None
        needed += wanted is not None
        right += wanted is not None and suggested == wanted
        wrong += suggested is not None and suggested != wanted
    print(f"right suggestions for {right} of {needed} names; wrong ones: {wrong}")
    assert wrong == 0
    assert right >= 0.9 * needed


def test_no_map_refuses_anything_or_touches_what_the_shipped_rules_fire(
    library: Library, shipped: AlertMapLibrary
) -> None:
    """Our own alerts keep their names."""
    assert shipped.current.accept == ()
    own = {name for playbook in library.all() for name in playbook.definition.on.alertnames} - {"GPUXidError"}
    assert own.isdisjoint(shipped.current.renames)


def test_a_rule_file_is_read_as_prometheus_and_kubernetes_have_it(tmp_path: Path) -> None:
    """With the entry that an alert map could have, what a playbook still asks of the labels, and the totals."""
    plain = tmp_path / "rules.yaml"
    plain.write_text(
        "groups:\n- name: a\n  rules:\n"
        "  - {alert: CardTooHot, expr: DCGM_FI_DEV_GPU_TEMP > 80, labels: {severity: page}}\n"
        "  - {record: x, expr: y}\n  - {alert: ApiSlow, expr: latency > 1}\n"
    )
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(
        "kind: PrometheusRule\nspec:\n  groups:\n  - name: b\n    rules:\n"
        "    - {alert: GPUXIDError, expr: 'increase(DCGM_FI_DEV_XID_ERRORS[5m]) > 0'}\n"
    )
    arguments = [str(plain), str(manifest), "--playbooks", str(PLAYBOOKS), "--alert-map", str(MAPS)]
    done = CliRunner().invoke(main, ["playbook", "rules", *arguments])
    assert done.exit_code == 0, done.output
    assert "  - alert: CardTooHot\n    as: GPUTemperatureHigh\n" in done.output
    assert "none: no playbook reacts to it\n" in done.output
    assert 'GPUXIDError  as GPUXidError: gpu-broken, if err_code=~".+"' in done.output
    assert done.output.endswith("3 alerts: 1 with a playbook, 2 without.\n")
    listed = json.loads(CliRunner().invoke(main, ["playbook", "rules", *arguments, "--output", "json"]).output)
    assert [each["line"] for each in listed] == [4, 6, 6]


def test_the_list_of_public_rules_is_checked_by_the_command(tmp_path: Path) -> None:
    """It ends with 1 where an alert comes to something else than the list says."""
    done = CliRunner().invoke(
        main, ["playbook", "rules", str(LIST), "--playbooks", str(PLAYBOOKS), "--alert-map", str(MAPS)]
    )
    assert done.exit_code == 0, done.output
    assert "with a playbook" in done.output
    without = CliRunner().invoke(main, ["playbook", "rules", str(LIST), "--playbooks", str(PLAYBOOKS)])
    assert without.exit_code == 1
    assert "NOT AS EXPECTED: disk-space-low" in without.output


def test_an_alert_map_is_checked_beside_the_playbooks_or_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake ends with 1; a name that starts nothing is a warning."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "site.yaml"
    path.write_text("rename: [{alert: A, as: NodeDwn}]")
    done = CliRunner().invoke(main, ["playbook", "check", "--alert-map", str(path)])
    assert (done.exit_code, done.output) == (0, "1 rename in 1 alert map, no mistake.\n")
    done = CliRunner().invoke(main, ["playbook", "check", str(PLAYBOOKS), "--alert-map", str(path)])
    assert done.exit_code == 0
    assert f"{path}:1:10: warning: no playbook reacts to 'NodeDwn'; did you mean 'NodeDown'?" in done.output
    path.write_text("rename: [{alert: A, as: NodeDown}]")
    done = CliRunner().invoke(main, ["playbook", "check", str(PLAYBOOKS), "--alert-map", str(path)])
    assert "warning: 'NodeDown' starts nothing: node-down asks for the proof of a shipped rule" in done.output
    path.write_text("rename: [{alert: A, ass: NodeDown}]")
    done = CliRunner().invoke(main, ["playbook", "check", str(PLAYBOOKS), "--alert-map", str(path)])
    assert done.exit_code == 1
    assert f"{path}:1:21: unknown key 'ass'; did you mean 'as'?" in done.output


def test_rules_may_be_an_alias(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("groups:\n  - rules: &r\n      - alert: A\n  - rules: *r\n")
    alerts, problems = rule_outcomes.read(file)
    assert ([(each.name, each.line) for each in alerts], problems) == ([("A", 3), ("A", 4)], [])
