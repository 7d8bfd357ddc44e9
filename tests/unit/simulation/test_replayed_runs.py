"""The runs of a replay, kept no longer than they count."""

from __future__ import annotations

from datetime import timedelta

from trainmedic_server.domain.playbook import Guards
from trainmedic_server.engine.replayed_runs import ReplayedRun, ReplayedRuns
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.simulation.virtual_time import BEGINNING


def test_runs_are_forgotten_though_no_decision_is_asked_for() -> None:
    """A playbook that does as recorded asks nothing, over millions of alerts."""
    runs = ReplayedRuns(EngineLimits(), timedelta(hours=1))
    spec = Guards.model_validate({"cooldown": "10m", "max_concurrent": 5, "max_runs": {"count": 9, "per": "1h"}})
    for number in range(5000):
        at = BEGINNING + timedelta(minutes=number)
        end = at + timedelta(minutes=4)
        runs.add(ReplayedRun(("cool", f"node:n{number % 50}"), frozenset({f"n{number % 50}"}), at, at, end, end), spec)
    of_playbook = runs._by_playbook["cool"]
    now = BEGINNING + timedelta(minutes=4999)
    kept = [
        len(of_playbook.open_at_most._runs),
        len(runs._forget),
        len(runs._acted),
        len(of_playbook.open_at_least._until),
    ]
    assert max(kept) < 100, kept
    assert of_playbook.open_at_most.count(now) == 4
