"""The contract of `ports.AlertSource`, on a real Alertmanager."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from trainmedic_core.fingerprint import fingerprint
from trainmedic_server.adapters.alertmanager_api import AlertmanagerApi
from trainmedic_server.domain.alert import Alert, AlertStatus, Identity
from trainmedic_server.errors import PermanentFailure, TemporaryFailure


@pytest.fixture
async def source(alertmanager: str, clock) -> AsyncIterator[AlertmanagerApi]:
    made = AlertmanagerApi(alertmanager, clock, settles_after=timedelta(0))
    yield made
    await made.close()


@pytest.fixture
async def firing(alertmanager: str) -> dict[str, str]:
    """An alert that fires, as the API lists it."""
    name = f"Spike{uuid.uuid4().hex[:8]}"
    began = datetime.now(UTC) - timedelta(minutes=3)
    alert = {"labels": {"alertname": name, "job_name": "llm-1"}, "startsAt": began.isoformat()}
    async with httpx.AsyncClient() as client:
        (await client.post(f"{alertmanager}/api/v2/alerts", json=[alert])).raise_for_status()
        listed = (await client.get(f"{alertmanager}/api/v2/alerts", params={"filter": f"alertname={name}"})).json()
    return {"fingerprint": listed[0]["fingerprint"], "began": began.isoformat(), "alertname": name}


def _identity(firing, later=timedelta(0)):
    return Identity(firing["fingerprint"], datetime.fromisoformat(firing["began"]) + later)


async def _silences(alertmanager, comment):
    async with httpx.AsyncClient() as client:
        listed = (await client.get(f"{alertmanager}/api/v2/silences")).json()
    return [one for one in listed if one["comment"] == comment]


async def test_a_firing_alert_is_known_to_fire(source, firing):
    """It is found by fingerprint and start time, which the API states only in milliseconds."""
    assert await source.is_firing(_identity(firing))


async def test_an_earlier_alert_with_the_same_labels_is_not_firing(source, firing):
    """The labels fire again, but with a later start: the alert in question has ended."""
    assert not await source.is_firing(_identity(firing, -timedelta(hours=1)))


async def test_an_alert_merged_into_a_longer_one_is_firing(source, firing):
    """Of two overlapping reports, Alertmanager keeps the earlier start."""
    assert await source.is_firing(_identity(firing, timedelta(minutes=1)))


async def test_an_alert_that_was_never_sent_is_not_firing(source):
    """An unknown fingerprint is not firing."""
    assert not await source.is_firing(Identity("0" * 16, datetime.now(UTC)))


async def test_many_queries_at_once_are_one_request(peer, clock):
    """After a storm, Alertmanager is not asked for all its alerts once per alert."""
    source = AlertmanagerApi(peer.url("/list"), clock, settles_after=timedelta(0))
    answers = [source.is_firing(Identity(f"{number:016x}", clock.now())) for number in range(100)]
    assert await asyncio.gather(*answers) == [False] * 100
    assert len(peer.requests) == 1
    await source.close()


async def test_many_unanswered_queries_are_one_request(peer, clock):
    """A silent Alertmanager delays each request by seconds, and other alerts wait for these."""
    source = AlertmanagerApi(peer.url("/status/500?"), clock)
    answers = [source.is_firing(Identity(f"{number:016x}", clock.now())) for number in range(100)]
    failures = await asyncio.gather(*answers, return_exceptions=True)
    assert {type(failure) for failure in failures} == {TemporaryFailure}
    assert len(peer.requests) == 1
    await source.close()


async def test_a_just_started_alertmanager_is_not_trusted_that_an_alert_ended(alertmanager, firing, clock):
    """It has forgotten what fired before its restart; it knows only what was reported since."""
    source = AlertmanagerApi(alertmanager, clock)
    assert await source.is_firing(_identity(firing))
    with pytest.raises(TemporaryFailure, match="just started"):
        await source.is_firing(Identity("0" * 16, clock.now()))
    await source.close()


async def test_a_silenced_alert_still_fires(source, firing, clock):
    """Silencing an alert does not repair its cause."""
    await source.silence({"alertname": firing["alertname"]}, clock.now() + timedelta(minutes=5), uuid.uuid4().hex)
    assert await source.is_firing(_identity(firing))


async def test_a_silence_covers_the_given_labels_until_its_end(source, alertmanager, clock):
    """The equality matchers, the end and the author are as given."""
    comment, ends_at = f"quiet {uuid.uuid4().hex}", clock.now() + timedelta(minutes=10)
    made = await source.silence({"alertname": "A", "node": 'n"1'}, ends_at, comment)
    (silence,) = await _silences(alertmanager, comment)
    assert silence["id"] == made
    assert {(one["name"], one["value"], one["isRegex"], one["isEqual"]) for one in silence["matchers"]} == {
        ("alertname", "A", False, True),
        ("node", 'n"1', False, True),
    }
    assert abs(datetime.fromisoformat(silence["endsAt"]) - ends_at) <= timedelta(milliseconds=1)
    assert silence["createdBy"] == "trainmedic"


async def test_a_silence_is_created_once(source, alertmanager, clock):
    """A second request with the same comment finds it and creates none."""
    comment = f"once {uuid.uuid4().hex}"
    ids = {await source.silence({"a": "b"}, clock.now() + timedelta(minutes=5), comment) for _ in range(3)}
    assert len(ids) == len(await _silences(alertmanager, comment)) == 1
    assert await source.find_silence(comment) in ids


async def test_a_silence_is_ended_once(source, alertmanager, clock):
    """Ending it again, or ending an unknown one, is not a failure; an ended one is not found."""
    comment = f"ended {uuid.uuid4().hex}"
    made = await source.silence({"a": "b"}, clock.now() + timedelta(minutes=5), comment)
    for _ in range(2):
        await source.expire_silence(made)
    assert [one["status"]["state"] for one in await _silences(alertmanager, comment)] == ["expired"]
    assert await source.find_silence(comment) is None
    await source.expire_silence(str(uuid.uuid4()))


async def test_a_silence_that_alertmanager_refuses_fails_permanently(source, clock):
    """The error contains Alertmanager's reason."""
    with pytest.raises(PermanentFailure, match="the silence was not created"):
        await source.silence({"a": ""}, clock.now() + timedelta(minutes=5), uuid.uuid4().hex)


async def test_an_unavailable_alertmanager_is_a_temporary_failure(clock, closed_port):
    """Nothing is assumed about an alert that cannot be looked up."""
    source = AlertmanagerApi(f"http://127.0.0.1:{closed_port}", clock)
    with pytest.raises(TemporaryFailure):
        await source.is_firing(Identity("0" * 16, clock.now()))
    with pytest.raises(TemporaryFailure):
        await source.silence({"a": "b"}, clock.now() + timedelta(minutes=5), "c")
    await source.close()


@pytest.mark.parametrize("path", ["/json", "/latin", "/status/403", "/status/500"])
async def test_an_unreadable_answer_proves_nothing(peer, clock, path, monkeypatch):
    """Whatever else answers at that URL, an alert is not assumed to have ended."""
    source = AlertmanagerApi(peer.url("/"), clock)
    monkeypatch.setattr(source._endpoint, "_base", peer.url(f"{path}?"))
    with pytest.raises(TemporaryFailure):
        await source.is_firing(Identity("0" * 16, clock.now()))
    await source.close()


async def test_a_password_in_the_url_is_sent_as_basic_auth(peer, clock):
    """It appears in no error."""
    source = AlertmanagerApi(f"http://medic:p%40ss@127.0.0.1:{peer.port}", clock)
    with pytest.raises(TemporaryFailure) as caught:
        await source.is_firing(Identity("0" * 16, clock.now()))
    assert peer.requests[0].headers["authorization"] == f"Basic {base64.b64encode(b'medic:p@ss').decode()}"
    assert "p@ss" not in str(caught.value)
    await source.close()


async def test_a_token_file_is_sent_as_bearer(peer, clock, tmp_path):
    """The file is read for each call; without it nothing is sent."""
    source = AlertmanagerApi(peer.url(""), clock, tmp_path / "token")
    with pytest.raises(TemporaryFailure, match=r"--alertmanager-token: cannot read .*token: No such file"):
        await source.find_silence("c")
    (tmp_path / "token").write_text("t0ken\n")
    with pytest.raises(TemporaryFailure):
        await source.find_silence("c")
    assert [one.headers["authorization"] for one in peer.requests] == ["Bearer t0ken"]
    await source.close()


def _alert(name, began, ended=None):
    labels = {"alertname": name, "node": "node-1", "source": "log"}
    status = AlertStatus.FIRING if ended is None else AlertStatus.RESOLVED
    return Alert(fingerprint(labels), status, labels, {"line": "a \u2028 line \x1b[31m"}, began, ended)


async def test_a_sent_alert_fires_until_it_is_reported_as_ended(source):
    """`ports.findings.AlertSender`: it has the fingerprint that we give it; sending it twice creates no second one."""
    began = datetime.now(UTC) - timedelta(minutes=2)
    alert = _alert(f"Told{uuid.uuid4().hex[:8]}", began)
    for _ in range(2):
        await source.tell([alert])
    assert await source.is_firing(alert.identity)
    await source.tell([_alert(alert.name, began, ended=datetime.now(UTC) - timedelta(seconds=1))])
    await asyncio.sleep(1.1)  # an answer is used again for a second
    assert not await source.is_firing(alert.identity)


async def test_an_alert_that_ends_before_its_start_is_still_accepted(source):
    """The clock was set back in between; the other alerts of the call are accepted as well."""
    began = datetime.now(UTC)
    other = _alert(f"Told{uuid.uuid4().hex[:8]}", began)
    await source.tell([_alert(f"Told{uuid.uuid4().hex[:8]}", began, ended=began - timedelta(hours=1)), other])
    assert await source.is_firing(other.identity)


async def test_alerts_that_cannot_be_sent_now_are_sent_again(clock):
    """An unavailable Alertmanager raises its own error, and nothing is lost."""
    source = AlertmanagerApi("http://127.0.0.1:1", clock)
    with pytest.raises(TemporaryFailure):
        await source.tell([_alert("Told", datetime.now(UTC))])
    await source.close()
