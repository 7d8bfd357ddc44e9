"""Alert maps: what a file may say, what is wrong with it and where, and what becomes of an alert."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent

import pytest

from tests.unit.catalog.actions import PLAYBOOK, TestActions, library
from trainmedic_server import telemetry
from trainmedic_server.catalog import alert_map_compiler, alert_map_library, alert_map_roots
from trainmedic_server.catalog.alert_map import CompiledAlertMap, CompiledFile
from trainmedic_server.catalog.alert_map_library import AlertMapLibrary
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.ports.ending import end_tasks

STARTED = datetime(2026, 3, 4, 5, 6, tzinfo=UTC)


def compiled(text: str, source: str = "site.yaml") -> CompiledFile:
    made = alert_map_compiler.compile_text(dedent(text), source)
    assert isinstance(made, CompiledFile), made
    return made


def map_of(*texts: str) -> CompiledAlertMap:
    return CompiledAlertMap.of([compiled(text, f"{number}.yaml") for number, text in enumerate(texts)])


def alert(name: str, **labels: str) -> Alert:
    return Alert("f00d", AlertStatus.FIRING, {"alertname": name, **labels}, {}, STARTED)


def mapped(made: CompiledAlertMap, name: str, **labels: str) -> dict[str, str]:
    return dict(made.apply(alert(name, **labels)).alert.labels)


SITE = """
    accept: ['cluster="north"', 'env!="lab"']
    rename:
      - alert: [CardHot, CardVeryHot]
        matchers: ['vendor=~"nv.*"']
        as: GPUTemperatureHigh
        labels: {severity: warning, gpu: "{{ labels.card }}", code: "{{ labels.absent }}"}
        drop: [instance]
      - alert: CardHot
        as: OtherHot
"""


def test_an_alert_gets_the_name_and_labels_of_the_first_matching_entry() -> None:
    """Labels are set only where they are missing; a template over a label that is not there sets nothing."""
    made = map_of(SITE)
    labels = {"cluster": "north", "vendor": "nvidia", "card": "5", "instance": "10.1.1.9:9400"}
    assert mapped(made, "CardVeryHot", **labels) == {
        "alertname": "GPUTemperatureHigh", "cluster": "north", "vendor": "nvidia", "card": "5", "gpu": "5",
        "severity": "warning",
    }  # fmt: skip
    assert mapped(made, "CardHot", **labels, severity="page", gpu="2")["severity"] == "page"
    assert mapped(made, "CardHot", **labels, gpu="2")["gpu"] == "2"
    assert mapped(made, "CardHot", vendor="amd") == {"alertname": "OtherHot", "vendor": "amd"}
    assert mapped(made, "Other", card="1") == {"alertname": "Other", "card": "1"}


def test_the_original_alert_is_kept_with_the_mapped_one_and_keeps_its_identity() -> None:
    """So Alertmanager's resolved alert is matched. Mapping it again starts from the original."""
    made = map_of(SITE)
    sent = alert("CardHot", vendor="nvidia", instance="10.1.1.9:9400")
    once = made.apply(sent).alert
    assert (once.identity, once.original) == (sent.identity, sent.labels)
    assert (once.name, once.original_name) == ("GPUTemperatureHigh", "CardHot")
    assert once.every_label["instance"] == "10.1.1.9:9400"
    assert made.apply(once).alert == once
    assert map_of("rename: [{alert: X, as: Y}]").apply(once).alert == sent
    untouched = made.apply(alert("Other", vendor="nvidia")).alert
    assert (untouched.original, untouched.original_name) == (None, None)


def test_a_boolean_is_written_as_in_yaml() -> None:
    made = map_of("rename: [{alert: Hot, labels: {known: '{{ labels.a == \"1\" }}', of: 'is {{ 1 > 2 }}'}}]")
    assert mapped(made, "Hot", a="1") == {"alertname": "Hot", "a": "1", "known": "true", "of": "is false"}


def test_all_conditions_of_all_files_must_hold() -> None:
    """A label that the alert lacks is the empty text, as in Alertmanager; the refusal says which file asks for it."""
    made = map_of(SITE, "accept: ['tier=~\"gpu|cpu\"']")
    assert made.apply(alert("A", cluster="north", tier="gpu")).refused == ""
    assert made.apply(alert("A", cluster="south", tier="gpu")).refused == (
        "'cluster' is 'south' and must be 'north' (0.yaml)"
    )
    assert "'cluster' is '' and must be 'north'" in made.apply(alert("A", tier="gpu")).refused
    assert "'env' is 'lab'" in made.apply(alert("A", cluster="north", env="lab", tier="gpu")).refused
    assert "(1.yaml)" in made.apply(alert("A", cluster="north", tier="disk")).refused


def test_a_name_is_renamed_once() -> None:
    """Another entry for the new name is not applied."""
    made = map_of("rename: [{alert: A, as: B}, {alert: B, as: C}]")
    assert mapped(made, "A")["alertname"] == "B"
    assert mapped(made, "B")["alertname"] == "C"


def test_the_first_file_wins() -> None:
    """The user's own map takes precedence over a shipped one."""
    assert (
        mapped(map_of("rename: [{alert: A, as: Mine}]", "rename: [{alert: A, as: Theirs}]"), "A")["alertname"] == "Mine"
    )


def test_the_proof_of_a_shipped_rule_does_not_follow_a_rename() -> None:
    """It vouches for the alert under its own name; an alert that keeps its name keeps the proof."""
    made = map_of("rename: [{alert: DiskSpaceLow, as: GPUXidError}, {alert: NodeDown, labels: {team: infra}}]")
    assert mapped(made, "DiskSpaceLow", trainmedic_rule="1", node="n4") == {"alertname": "GPUXidError", "node": "n4"}
    assert mapped(made, "NodeDown", trainmedic_rule="1")["trainmedic_rule"] == "1"


@pytest.mark.parametrize(
    "label",
    [
        "trainmedic_rule",
        "Trainmedic_Rule",
        "TRAINMEDIC-RULE",
        "trainmedic rule",
        " trainmedic_rule",
        "ｔrainmedic_rule",
    ],
)
def test_a_map_never_sets_the_proof_of_a_shipped_rule(label: str) -> None:
    """This holds for all spellings; the message points to the key."""
    text = f'rename:\n  - alert: A\n    as: B\n    labels: {{node: n1, "{label}": "1"}}\n'
    problems = alert_map_compiler.compile_text(text, "m.yaml")
    assert isinstance(problems, list)
    assert "a map cannot set it" in problems[0].message
    assert (problems[0].line, problems[0].column) == (4, 24)


def test_trainmedics_own_alerts_are_neither_rejected_nor_renamed() -> None:
    """No Prometheus adds a cluster label to alerts that the server reports itself."""
    made = map_of("accept: ['cluster=\"north\"']\nrename: [{alert: GPUXidLogged, as: X}]")
    own = alert("GPUXidLogged", source="log")
    assert made.apply(own) == (type(made.apply(own)))(own, "")
    assert made.apply(alert("TrainingFailed", source="diagnosis")).refused == ""
    assert made.apply(alert("GPUXidLogged", exported_source="log")).refused != ""


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("acept: ['a=\"1\"']", (1, 1), "did you mean 'accept'?"),
        ("rename:\n  - alert: A\n    asx: B", (3, 5), "did you mean 'as'?"),
        ("rename:\n  - as: B", (2, 5), "'alert' is missing"),
        ("rename:\n  - alert: A", (2, 5), "changes nothing; give as, labels or drop"),
        ("rename:\n  - alert: A\n    matchers: ['a=']\n    as: B", (3, 16), "matchers[0]:"),
        ("accept: ['a=\"1\"', 'b']", (1, 19), "accept[1]:"),
        ("accept: ['a=\"x|y\"']", (1, 10), 'compared as it is; write a=~"x|y"'),
        ("accept: ['a=\"{{ labels.b }}\"']", (1, 10), "a matcher has no template"),
        ("accept: []", (1, 9), "leave it out to accept every alert"),
        ("rename:\n  - {alert: A, labels: {node: '{{ lables.node }}'}}", (2, 31), "did you mean 'labels'?"),
        ("rename:\n  - {alert: A, labels: {node: '{{ labels.node '}}", (2, 31), "labels.node:"),
        ("rename:\n  - {alert: A, labels: {gpu: 0}}", (2, 30), "must be text; put it in quotes"),
        ("rename:\n  - {alert: A, labels: {alertname: B}}", (2, 25), "write the new name as 'as'"),
        ("rename:\n  - {alert: A, labels: {source: log}}", (2, 25), "recognises its own alerts"),
        ("rename:\n  - {alert: A, labels: {err_code: '79'}}", (2, 25), "proof that hardware is broken"),
        ("rename:\n  - {alert: A, labels: {Exported_XID: '{{ labels.x }}'}}", (2, 25), "a map cannot set it"),
        ("rename:\n  - {alert: A, drop: [xid]}", (2, 22), "playbooks judge by it"),
        ("rename:\n  - {alert: A, drop: [alertname]}", (2, 22), "an alert keeps its alertname"),
        ('rename:\n  - {alert: A, as: "B\\0"}', (2, 20), "as: has a NUL character"),
        ("rename: []", (1, 1), "has accept, rename or events; this one has none of them"),
        ("a: [", None, ""),
        ("", None, "the file is empty"),
        ("rename: [{alert: A, as: B}]\n---\naccept: ['a=\"1\"']", (3, 1), "a file has one alert map"),
    ],
)
def test_a_mistake_is_reported_with_its_place(text: str, place: tuple[int, int] | None, message: str) -> None:
    """The message has file, line, column, the fault, and the nearest name."""
    problems = alert_map_compiler.compile_text(text, "m.yaml")
    assert isinstance(problems, list)
    told = next(each for each in problems if message in each.message)
    assert told.file == "m.yaml"
    if place is not None:
        assert (told.line, told.column) == place, str(told)


def test_an_entry_that_is_probably_unintended_is_a_warning(tmp_path: Path) -> None:
    """A second entry for a name, a chain, a name that no playbook reacts to, and one renamed to itself."""
    (tmp_path / "a.yaml").write_text(PLAYBOOK)
    file = compiled(
        """
        rename:
          - {alert: Spike, as: TrainingLossSpike}
          - {alert: Spike, matchers: ['a="1"'], as: TrainingLossSpike}
          - {alert: Other, as: TrainingLossSpik}
          - {alert: First, as: Spike}
          - {alert: Same, as: Same}
        """
    )
    told = [str(each) for each in alert_map_compiler.warnings([file], library(tmp_path).all(), TestActions())]
    assert [each.split("warning: ")[1] for each in told] == [
        "'Spike' never comes here: site.yaml:3 takes it, and the first match wins",
        "no playbook reacts to 'TrainingLossSpik'; did you mean 'TrainingLossSpike'?",
        "'Spike' is not renamed again by site.yaml:3: an alert is renamed once",
        "no playbook reacts to 'Spike'",
        "'Same' is renamed to itself",
        "no playbook reacts to 'Same'",
    ]
    assert told[0].startswith("site.yaml:4:5: warning: ")


def test_a_broken_file_never_replaces_a_good_one(tmp_path: Path) -> None:
    """The same holds for a deleted file, because alerts that it refused would be accepted."""
    path = tmp_path / "map.yaml"
    path.write_text("accept: ['cluster=\"north\"']")
    metrics = telemetry.Metrics()
    made = AlertMapLibrary([path], metrics)
    assert made.reload()
    assert not made.reload()
    good = made.current
    path.write_text("accept: [")
    assert made.reload()
    assert (made.current.accept, made.current.unusable) == (good.accept, "")
    assert made.problems[0].file == str(path)
    assert metrics.registry.get_sample_value("trainmedic_alert_map_errors") == 1
    path.unlink()
    made.reload()
    assert made.current.accept == good.accept
    assert "there is no such file" in made.problems[0].message
    path.write_text("rename: [{alert: A, as: B}]")
    made.reload()
    assert (made.current.accept, made.problems) == ((), ())
    assert metrics.registry.get_sample_value("trainmedic_alert_map_errors") == 0


@pytest.mark.parametrize("content", ["accept: [", None])
def test_a_file_that_could_never_be_loaded_accepts_nothing(tmp_path: Path, content: str | None) -> None:
    """It is unknown what it would reject; a second, good file does not change that."""
    (tmp_path / "good.yaml").write_text("rename: [{alert: A, as: B}]")
    broken = tmp_path / "site.yaml"
    if content is not None:
        broken.write_text(content)
    made = AlertMapLibrary([tmp_path / "good.yaml", broken])
    made.reload()
    assert str(broken) in made.current.apply(alert("A")).refused
    broken.write_text("accept: ['alertname!=\"Z\"']")
    made.reload()
    assert made.current.apply(alert("A")).refused == ""


def test_an_emptied_folder_keeps_its_entries(tmp_path: Path) -> None:
    """A volume may look empty during a remount; one deleted file among others takes its entries with it."""
    (tmp_path / "a.yaml").write_text("accept: ['a=\"1\"']")
    (tmp_path / "b.yaml").write_text("rename: [{alert: A, as: B}]")
    made = AlertMapLibrary([tmp_path])
    made.reload()
    (tmp_path / "b.yaml").unlink()
    made.reload()
    assert (made.current.names, len(made.current.accept), made.problems) == (0, 1, ())
    (tmp_path / "a.yaml").unlink()
    made.reload()
    assert len(made.current.accept) == 1
    assert made.problems[0].message == "has no alert map"


def test_a_broken_file_that_reappears_is_still_a_problem(tmp_path: Path) -> None:
    """It was gone for a moment, as while its volume is mounted again."""
    path = tmp_path / "map.yaml"
    path.write_text("rename: [{alert: A, as: B}]")
    made = AlertMapLibrary([path])
    made.reload()
    path.write_text("rename: [{alert: A}]")
    made.reload()
    before = made.problems
    assert "changes nothing" in before[0].message
    path.rename(tmp_path / "away")
    made.reload()
    assert "there is no such file" in made.problems[0].message
    (tmp_path / "away").rename(path)
    made.reload()
    assert (made.problems, made.current.names) == (before, 1)


def test_shipped_maps_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or all can be named; a file of that name takes precedence."""
    monkeypatch.chdir(tmp_path)
    folder = alert_map_roots.shipped()
    assert folder is not None
    named = [Path("kube-prometheus"), Path("shipped"), Path("mine.yaml"), Path("unknown")]
    assert alert_map_roots.roots(named, {}) == [
        folder / "kube-prometheus.yaml", folder, Path("mine.yaml"), Path("unknown")
    ]  # fmt: skip
    (tmp_path / "kube-prometheus").write_text("accept: ['a=\"1\"']")
    assert alert_map_roots.roots([Path("kube-prometheus")], {}) == [Path("kube-prometheus")]
    assert alert_map_roots.roots([], {"TRAINMEDIC_ALERT_MAP": "a.yaml:b.yaml"}) == [Path("a.yaml"), Path("b.yaml")]


async def test_a_failed_check_is_a_problem_until_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loaded map stays; without a problem, it would seem to be the files' present content."""
    (tmp_path / "good.yaml").write_text("rename: [{alert: A, as: B}]\n")
    made = AlertMapLibrary([tmp_path])
    made.reload()
    before, reload = made.current, AlertMapLibrary.reload
    assert made.problems == ()
    monkeypatch.setattr(alert_map_library, "RESCAN", 0.001)

    def fail(_: AlertMapLibrary) -> bool:
        raise OSError("stale handle")

    monkeypatch.setattr(AlertMapLibrary, "reload", fail)
    watching = asyncio.create_task(made.watch())
    async with asyncio.timeout(60):
        while not made.problems:
            await asyncio.sleep(0.001)
        assert [str(each) for each in made.problems] == ["the alert map: loading failed: OSError; see the log"]
        assert made.current is before
        monkeypatch.setattr(AlertMapLibrary, "reload", reload)
        while made.problems:
            await asyncio.sleep(0.001)
    await end_tasks([watching])
