"""Alerts of public rule sets and exporters, sent by a real Alertmanager: expected target, decision and act for each.

What is expected was written down before the first run. Each case is sent, its effects are read where they take place,
and its alert ends; afterwards everything that the playbook takes is given back. Alone, with the table of all cases:

    scripts/test tests/acceptance/strangers -s
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from tests.acceptance.strangers import cases, site
from tests.acceptance.strangers.cases import Sending
from tests.acceptance.strangers.scoreboard import LEAST_SHARE, Result, Scoreboard
from tests.acceptance.strangers.site import Site
from tests.support.programs import eventually

SHARED, OWN = cases.load("shared"), cases.load("own")
SENDINGS = [sending for case in (*SHARED, *OWN) for sending in cases.sendings(case)]
SUMMARY = {"summary": "Sent by a rule of the site."}


@pytest.fixture(scope="module")
def running_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The site, started once for all cases."""
    with site.running(tmp_path_factory.mktemp("site")) as running:
        yield running


@pytest.fixture(scope="module")
def scoreboard() -> Scoreboard:
    """The outcomes of the cases that ran in this module."""
    return Scoreboard()


@pytest.fixture(params=SENDINGS, ids=str)
def sending(request: pytest.FixtureRequest) -> Sending:
    """One case under one alert name."""
    chosen: Sending = request.param
    return chosen


def test_a_foreign_alert_is_handled_correctly_or_ignored(
    sending: Sending, running_site: Site, scoreboard: Scoreboard
) -> None:
    """The decision, target and all changes match one expected outcome, and nothing else has changed."""
    case = sending.case
    if case.not_ready is not None:
        running_site.effects.set_ready(case.not_ready, False)
    try:
        reaction = running_site.send(sending.labels, case.annotations or SUMMARY)
    finally:
        if case.not_ready is not None:
            running_site.effects.set_ready(case.not_ready, True)
    result = scoreboard.add(Result(sending, reaction))
    if not result.is_right:
        about = "\n".join(f"      {text}" for text in (case.source, case.note, case.doubted) if text)
        pytest.fail(f"{result.line()}\n{about}", pytrace=False)


def test_an_endless_annotation_in_a_group_does_not_keep_a_power_cap(running_site: Site) -> None:
    """In a group of two alerts, the first one's GPU gets its power back although the second is oversized."""
    before = running_site.effects.now()
    hot = {"alertname": "GPUTemperatureHigh", "rule_group": "together", "node": "dgx-a08", "gpu": "1"}
    wordy = {"alertname": "SomethingElse", "rule_group": "together", "node": "dgx-a07"}
    severity = {"severity": "warning"}
    began = datetime.now(UTC)
    later = began + timedelta(hours=1)
    running_site.post(hot | severity, SUMMARY, began, later)
    try:
        cap = ("cap dgx-a08/1 560",)
        eventually(lambda: running_site.effects.since(before) == cap, site.SOON, "the power cap", every=0.05)
        running_site.post(wordy | severity, {"description": "x" * 70_000}, began, later)
        running_site.heard(wordy | severity, began)
        running_site.post(hot | severity, SUMMARY, began, datetime.now(UTC))
        eventually(lambda: not running_site.effects.still_changed(before), site.SOON, "the power of before", every=0.05)
    finally:
        for labels in (hot, wordy):
            running_site.post(labels | severity, SUMMARY, began, datetime.now(UTC))
        running_site.effects.restore()


def test_a_webhook_url_with_a_trailing_slash_is_accepted(running_site: Site) -> None:
    """Alertmanager never retries after a 404, so every alert of such a receiver would be lost."""
    labels = {"alertname": "GPUTemperatureHigh", "reached_by": "slash", "node": "dgx-a07", "gpu": "0"}
    reaction = running_site.send(labels | {"severity": "warning"}, SUMMARY)
    assert reaction.changes == ("cap dgx-a07/0 560",)
    assert not reaction.left_over


def test_there_are_enough_cases_and_most_of_them_must_act() -> None:
    """There are at least 40 of our own cases, each with its source; at least half name one known subject."""
    assert len(OWN) >= 40
    assert sum(case.names_one for case in OWN) >= len(OWN) / 2


def test_the_share_that_acts_is_high_and_nothing_wrong_is_changed(scoreboard: Scoreboard) -> None:
    """Of label sets that name exactly one known subject, 95 % lead to an action. Prints each outcome."""
    print("\n" + scoreboard.table())
    assert scoreboard.results, "this test sums up the cases: run it with them"
    assert scoreboard.wrong_acts == []
    assert scoreboard.share >= LEAST_SHARE
