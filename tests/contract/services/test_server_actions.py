"""The actions that the server itself carries out, with their real adapters against real servers."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from msgspec.structs import replace

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions import registry
from trainmedic_server.adapters.alertmanager_api import AlertmanagerApi
from trainmedic_server.adapters.apprise_notifier import AppriseNotifier
from trainmedic_server.adapters.httpx_caller import HttpxCaller
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.message_routes import routes_of
from trainmedic_server.errors import NotSetUp, OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Call, Services

ALERT = Alert("f" * 16, AlertStatus.FIRING, {"alertname": "Spike", "job_name": "llm-1"}, {}, datetime.now(UTC))


@pytest.fixture
async def actions(peer, clock, alertmanager):
    """The registry, with everything configured."""
    caller, source = HttpxCaller({"TRAINMEDIC_HTTP_T": "s3cret-token"}), AlertmanagerApi(alertmanager, clock)
    notifier = AppriseNotifier({"oncall": [f"json://127.0.0.1:{peer.port}/oncall"]})
    yield registry.build(Services(clock, None, caller, notifier, source))
    await caller.close()
    await source.close()


@pytest.fixture
def bare(clock):
    """The registry of a server with no channel and no Alertmanager."""
    return registry.build(Services(clock, None, HttpxCaller()))


def _call(actions, name, given, **other):
    now = datetime.now(UTC)
    return Call(
        **{
            "command_id": str(uuid.uuid4()),
            "run_id": "run-1",
            "playbook": "p",
            "target": Target(TargetKind.JOB, job="llm-1"),
            "params": actions.action_class(name).Params.model_validate(given),
            "reason": "test",
            "issued_at": now,
            "deadline": now + timedelta(seconds=5),
            "alert": ALERT,
            **other,
        }
    )


async def _do(actions, name, given, **other):
    return await actions.get(name).perform(_call(actions, name, given, **other))


# --- notify


async def test_notify_sends_the_message(actions, peer):
    """It goes to the named channel, which the output states. The text at its end identifies the run."""
    assert await _do(actions, "notify", {"message": "hot", "to": "oncall"}) == {"to": "oncall"}
    sent = json.loads(peer.requests[0].body)
    assert (sent["message"], sent["type"]) == ("hot\nrun run-1", "warning")


async def test_notify_links_to_the_run_and_shows_its_severity(clock, peer):
    """It links if the external URL is known; the severity is the step's, else that of the alert's label."""
    notifier = AppriseNotifier({"oncall": [f"json://127.0.0.1:{peer.port}/oncall"]})
    services = Services(clock, None, HttpxCaller(), notifier, external_url="https://medic.example")
    actions = registry.build(services)
    grave = replace(ALERT, labels={**ALERT.labels, "severity": "Critical"})
    await _do(actions, "notify", {"message": "hot"}, alert=grave)
    await _do(actions, "notify", {"message": "hot", "severity": "info"}, alert=grave)
    sent = [json.loads(request.body) for request in peer.requests]
    assert [one["type"] for one in sent] == ["failure", "info"]
    assert sent[0]["message"] == "hot\nrun run-1 · https://medic.example/runs/run-1"


async def test_notify_truncates_long_messages(actions, peer):
    """A label of any length does not keep the message from people."""
    await _do(actions, "notify", {"message": "m" * 100_000, "title": "t" * 1000})
    sent = json.loads(peer.requests[0].body)
    assert (len(sent["message"]), len(sent["title"])) == (16_000, 250)
    assert sent["message"].endswith("m…\nrun run-1")


async def test_notify_is_not_sent_twice_after_a_crash(actions, peer):
    """Whether the first attempt was sent is unknown, and reported as such."""
    with pytest.raises(OutcomeUnknown, match="may or may not have been sent before the server stopped"):
        await _do(actions, "notify", {"message": "hot"}, resumed=True)
    assert peer.requests == []


async def test_notify_without_a_channel_is_skipped_and_reports_it(bare):
    """So is a resumed one, which cannot have been sent."""
    for resumed in (False, True):
        with pytest.raises(NotSetUp, match=r"^not sent: no notification channel is configured$"):
            await _do(bare, "notify", {"message": "hot"}, resumed=resumed)


async def test_notify_to_an_unconfigured_channel_is_skipped_and_names_the_configured_ones(actions, peer):
    """No other channel gets the message instead."""
    with pytest.raises(NotSetUp, match=r"^not sent: there is no channel 'ops'; there are: oncall$"):
        await _do(actions, "notify", {"message": "hot", "to": "ops"})
    assert peer.requests == []


async def test_notify_without_a_channel_name_goes_to_the_channels_whose_routes_match(clock, peer):
    """Routes match component and severity, and the output names the channels. A named channel needs no route."""
    names = ("gpu", "page", "rest")
    notifier = AppriseNotifier({name: [f"json://127.0.0.1:{peer.port}/{name}"] for name in names})
    routes = routes_of("gpu=component:gpu page=severity:critical;kind:notify rest=default", names)
    actions = registry.build(Services(clock, None, HttpxCaller(), notifier, routes=routes))
    sent = {}
    for component, severity in (("gpu", "critical"), ("gpu", "warning"), ("storage", "info")):
        alert = replace(ALERT, labels={**ALERT.labels, "component": component, "severity": severity})
        sent[component, severity] = (await _do(actions, "notify", {"message": "m"}, alert=alert))["to"]
    assert sent == {("gpu", "critical"): "gpu, page", ("gpu", "warning"): "gpu", ("storage", "info"): "rest"}
    assert (await _do(actions, "notify", {"message": "m", "to": "rest"}))["to"] == "rest"
    received = [request.path.strip("/") for request in peer.requests]
    # Several channels are sent to at once.
    assert [sorted(received[:2]), *received[2:]] == [["gpu", "page"], "gpu", "rest", "rest"]


async def test_notify_ends_by_its_deadline(clock, peer):
    """A channel that hangs leaves the outcome unknown instead of blocking the run."""
    notifier = AppriseNotifier({"slow": [f"json://127.0.0.1:{peer.port}/hang?rto=1"]})
    actions = registry.build(Services(clock, None, HttpxCaller(), notifier))
    with pytest.raises(OutcomeUnknown, match="too long"):
        await _do(actions, "notify", {"message": "m"}, deadline=datetime.now(UTC) + timedelta(seconds=0.5))


# --- http.request


async def test_http_request_sends_what_the_playbook_says(actions, peer):
    """It sends JSON with its type, the encoded query, and the command's id, by which the service detects repeats."""
    call = _call(
        actions,
        "http.request",
        {"method": "POST", "url": peer.url("/json"), "query": {"a": "b c"}, "json": {"x": None}},
    )
    output = await actions.get("http.request").perform(call)
    seen = peer.requests[0]
    assert (seen.path, json.loads(seen.body)) == ("/json?a=b%20c", {"x": None})
    assert (seen.headers["content-type"], seen.headers["idempotency-key"]) == ("application/json", call.command_id)
    assert (output["status"], output["json"], output["truncated"]) == (200, {"done": True}, False)
    assert output["headers"] == {"content-type": "application/json", "content-length": "14", "etag": '"7"'}


async def test_http_request_reports_that_its_body_is_truncated(actions, peer):
    """Otherwise a wait for the absence of some text would succeed."""
    call = _call(actions, "http.request", {"method": "GET", "url": peer.url("/big")})
    assert (await actions.get("http.request").perform(call))["truncated"] is True


async def test_http_request_keeps_the_authors_content_type(actions, peer):
    """The header is not duplicated."""
    given = {
        "method": "PUT",
        "url": peer.url("/"),
        "headers": {"content-type": "application/cloudevents+json"},
        "json": 1,
    }
    await _do(actions, "http.request", given)
    assert (peer.requests[0].headers["content-type"], peer.requests[0].body) == ("application/cloudevents+json", b"1")


async def test_http_request_keeps_secrets_out_of_its_output(actions, peer):
    """The history shows that a token was sent, but not its value."""
    output = await _do(
        actions, "http.request", {"method": "GET", "url": peer.url("/echo"), "bearer_from_env": "TRAINMEDIC_HTTP_T"}
    )
    assert peer.requests[0].headers["authorization"] == "Bearer s3cret-token"
    assert "s3cret-token" not in json.dumps(output)


@pytest.mark.parametrize(
    ("status", "method", "failure"),
    [
        (404, "POST", PermanentFailure),
        (302, "GET", PermanentFailure),
        (429, "POST", TemporaryFailure),
        (503, "POST", TemporaryFailure),
        (502, "GET", TemporaryFailure),
        (502, "POST", OutcomeUnknown),
        (504, "PATCH", OutcomeUnknown),
    ],
)
async def test_http_request_classifies_an_unexpected_status(actions, peer, status, method, failure):
    """Temporary ones may be retried; behind a gateway, a call that must not be repeated may have acted."""
    with pytest.raises(failure, match=f"was answered {status}, not 2xx") as caught:
        await _do(actions, "http.request", {"method": method, "url": peer.url(f"/status/{status}")})
    assert type(caught.value) is failure
    assert caught.value.output["body"] == "said no"


async def test_http_request_accepts_the_statuses_that_the_author_expects(actions, peer):
    """A 404, for example, can be the desired result."""
    given = {"method": "DELETE", "url": peer.url("/status/404"), "expect": ["2xx", 404]}
    assert (await _do(actions, "http.request", given))["status"] == 404


async def test_http_request_is_repeated_after_a_crash_only_if_harmless(actions, peer):
    """Otherwise its outcome is unknown."""
    url = peer.url("/ok")
    await _do(actions, "http.request", {"method": "PUT", "url": url}, resumed=True)
    await _do(actions, "http.request", {"method": "POST", "url": url, "idempotent": True}, resumed=True)
    with pytest.raises(OutcomeUnknown, match="not declared idempotent"):
        await _do(actions, "http.request", {"method": "POST", "url": url}, resumed=True)
    assert [one.method for one in peer.requests] == ["PUT", "POST"]


async def test_http_request_past_its_deadline_is_not_made(actions, peer):
    """Nothing was sent, so a retry may succeed."""
    with pytest.raises(TemporaryFailure, match="no time was left"):
        await _do(actions, "http.request", {"method": "GET", "url": peer.url("/")}, deadline=datetime.now(UTC))
    assert peer.requests == []


# --- alertmanager.silence


async def _silences(alertmanager, command_id):
    async with httpx.AsyncClient() as client:
        listed = (await client.get(f"{alertmanager}/api/v2/silences")).json()
    return [one for one in listed if command_id in one["comment"]]


async def test_silence_covers_this_alert_for_the_given_time(actions, alertmanager):
    """It matches all labels of the alert; its comment contains the command's id."""
    call = _call(actions, "alertmanager.silence", {"duration": "10m", "comment": "repairing"})
    output = await actions.get("alertmanager.silence").perform(call)
    (silence,) = await _silences(alertmanager, call.command_id)
    assert silence["id"] == output["silence_id"]
    assert silence["comment"] == f"repairing [{call.command_id}]"
    assert {one["name"]: one["value"] for one in silence["matchers"]} == dict(ALERT.labels)


async def test_silence_by_chosen_labels_requires_all_of_them(actions, alertmanager):
    """A label that the alert lacks would widen the silence, so it is refused."""
    output = await _do(actions, "alertmanager.silence", {"duration": "1m", "labels": ["alertname"]})
    assert output["matchers"] == {"alertname": "Spike"}
    with pytest.raises(PermanentFailure, match="no label node"):
        await _do(actions, "alertmanager.silence", {"duration": "1m", "labels": ["alertname", "node"]})


async def test_silence_interrupted_by_a_crash_is_found_again(actions, alertmanager):
    """The resumed attempt creates no second one."""
    call = _call(actions, "alertmanager.silence", {"duration": "10m"})
    first = await actions.get("alertmanager.silence").perform(call)
    assert await actions.get("alertmanager.silence").perform(call) == first
    assert len(await _silences(alertmanager, call.command_id)) == 1


@pytest.mark.parametrize("told", [True, False])
async def test_silence_is_ended_by_the_undo(actions, alertmanager, told):
    """The undo uses its id or, if that was lost, its comment."""
    call = _call(actions, "alertmanager.silence", {"duration": "10m", "comment": "long" * 1000})
    output = await actions.get("alertmanager.silence").perform(call)
    inverse = actions.action_class("alertmanager.silence").inverse(call.params, output if told else None)
    for _ in range(2):
        await _do(actions, inverse.action, inverse.params, undo_of=call.command_id)
    assert [one["status"]["state"] for one in await _silences(alertmanager, call.command_id)] == ["expired"]


async def test_the_undo_of_a_silence_that_was_never_created_succeeds(actions):
    """It touches nothing."""
    output = await _do(actions, "alertmanager.expire_silence", {"comment": "c"}, undo_of=str(uuid.uuid4()))
    assert output == {"silence_id": None}


async def test_a_playbook_ends_a_silence_only_by_its_id(actions):
    """Anyone could have written the comment."""
    with pytest.raises(PermanentFailure, match="silence_id is missing"):
        await _do(actions, "alertmanager.expire_silence", {"comment": "c"})


async def test_silence_without_an_alertmanager_reports_it(bare):
    """The setting is missing."""
    with pytest.raises(PermanentFailure, match="the Alertmanager's URL is not configured"):
        await _do(bare, "alertmanager.silence", {"duration": "1m"})


async def test_silence_that_would_have_ended_already_is_not_created(actions):
    """After a long downtime the requested time is over."""
    with pytest.raises(PermanentFailure, match="ended already"):
        await _do(
            actions, "alertmanager.silence", {"duration": "1m"}, issued_at=datetime.now(UTC) - timedelta(minutes=2)
        )
