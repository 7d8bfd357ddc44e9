"""A silence, where the Alertmanager is away; how it is made and ended there is in ``tests/contract/services``."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from tests.support.clocks import ManualClock
from tests.unit.actions.test_commands import NoHttp, ScriptedBus
from tests.unit.actions.test_placement import call
from tests.unit.engine.world import Source
from trainmedic_server.actions.alertmanager import SilenceAlert
from trainmedic_server.errors import OutcomeUnknown, TemporaryFailure
from trainmedic_server.ports.actions import Services


class Away(Source):
    """An Alertmanager that nobody reaches."""

    async def silence(self, *_: object) -> str:
        raise TemporaryFailure("connection refused")


@pytest.mark.parametrize(("resumed", "failure"), [(False, TemporaryFailure), (True, OutcomeUnknown)])
async def test_an_unavailable_alertmanager_does_not_prove_that_no_silence_was_made(
    resumed: bool, failure: type[Exception]
) -> None:
    """Otherwise the next attempt would make a second silence, and the undo would end only that one."""
    services = Services(ManualClock(), ScriptedBus(ManualClock()), NoHttp(), alertmanager=Away())
    with pytest.raises(failure, match="connection refused"):
        await SilenceAlert(services).perform(call(SilenceAlert, {"duration": "10m"}, resumed=resumed))


class Listening(Source):
    """An Alertmanager that keeps what it was asked to silence."""

    matchers: Mapping[str, str] = {}

    async def silence(self, matchers: Mapping[str, str], *_: object) -> str:
        self.matchers = matchers
        return "s1"


async def test_a_mapped_alert_is_silenced_by_the_labels_that_alertmanager_knows() -> None:
    """A silence by the mapped labels would match nothing or another alert."""
    alertmanager = Listening()
    services = Services(ManualClock(), ScriptedBus(ManualClock()), NoHttp(), alertmanager=alertmanager)
    given = call(SilenceAlert, {"duration": "10m"})
    sent = {"alertname": "CardHot", "card": "4", "rack": "r7"}
    mapped = replace(given.alert, labels={"alertname": "Hot", "gpu": "4"}, original=sent)
    await SilenceAlert(services).perform(replace(given, alert=mapped))
    assert alertmanager.matchers == sent
