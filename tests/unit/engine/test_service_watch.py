"""The state of Alertmanager and Prometheus between the server's calls."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.support.clocks import START, StoppedClock
from trainmedic_server.engine.service_watch import ServiceState, ServiceWatch
from trainmedic_server.errors import TemporaryFailure
from trainmedic_server.telemetry import Metrics


class Service:
    problem = ""

    async def check(self) -> None:
        if self.problem:
            raise TemporaryFailure(self.problem)


async def test_a_state_begins_with_its_first_answer_and_keeps_the_last_reason() -> None:
    service, clock = Service(), StoppedClock()
    watch = ServiceWatch("alertmanager", service.check, clock, Metrics())
    assert watch.state() == ServiceState("", START)

    async def seen(problem: str, minutes: int) -> ServiceState:
        service.problem = problem
        clock.time = START + timedelta(minutes=minutes)
        if problem:
            with pytest.raises(TemporaryFailure):
                await watch.refresh()
        else:
            await watch.refresh()
        return watch.state()

    lost = START + timedelta(minutes=1)
    assert await seen("refused", 1) == ServiceState("refused", lost)
    assert await seen("no answer", 2) == ServiceState("no answer", lost)
    assert await seen("", 3) == ServiceState(None, START + timedelta(minutes=3))
    assert await seen("", 4) == ServiceState(None, START + timedelta(minutes=3))
