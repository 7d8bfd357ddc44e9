"""``node.power`` and ``node.power_cycle`` on Redfish services: the stand-in, and a real one or another emulator that
``TRAINMEDIC_TEST_REDFISH_URL`` names (with ``TRAINMEDIC_TEST_REDFISH_SYSTEM``), whose system is turned off and on.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.bmc import Bmc
from tests.support.log_stores.served import Served, certificate
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions import redfish
from trainmedic_server.actions.redfish import NodePower, NodePowerCycle, PowerParams
from trainmedic_server.adapters.httpx_caller import HttpxCaller
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.errors import OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Call, Services

NAMED = os.environ.get("TRAINMEDIC_TEST_REDFISH_URL")
SYSTEM = os.environ.get("TRAINMEDIC_TEST_REDFISH_SYSTEM")
LOGIN = {"basic_auth": {"user": "medic", "password_from_env": "TRAINMEDIC_HTTP_BMC"}}


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redfish, "_LOOK_EVERY", timedelta(milliseconds=20))


@pytest.fixture
async def caller() -> AsyncIterator[HttpxCaller]:
    made = HttpxCaller({"TRAINMEDIC_HTTP_BMC": "s3cret"})
    yield made
    await made.close()


@pytest.fixture
def bmc() -> Bmc:
    return Bmc(password="s3cret")


@pytest.fixture
def served(bmc: Bmc) -> Iterator[str]:
    with Served(bmc.app()) as running:
        yield running.url


def power(
    caller: HttpxCaller,
    do: str,
    *,
    seconds: float = 30,
    resumed: bool = False,
    clearance: Any = None,
    inventory: dict[str, str] | None = None,
    **params: Any,
) -> Any:
    """Perform ``node.power`` with `do`, or ``node.power_cycle`` for "power_cycle"."""
    action = NodePowerCycle if do == "power_cycle" else NodePower
    clock = SystemClock()
    now = clock.now()
    call = Call(
        command_id="c1",
        run_id="r1",
        playbook="p",
        target=Target(TargetKind.NODE, node="n1"),
        params=action.Params.model_validate(params if action is NodePowerCycle else {"do": do, **params}),
        reason="",
        issued_at=now,
        deadline=now + timedelta(seconds=seconds),
        alert=Alert("f" * 16, AlertStatus.FIRING, {"alertname": "NodeDown"}, {}, now),
        resumed=resumed,
        clearance=clearance,
    )
    services = Services(clock, None, caller, inventory_of=lambda node: {"n1": inventory or {}}[node])  # type: ignore[arg-type]  # no bus is used
    return action(services).perform(call)


@pytest.fixture(params=["stand-in", "named"])
def service(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The parameters by which a service is reached."""
    if request.param == "named":
        if NAMED is None:
            pytest.skip("TRAINMEDIC_TEST_REDFISH_URL names no service")
        yield {"url": NAMED, **({"system": SYSTEM} if SYSTEM else {})}
        return
    with Served(Bmc().app()) as running:
        yield {"url": running.url}


async def test_a_node_is_turned_off_on_and_power_cycled(caller: HttpxCaller, service: dict[str, Any]) -> None:
    """Each call returns the state that was read; a state that is already reached is not requested."""
    await power(caller, "on", **service)
    off = await power(caller, "off", **service)
    assert (off["power_state"], off["observed"][0], off["accepted"]) == ("Off", "On", ["ForceOff"])
    again = await power(caller, "off", **service)
    assert again == {"power_state": "Off", "observed": ["Off"], "accepted": []}
    on = await power(caller, "on", **service)
    assert (on["power_state"], on["accepted"]) == ("On", ["On"])
    cycle = await power(caller, "power_cycle", **service)
    assert [state for state in cycle["observed"] if not state.startswith("Powering")] == ["On", "Off", "On"]
    assert cycle["accepted"] == ["ForceOff", "On"]


async def test_a_cycle_of_a_node_that_is_off_turns_it_on(caller: HttpxCaller, bmc: Bmc, served: str) -> None:
    """Also if a killed server has already done the first half."""
    for resumed in (False, True):
        bmc.power, bmc.asked[:] = "Off", []
        output = await power(caller, "power_cycle", url=served, resumed=resumed, **LOGIN)
        assert (output["power_state"], bmc.asked) == ("On", ["On"])


async def test_a_cycle_that_may_have_happened_is_not_repeated(caller: HttpxCaller, bmc: Bmc, served: str) -> None:
    """A node that is on may have recovered already and be at work."""
    with pytest.raises(OutcomeUnknown, match="may have been power cycled before"):
        await power(caller, "power_cycle", url=served, resumed=True, **LOGIN)
    assert bmc.asked == []


async def test_a_lost_answer_is_judged_by_the_power_state(caller: HttpxCaller, bmc: Bmc, served: str) -> None:
    """It is not listed as accepted."""
    bmc.refuses = [0]
    output = await power(caller, "off", url=served, **LOGIN)
    assert (output["power_state"], output["accepted"]) == ("Off", [])


async def test_a_node_that_stays_on_is_not_a_success(caller: HttpxCaller, bmc: Bmc, served: str) -> None:
    """Although the reset was accepted."""
    bmc.stays = True
    with pytest.raises(OutcomeUnknown, match="the power was not seen Off in time; last seen: On") as unknown:
        await power(caller, "off", seconds=1, url=served, **LOGIN)
    assert unknown.value.output == {"power_state": "On", "observed": ["On"], "accepted": ["ForceOff"]}


async def test_a_failed_reading_before_successful_ones_is_not_the_reason(
    caller: HttpxCaller, bmc: Bmc, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last readings showed that the node stays on."""
    monkeypatch.setattr(redfish, "_LOOK_EVERY", timedelta(seconds=1))  # the last one has time for its answer
    bmc.stays, bmc.failing_looks = True, 1
    with pytest.raises(OutcomeUnknown, match="last seen: On") as unknown:
        await power(caller, "off", seconds=3, url=served, **LOGIN)
    assert "503" not in str(unknown.value)
    assert bmc.failing_looks == 0


async def test_a_node_that_turns_off_too_late_is_reported_as_off(caller: HttpxCaller, bmc: Bmc, served: str) -> None:
    """A reading after the deadline shows it; only `off` has succeeded then."""
    bmc.turns_after = 1.2
    with pytest.raises(OutcomeUnknown, match=r"The node is off: turn it on by node\.power with do: on") as unknown:
        await power(caller, "power_cycle", seconds=1, url=served, **LOGIN)
    assert unknown.value.output == {
        "power_state": "Off",
        "observed": ["On", "PoweringOff", "Off"],
        "accepted": ["ForceOff"],
    }
    output = await power(caller, "power_cycle", url=served, resumed=True, **LOGIN)
    assert output["power_state"] == "On"
    output = await power(caller, "off", seconds=1, url=served, **LOGIN)
    assert output["power_state"] == "Off"


async def test_a_refused_reading_after_the_reset_leaves_the_outcome_open(
    caller: HttpxCaller, bmc: Bmc, served: str
) -> None:
    """The reset was accepted."""
    bmc.next_password = "another"
    with pytest.raises(
        OutcomeUnknown, match=r"was not seen Off in time; .*Its power state cannot be read now: look at"
    ):
        await power(caller, "power_cycle", seconds=1, url=served, **LOGIN)
    assert bmc.asked == ["ForceOff"]


async def test_a_long_document_is_read(caller: HttpxCaller, bmc: Bmc, served: str) -> None:
    """It is that of a system with many links. Longer ones are rejected."""
    bmc.padding = 500_000
    assert (await power(caller, "off", url=served, **LOGIN))["power_state"] == "Off"
    bmc.padding = 2_000_000
    with pytest.raises(TemporaryFailure, match="with no JSON object"):
        await power(caller, "on", url=served, **LOGIN)


async def test_a_node_turned_off_is_turned_on_despite_refusals(caller: HttpxCaller, bmc: Bmc, served: str) -> None:
    """And although the run has ended by then. Refusals of the first change end the attempt."""
    answers = iter(["go_on"])

    async def clearance() -> str:
        return next(answers, "stop")

    bmc.refuses = [204, 409, 503]
    output = await power(caller, "power_cycle", url=served, clearance=clearance, **LOGIN)
    assert (output["power_state"], bmc.asked) == ("On", ["ForceOff", "On", "On", "On"])
    for status, kind in ((409, PermanentFailure), (503, TemporaryFailure)):
        bmc.refuses = [status]
        with pytest.raises(kind, match=f"answered {status} to ForceOff of /redfish/v1/Systems/1: the system is busy"):
            await power(caller, "power_cycle", url=served, **LOGIN)
    with pytest.raises(TemporaryFailure, match="stopped, because the run was cancelled"):
        await power(caller, "power_cycle", url=served, clearance=clearance, **LOGIN)


async def test_a_node_is_not_turned_off_if_it_could_not_be_turned_on(
    caller: HttpxCaller, bmc: Bmc, served: str
) -> None:
    """The node's actions that the BMC allows are read first."""
    bmc.allowed = ["ForceOff"]
    with pytest.raises(PermanentFailure, match="allows ForceOff, not On"):
        await power(caller, "power_cycle", url=served, **LOGIN)
    assert bmc.asked == []


async def test_the_system_must_be_named_if_there_are_several(caller: HttpxCaller, bmc: Bmc, served: str) -> None:
    """The error lists them."""
    bmc.systems = ["HGX_0", "System.Embedded.1"]
    with pytest.raises(PermanentFailure, match="has 2 systems; name one as system; there are: HGX_0, System"):
        await power(caller, "off", url=served, **LOGIN)
    assert (await power(caller, "off", url=served, system="HGX_0", **LOGIN))["power_state"] == "Off"


async def test_a_paged_list_of_systems_is_read_to_its_end(caller: HttpxCaller, bmc: Bmc, served: str) -> None:
    """Otherwise the first page's only system would be mistaken for the only one."""
    bmc.systems, bmc.page = ["a", "b", "c"], 1
    with pytest.raises(PermanentFailure, match="has 3 systems"):
        await power(caller, "off", url=served, **LOGIN)
    assert (await power(caller, "off", url=served, system="c", **LOGIN))["power_state"] == "Off"
    bmc.asked.clear()
    for link in ("http://other/redfish/v1/Systems", "/redfish/v1/Chassis", "/redfish/v1/Systems?$skip=0"):
        bmc.next_link = link
        with pytest.raises(PermanentFailure, match="in pages that cannot be read"):
            await power(caller, "off", url=served, **LOGIN)
        with pytest.raises(PermanentFailure, match="in pages that cannot be read"):
            await power(caller, "off", url=served, system="b", **LOGIN)
        assert (await power(caller, "off", url=served, system="a", **LOGIN))["power_state"] == "Off"
    bmc.next_link = f"{served}/redfish/v1/Systems?$skip=2"
    assert (await power(caller, "off", url=served, system="c", **LOGIN))["power_state"] == "Off"
    assert bmc.asked == []


@pytest.mark.parametrize(
    "path", ["http://other/Reset", "/redfish/v1/Systems/1/../2/Reset", "/redfish/v1/Systems/1/%2e%2E/2/Reset"]
)
async def test_a_reset_for_another_system_is_refused(caller: HttpxCaller, bmc: Bmc, served: str, path: str) -> None:
    bmc.reset_at = path
    with pytest.raises(PermanentFailure, match=r"offers no reset of /redfish/v1/Systems/1$"):
        await power(caller, "power_cycle", url=served, **LOGIN)
    assert bmc.asked == []


async def test_a_wrong_password_is_reported(caller: HttpxCaller, bmc: Bmc, served: str) -> None:
    """The password appears nowhere."""
    bmc.password = "another"
    with pytest.raises(PermanentFailure, match="answered 401") as refused:
        await power(caller, "off", url=served, **LOGIN)
    assert "s3cret" not in str(refused.value)


async def test_the_address_comes_from_the_inventory(caller: HttpxCaller, bmc: Bmc, served: str) -> None:
    """A host gets https; without the attribute no call is made."""
    output = await power(caller, "off", attribute="bmc", inventory={"bmc": served}, **LOGIN)
    assert output["power_state"] == "Off"
    with pytest.raises(PermanentFailure, match="the inventory has no attribute bmc of n1"):
        await power(caller, "on", attribute="bmc", **LOGIN)
    with pytest.raises(TemporaryFailure, match=r"https://127\.0\.0\.1"):
        await power(caller, "on", attribute="bmc", inventory={"bmc": served.removeprefix("http://")}, **LOGIN)


async def test_only_the_configured_ca_is_trusted(tmp_path: Path, bmc: Bmc) -> None:
    """BMCs use self-signed certificates; a password is sent to none of them unchecked."""
    signed = certificate(tmp_path)
    caller = HttpxCaller({"TRAINMEDIC_HTTP_BMC": "s3cret", "TRAINMEDIC_HTTP_CA": str(signed[0])})
    with Served(bmc.app(), signed) as running:
        with pytest.raises(TemporaryFailure, match="certificate"):
            await power(caller, "off", url=running.url, **LOGIN)
        output = await power(caller, "off", url=running.url, ca_from_env="TRAINMEDIC_HTTP_CA", **LOGIN)
    await caller.close()
    assert output["power_state"] == "Off"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({"do": "off"}, "give one of url and attribute"),
        ({"do": "off", "url": "https://bmc", "attribute": "bmc"}, "give one of url and attribute"),
        ({"do": "off", "url": "https://medic:pw@bmc"}, "user name or password in a URL"),
        ({"do": "power_cycle", "url": "https://bmc"}, "'on' or 'off'"),
    ],
)
def test_parameters_are_validated(written: dict[str, Any], told: str) -> None:
    """This happens when a playbook is loaded."""
    with pytest.raises(ValueError, match=told):
        PowerParams.model_validate(written)


@pytest.mark.parametrize(
    "raw",
    [
        {"url": "https://{{ labels.bmc }}/"},
        {"attribute": "{{ labels.bmc }}"},
        {"url": "https://bmc", "basic_auth": {"user": "a", "password_from_env": "{{ labels.secret }}"}},
    ],
)
def test_no_alert_chooses_where_the_password_goes(raw: dict[str, Any]) -> None:
    """The same rule holds for ``http.request``."""
    for action in (NodePower, NodePowerCycle):
        with pytest.raises(ValueError):
            action.check_template(raw)
