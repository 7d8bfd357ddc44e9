"""The server's own alerts link to their section of the on-call page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.clocks import START
from trainmedic_core.fingerprint import fingerprint
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.own_source import DIAGNOSIS, LOG, NODE_SUSPECT, SOURCE
from trainmedic_server.domain.proof import AlertProof, lacking
from trainmedic_server.engine import verdict_alert
from trainmedic_server.engine.runbooks import LinkingAlertSender, Runbooks

PAGE = "https://git.example.org/docs/on-call.md"
ON_CALL = Path(__file__).parents[3] / "docs" / "on-call.md"


def own(name: str, source: str) -> Alert:
    labels = {"alertname": name, SOURCE: source}
    return Alert(fingerprint(labels), AlertStatus.FIRING, labels, {"summary": "why"}, START)


OWN = [
    (own(verdict_alert.ALERTNAME, DIAGNOSIS), "trainingfailed"),
    (own(verdict_alert.OF_SLOW, DIAGNOSIS), "trainingslow"),
    (own(NODE_SUSPECT, DIAGNOSIS), "nodesuspect"),
    (own("GPUXidLogged", LOG), "alerts-from-logs"),
    (own("AnAlertOfAUsersRule", LOG), "alerts-from-logs"),
]


@pytest.mark.parametrize(("alert", "section"), OWN)
def test_an_alert_links_to_a_section_that_there_is(alert: Alert, section: str) -> None:
    """Its labels and texts stay, so it is the same alert for Alertmanager."""
    linked = Runbooks(PAGE).linked(alert)
    assert linked.annotations == {"summary": "why", "runbook_url": f"{PAGE}#{section}"}
    assert (linked.labels, linked.fingerprint) == (alert.labels, alert.fingerprint)
    headings = re.findall(r"^#+ (.+)$", ON_CALL.read_text(), re.MULTILINE)
    assert section in {heading.lower().replace(" ", "-") for heading in headings}


def test_without_a_page_there_is_no_link() -> None:
    """A link that leads nowhere helps nobody."""
    alert = own("GPUXidLogged", LOG)
    assert Runbooks().linked(alert) == alert


async def test_every_alert_that_is_sent_has_its_link() -> None:
    """Whoever takes it: Alertmanager or the intake."""
    taken: list[Alert] = []

    class Taker:
        async def tell(self, alerts: Sequence[Alert]) -> None:
            taken.extend(alerts)

    await LinkingAlertSender(Taker(), Runbooks(PAGE)).tell([alert for alert, _ in OWN])
    assert [alert.annotations["runbook_url"] for alert in taken] == [f"{PAGE}#{section}" for _, section in OWN]


@pytest.mark.parametrize("page", [PAGE, "docs/how-to/monitoring.md"])
def test_a_link_proves_nothing(page: str) -> None:
    """An alert of others that carries one like ours lacks proof; one of ours needs no link for it."""
    accepted = [AlertProof.SHIPPED_RULE]
    linked = Runbooks(page).linked(own("GPUMissing", LOG))
    assert lacking(accepted, linked) == ""
    labels = {"alertname": "GPUMissing"}
    foreign = Alert(fingerprint(labels), AlertStatus.FIRING, labels, linked.annotations, START)
    assert lacking(accepted, foreign)
