"""A replay against the real engine: what it calls known is what the engine decides."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.simulation import recorded_world
from tests.unit.simulation.recorded_world import catalog_of, moment, played, replayed, replies, reports
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.simulation.recorded import RecordedAlert
from trainmedic_server.simulation.replay_result import ReplayOutcome, ReplayResult
from trainmedic_server.simulation.replay_spool import SpooledAlert

CAP = """
playbook: cap
on: {alert: Hot}
target: node
guards: {cooldown: COOLDOWN, max_runs: {count: 7, per: 20m}, max_concurrent: 2}
steps:
  - {id: cap, action: test.cap, with: {amount: 80}, retry: {attempts: 2}, undo: UNDO}
  - {wait_for: resolved, timeout: 3m, on_timeout: continue}
on_failure:
  - {action: test.tell, with: {text: "still hot"}}
"""
TELL = """
playbook: tell
on: {alert: Slow}
target: job
guards: {max_runs: {count: RUNS, per: 15m}}
steps:
  - {action: test.tell, with: {text: slow}}
  - {id: over, wait_for: resolved}
"""


def texts(cooldown: str = "4m", undo: str = "on_resolve", runs: int = 4) -> tuple[str, str]:
    return CAP.replace("COOLDOWN", cooldown).replace("UNDO", undo), TELL.replace("RUNS", str(runs))


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], ReplayOutcome]:
    """The replay's outcome by playbook and fingerprint, as they are compared."""
    found: dict[tuple[str, str], ReplayOutcome] = {}
    compare = ReplayResult.compare

    def noted(
        self: ReplayResult, playbook: str, alert: SpooledAlert, reaction: Any, target: Any, outcome: ReplayOutcome
    ) -> None:
        found[playbook, alert.fingerprint] = outcome
        compare(self, playbook, alert, reaction, target, outcome)

    monkeypatch.setattr(ReplayResult, "compare", noted)
    return found


def unrecorded() -> list[RecordedAlert]:
    """A stale alert for each playbook that its record lacks, so that later decisions are not taken from the record."""
    labels = ({"alertname": "Hot", "node": "n9"}, {"alertname": "Slow", "job_name": "llm-9"})
    old, first = moment(-3600), moment(0)
    return [RecordedAlert(f"old-{each['alertname']}", old, first, first, each, 1) for each in labels]


@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.OBSERVE])
@pytest.mark.parametrize("seed", range(2))
def test_the_guards_decide_the_same(seed: int, mode: Mode) -> None:
    """Every decision is known, because the history holds when their runs ended."""
    catalog = catalog_of(*texts())
    items = played(catalog, reports(seed, 60, repeat=False), replies(seed), mode)
    result = replayed(catalog, [*unrecorded(), *items], mode)
    compared = result.playbooks.values()
    assert sum(each.same for each in compared) == 60
    assert [(each.different, each.not_known) for each in compared] == [(1, 0)] * 2
    decisions = {decision for each in compared for decision in each.then}
    acted = {"observe_only"} if mode is Mode.OBSERVE else {"started", "joined", "concurrency_limited"}
    assert decisions >= {*acted, "cooldown", "rate_limited"}


@pytest.mark.parametrize("seed", range(2))
def test_repeated_alerts_decide_the_same_or_are_not_known(seed: int) -> None:
    """The same playbooks decide as recorded. After another decision, reports whose times are not recorded make no
    decision wrong.
    """
    catalog = catalog_of(*texts())
    items = played(catalog, reports(seed, 60, repeat=True), replies(seed))
    compared = replayed(catalog, items).playbooks.values()
    assert [(each.different, each.not_known) for each in compared] == [(0, 0)] * 2
    compared = replayed(catalog, [*unrecorded(), *items]).playbooks.values()
    assert [each.different for each in compared] == [1] * 2


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_other_playbooks_would_have_decided_so(
    outcomes: dict[tuple[str, str], ReplayOutcome], seed: int, repeat: bool
) -> None:
    """The history of some guards, replayed with others, whose runs take other times: each known decision is that of an
    engine with them.
    """
    told, other = reports(seed, 20, repeat=repeat), catalog_of(*texts("9m", "never", 3))
    items = played(catalog_of(*texts("2m", "never")), told, replies(seed))
    replayed(other, items)
    truth = played(other, told, replies(seed + 100))
    decided = {
        (each.playbook, alert.fingerprint): each.decision
        for alert in truth
        if isinstance(alert, RecordedAlert)
        for each in alert.reactions
    }
    assert outcomes.keys() == decided.keys()
    known = {key: next(iter(each.decisions)) for key, each in outcomes.items() if each.unknown is None}
    assert known == {key: decided[key] for key in known}
    assert len(known) >= 3


def test_the_recorded_world_is_not_empty() -> None:
    """Guard of the tests above: alerts end and are told again."""
    told = recorded_world.reports(0, 60, repeat=True)
    assert len({each.alert().fingerprint for each in told}) == 60
    assert len(told) > 180
