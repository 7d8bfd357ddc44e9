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


async def test_an_alert_that_fires_is_known_to_fire(source, firing):
    """By its fingerprint and beginning, though the API tells the latter to the millisecond only."""
    assert await source.is_firing(_identity(firing))


async def test_an_earlier_alert_of_the_same_labels_does_not_fire(source, firing):
    """The labels fire again, but since later: the asked alert has ended."""
    assert not await source.is_firing(_identity(firing, -timedelta(hours=1)))


async def test_an_alert_that_was_merged_into_a_longer_one_fires(source, firing):
    """Of two overlapping reports the Alertmanager keeps the earlier beginning."""
    assert await source.is_firing(_identity(firing, timedelta(minutes=1)))


async def test_an_alert_that_nobody_sent_does_not_fire(source):
    """An unknown fingerprint is not firing."""
    assert not await source.is_firing(Identity("0" * 16, datetime.now(UTC)))


async def test_many_questions_at_once_are_one_request(peer, clock):
    """After a storm the Alertmanager is not asked for all its alerts once for each of them."""
    source = AlertmanagerApi(peer.url("/list"), clock, settles_after=timedelta(0))
    answers = [source.is_firing(Identity(f"{number:016x}", clock.now())) for number in range(100)]
    assert await asyncio.gather(*answers) == [False] * 100
    assert len(peer.requests) == 1
    await source.close()


async def test_many_questions_without_an_answer_are_one_request(peer, clock):
    """One that does not answer lets each request wait for seconds, and other alerts wait for these."""
    source = AlertmanagerApi(peer.url("/status/500?"), clock)
    answers = [source.is_firing(Identity(f"{number:016x}", clock.now())) for number in range(100)]
    failures = await asyncio.gather(*answers, return_exceptions=True)
    assert {type(failure) for failure in failures} == {TemporaryFailure}
    assert len(peer.requests) == 1
    await source.close()


async def test_one_that_has_just_started_is_not_believed_that_an_alert_has_ended(alertmanager, firing, clock):
    """It has forgotten what fired before its restart; what it has been told since, it knows."""
    source = AlertmanagerApi(alertmanager, clock)
    assert await source.is_firing(_identity(firing))
    with pytest.raises(TemporaryFailure, match="just started"):
        await source.is_firing(Identity("0" * 16, clock.now()))
    await source.close()


async def test_a_silenced_alert_still_fires(source, firing, clock):
    """Who silenced it did not repair it."""
    await source.silence({"alertname": firing["alertname"]}, clock.now() + timedelta(minutes=5), uuid.uuid4().hex)
    assert await source.is_firing(_identity(firing))


async def test_a_silence_covers_what_it_names_until_its_end(source, alertmanager, clock):
    """Equality matchers, the end and the author are as given."""
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


async def test_a_silence_is_made_once(source, alertmanager, clock):
    """Asked again with the same comment, it is found, not made anew."""
    comment = f"once {uuid.uuid4().hex}"
    ids = {await source.silence({"a": "b"}, clock.now() + timedelta(minutes=5), comment) for _ in range(3)}
    assert len(ids) == len(await _silences(alertmanager, comment)) == 1
    assert await source.find_silence(comment) in ids


async def test_a_silence_is_ended_once(source, alertmanager, clock):
    """Ending it again, or one that nobody knows, is no failure; an ended one is not found."""
    comment = f"ended {uuid.uuid4().hex}"
    made = await source.silence({"a": "b"}, clock.now() + timedelta(minutes=5), comment)
    for _ in range(2):
        await source.expire_silence(made)
    assert [one["status"]["state"] for one in await _silences(alertmanager, comment)] == ["expired"]
    assert await source.find_silence(comment) is None
    await source.expire_silence(str(uuid.uuid4()))


async def test_a_silence_that_the_alertmanager_refuses_fails_for_good(source, clock):
    """Its reason is told."""
    with pytest.raises(PermanentFailure, match="the silence was not created"):
        await source.silence({"a": ""}, clock.now() + timedelta(minutes=5), uuid.uuid4().hex)


async def test_an_alertmanager_that_is_away_is_a_passing_failure(clock, closed_port):
    """Nothing is assumed about an alert that cannot be asked for."""
    source = AlertmanagerApi(f"http://127.0.0.1:{closed_port}", clock)
    with pytest.raises(TemporaryFailure):
        await source.is_firing(Identity("0" * 16, clock.now()))
    with pytest.raises(TemporaryFailure):
        await source.silence({"a": "b"}, clock.now() + timedelta(minutes=5), "c")
    await source.close()


@pytest.mark.parametrize("path", ["/json", "/latin", "/status/403", "/status/500"])
async def test_an_answer_that_cannot_be_read_tells_nothing(peer, clock, path, monkeypatch):
    """Whatever else answers at that URL, an alert is not taken to have ended."""
    source = AlertmanagerApi(peer.url("/"), clock)
    monkeypatch.setattr(source._endpoint, "_base", peer.url(f"{path}?"))
    with pytest.raises(TemporaryFailure):
        await source.is_firing(Identity("0" * 16, clock.now()))
    await source.close()


async def test_a_password_in_the_url_is_sent_as_basic(peer, clock):
    """And is in no error."""
    source = AlertmanagerApi(f"http://medic:p%40ss@127.0.0.1:{peer.port}", clock)
    with pytest.raises(TemporaryFailure) as caught:
        await source.is_firing(Identity("0" * 16, clock.now()))
    assert peer.requests[0].headers["authorization"] == f"Basic {base64.b64encode(b'medic:p@ss').decode()}"
    assert "p@ss" not in str(caught.value)
    await source.close()


async def test_a_token_file_is_sent_as_bearer(peer, clock, tmp_path):
    """Its content is read for each call; without it nothing is sent."""
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


async def test_an_alert_that_is_told_fires_until_it_is_told_to_have_ended(source):
    """`ports.findings.AlertSender`: under the fingerprint that we give it; telling it twice makes no second one."""
    began = datetime.now(UTC) - timedelta(minutes=2)
    alert = _alert(f"Told{uuid.uuid4().hex[:8]}", began)
    for _ in range(2):
        await source.tell([alert])
    assert await source.is_firing(alert.identity)
    await source.tell([_alert(alert.name, began, ended=datetime.now(UTC) - timedelta(seconds=1))])
    await asyncio.sleep(1.1)  # an answer is used again for a second
    assert not await source.is_firing(alert.identity)


async def test_an_alert_that_ended_before_it_began_is_taken_all_the_same(source):
    """By a clock that was set back in between; the others of the call are taken as well."""
    began = datetime.now(UTC)
    other = _alert(f"Told{uuid.uuid4().hex[:8]}", began)
    await source.tell([_alert(f"Told{uuid.uuid4().hex[:8]}", began, ended=began - timedelta(hours=1)), other])
    assert await source.is_firing(other.identity)


async def test_what_cannot_be_told_now_is_told_again(clock):
    """An Alertmanager that is away is an error of its kind, and loses nothing."""
    source = AlertmanagerApi("http://127.0.0.1:1", clock)
    with pytest.raises(TemporaryFailure):
        await source.tell([_alert("Told", datetime.now(UTC))])
    await source.close()
