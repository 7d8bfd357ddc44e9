"""Questions in Slack, with a whole server and a stand-in for Slack that refuses what Slack refuses."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support import slack as stand_in
from tests.support.live import Server
from tests.support.postgres import PostgresServer
from tests.support.programs import eventually
from tests.support.slack import APP, BOT, CHANNEL, Slack

ANN, BOB, EVE, MALLORY = "U0ANN", "U0BOB", "U0EVE", "U0MALLORY"
PLAYBOOKS = "\n---\n".join(
    f"""
playbook: {name}
on: {{alert: {name}}}
target: job
steps:
  - {{id: sure, approve: {{message: "{question}"{terms}}}, timeout: 1h}}
  - {{id: call, action: http.request, with: {{url: "http://127.0.0.1:1/", method: GET}}, timeout: 5s}}
"""
    for name, question, terms in (
        ("plain", "Go back {{ target.job }}?", ""),
        ("said", "{{ labels.said }}", ""),
        ("hardware", "Drain it?", ", by: [hw, cid]"),
        ("pair", "Both?", ", count: 2"),
        ("nagging", "Still?", ", remind: 2s"),
    )
)
BRIEF = """
playbook: brief
on: {alert: brief}
target: job
steps:
  - {id: sure, approve: "Quick?", timeout: 4s, on_timeout: reject}
  - {id: call, action: http.request, with: {url: "http://127.0.0.1:1/", method: GET}, timeout: 5s}
"""
TWICE = """
playbook: twice
on: {alert: twice}
target: job
steps:
  - {id: first, approve: "First?", timeout: 1h}
  - {id: second, approve: "Second?", timeout: 1h}
  - {id: call, action: http.request, with: {url: "http://127.0.0.1:1/", method: GET}, timeout: 5s}
"""


@dataclass
class Door:
    """A server, and the Slack in which it asks."""

    server: Server
    slack: Slack
    number: int = 0

    def ask(self, playbook: str, **labels: str) -> str:
        """Have a run ask; its id."""
        self.number += 1
        entry = {
            "status": "firing",
            "labels": {"alertname": playbook, "job_name": f"job-{self.number}", **labels},
            "startsAt": datetime.now(UTC).isoformat(),
        }
        answer = self.server.ask("/webhook", {"version": "4", "alerts": [entry]})
        assert answer.status == 200, answer
        run_id: str = answer.body["runs"][0]["run_id"]
        return run_id

    def messages(self, run_id: str, step: str | None = None) -> list[str]:
        """The messages about a run."""
        return [
            ts
            for ts, message in self.slack.messages.items()
            if (about := message.get("metadata", {}).get("event_payload", {})).get("run_id") == run_id
            and step in (None, about["step"])
        ]

    def message(self, run_id: str, step: str | None = None) -> str:
        """The one message about a question, once it is there."""
        eventually(lambda: self.messages(run_id, step), 60, "the question in Slack", 0.05)
        [ts] = self.messages(run_id, step)
        return ts

    def asked(self, playbook: str, **labels: str) -> tuple[str, str]:
        """A run that asks, and its message."""
        run_id = self.ask(playbook, **labels)
        return run_id, self.message(run_id)

    def shows(self, ts: str, *words: str) -> None:
        """Wait until the message says this, and has no buttons that decide."""

        def does() -> bool:
            text = json.dumps(self.slack.messages[ts]["blocks"])
            return all(word in text for word in words) and self.slack.button(ts, "approve") is None

        eventually(does, 60, f"{words} in {json.dumps(self.slack.messages[ts]['blocks'])}", 0.05)

    def told(self, user: str, word: str) -> None:
        """Wait until that person alone was told something with this word in it."""
        whispers = self.slack.whispers
        eventually(
            lambda: any(each["user"] == user and word in each["text"] for each in whispers),
            60,
            f"{word} in {whispers}",
            0.05,
        )

    def acknowledged(self, envelope_id: str) -> None:
        eventually(lambda: envelope_id in self.slack.acknowledged, 60, "the acknowledgement", 0.05)

    def decisions(self, run_id: str) -> list[tuple[str, str, str]]:
        """Who has decided what, with what note."""
        events = self.server.run(run_id)["events"]
        return [
            (event["kind"], event["actor"], event["data"]["note"])
            for event in events
            if event["kind"] in ("approved", "rejected")
        ]

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.server.directory.glob("server-*.log")))


def made_server(directory: Path, slack: Slack, *options: str, **environment: str) -> Server:
    people = {
        ANN: {"name": "ann"},
        BOB: {"name": "bob", "groups": ["hw"]},
        EVE: {"name": "eve", "groups": ["net"]},
    }
    directory.mkdir(exist_ok=True)
    file = directory / "slack.json"
    file.write_text(json.dumps({"channel": CHANNEL, "people": people, "api": slack.url}))
    tokens = {"TRAINMEDIC_SLACK_BOT_TOKEN": BOT, "TRAINMEDIC_SLACK_APP_TOKEN": APP, "TRAINMEDIC_LOG_LEVEL": "debug"}
    options = ("--slack", str(file), "--external-url", "https://medic.example", *options)
    return Server(directory, "\n---\n".join((PLAYBOOKS, BRIEF, TWICE)), *options, environment={**environment, **tokens})


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with stand_in.slack() as slack, made_server(tmp_path_factory.mktemp("server"), slack) as server:
        eventually(lambda: slack.connections == 1, 60, "the connection", 0.05)
        yield Door(server, slack)
    assert slack.refused == []  # but for what a test has asked for, and taken away


def test_a_question_is_asked_and_approved_by_a_button(door: Door) -> None:
    """It shows the action, the deadline and a link to the run; message and history name the user who pressed."""
    run_id, ts = door.asked("plain")
    shown = json.dumps(door.slack.messages[ts]["blocks"])
    for part in (
        "Go back job-",
        "http.request",
        "<!date^",
        f"https://medic.example/runs/{run_id}",
        "Needs approval by any operator",
    ):
        assert part in shown
    door.acknowledged(door.slack.press(ANN, ts, "approve"))
    door.shows(ts, "Approved by ann", "The run has failed")
    assert door.decisions(run_id) == [("approved", "ann", f"in Slack, {ANN}")]
    assert door.messages(run_id) == [ts]


def test_rejecting_requires_a_reason(door: Door) -> None:
    """It is recorded; a form that comes late or twice decides nothing more."""
    run_id, ts = door.asked("plain")
    forms = len(door.slack.forms)
    door.slack.press(ANN, ts, "reject")
    eventually(lambda: len(door.slack.forms) > forms, 60, "the form", 0.05)
    form = door.slack.forms[-1]
    door.acknowledged(door.slack.submit(ANN, form, "too risky\0 <!channel>"))
    door.shows(ts, "Rejected by ann: too risky <!channel> (in Slack, U0ANN)")
    door.slack.submit(BOB, form, "me too")
    door.told(BOB, "does not wait for approval")
    assert door.decisions(run_id) == [("rejected", "ann", "too risky <!channel> (in Slack, U0ANN)")]


def test_only_a_mapped_and_authorized_user_decides(door: Door) -> None:
    """Users missing from the file can neither approve nor reject; those in it approve only what is theirs."""
    run_id, ts = door.asked("hardware")
    forms = len(door.slack.forms)
    for action in ("approve", "reject"):
        door.acknowledged(door.slack.press(MALLORY, ts, action))
    door.told(MALLORY, "may not decide")
    door.slack.press(EVE, ts, "approve")
    door.told(EVE, "is approved by hw or cid")
    assert door.decisions(run_id) == []
    assert len(door.slack.forms) == forms
    door.slack.press(BOB, ts, "approve")
    door.shows(ts, "Approved by bob")
    assert [who for _, who, _ in door.decisions(run_id)] == ["bob"]


def test_users_are_reminded_in_the_thread(door: Door) -> None:
    """The channel shows it too; the message stays one, and after an answer there are no reminders."""
    run_id, ts = door.asked("nagging")

    def reminders() -> list[dict[str, Any]]:
        return [each for each in door.slack.messages.values() if each.get("thread_ts") == ts]

    eventually(reminders, 60, "a reminder", 0.05)
    first = reminders()[0]
    assert (first["reply_broadcast"], first["channel"]) == (True, CHANNEL)
    assert first["text"].startswith("Reminder: nagging on job:job-")
    door.slack.press(ANN, ts, "approve")
    door.shows(ts, "Approved by ann")
    assert door.messages(run_id) == [ts]


def test_two_people_must_approve_and_one_person_counts_once(door: Door) -> None:
    """It does not matter how often or by which interface they approve."""
    run_id, ts = door.asked("pair")
    door.slack.press(ANN, ts, "approve")
    eventually(lambda: "approved so far by ann" in json.dumps(door.slack.messages[ts]), 60, "the first", 0.05)
    door.slack.press(ANN, ts, "approve")
    door.told(ANN, "2 different people")
    door.slack.press(BOB, ts, "approve")
    door.shows(ts, "Approved by ann and bob")
    assert [who for _, who, _ in door.decisions(run_id)] == ["ann", "bob"]


def test_of_two_simultaneous_presses_one_decides(door: Door) -> None:
    """A press that Slack sends twice decides once."""
    run_id, ts = door.asked("plain")
    start = threading.Barrier(8)

    def press(user: str) -> None:
        start.wait(60)
        door.slack.press(user, ts, "approve")

    threads = [threading.Thread(daemon=True, target=press, args=(user,)) for user in (ANN, BOB) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    door.shows(ts, "Approved by")
    eventually(lambda: sum(run_id in each["text"] for each in door.slack.whispers) == 7, 60, "seven refusals", 0.05)
    assert len(door.decisions(run_id)) == 1


@pytest.mark.parametrize("way", ["api", "resolved", "cancelled", "timeout"])
def test_a_message_follows_decisions_made_elsewhere(door: Door, way: str) -> None:
    """They come by the API (also console and CLI), the alert's end, a command, or the deadline."""
    run_id, ts = door.asked("brief" if way == "timeout" else "plain")
    run = door.server.run(run_id)
    if way == "api":
        assert door.server.ask(f"/runs/{run_id}/approve", {"note": "looked at it"}).status == 200
    elif way == "cancelled":
        assert door.server.ask(f"/runs/{run_id}/cancel", {}).status == 200
    elif way == "resolved":
        alert = {"status": "resolved", "labels": run["alert_labels"], "startsAt": run["alerts"][0]["starts_at"]}
        alert["endsAt"] = datetime.now(UTC).isoformat()
        assert door.server.ask("/webhook", {"version": "4", "alerts": [alert]}).status == 200
    words = {
        "api": "Approved by anonymous",
        "resolved": "the alert resolved before anybody approved",
        "cancelled": "Not asked any more",
        "timeout": "nobody approved in time",
    }
    door.shows(ts, words[way])
    decided = len(door.decisions(run_id))
    door.slack.press(ANN, ts, "approve", json.dumps([run_id, "sure", 1]))
    eventually(lambda: any(run_id in each["text"] for each in door.slack.whispers), 60, "the refusal", 0.05)
    assert len(door.decisions(run_id)) == decided


def test_an_answer_counts_for_the_displayed_question(door: Door) -> None:
    """A button of an earlier question of the same run does not answer the later one, which has other steps."""
    run_id, first = door.asked("twice")
    value = door.slack.button(first, "approve")["value"]  # type: ignore[index]
    door.slack.press(ANN, first, "approve")
    second = door.message(run_id, "second")
    door.slack.press(BOB, first, "approve", value)
    door.told(BOB, "now asks a different question")
    assert len(door.decisions(run_id)) == 1
    door.slack.press(BOB, second, "approve")
    door.shows(second, "Approved by bob")


def test_forged_presses_decide_nothing_and_end_nothing(door: Door) -> None:
    """A payload may name another run or step or a later question, be nonsense, or be nested far too deep."""
    run_id, ts = door.asked("plain")
    forged: list[str] = [
        "", "x", "[]", "{}", "null", json.dumps([run_id]), json.dumps([run_id, "sure", "1"]),
        json.dumps([run_id, "sure", True]), json.dumps([run_id, "sure", 2]), json.dumps([run_id, "call", 1]),
        json.dumps(["../pause", "sure", 1]), json.dumps([run_id[-8:], "sure", 1]), json.dumps(["x" * 100_000, "s", 1]),
        "[" * 100_000,
    ]  # fmt: skip
    value = json.dumps([run_id, "sure", 1])
    envelopes = [door.slack.press(ANN, ts, "approve", value) for value in forged]
    payloads: list[Any] = [
        None, [], "x", {}, {"type": "block_actions"}, {"type": "block_actions", "actions": [None]},
        {"type": "block_actions", "user": "U0ANN", "actions": [{"action_id": "approve"}]},
        {"type": "block_actions", "user": {"id": ["U0ANN"]}, "actions": [{"action_id": "approve", "value": forged[5]}]},
        {"type": "block_actions", "user": {"id": "\ud800"}, "container": {"channel_id": CHANNEL, "message_ts": ts},
         "actions": [{"action_id": "reject", "value": value}]},
        {"type": "view_submission", "user": {"id": ANN}, "view": {"callback_id": "reject"}},
        {"type": "view_submission", "user": {"id": ANN},
         "view": {"callback_id": "reject", "private_metadata": json.dumps(["[]", CHANNEL, ts])}},
        {"type": "view_submission", "user": {"id": MALLORY},
         "view": {"callback_id": "reject",
                  "private_metadata": json.dumps([json.dumps([run_id, "sure", 1]), CHANNEL, ts])}},
    ]  # fmt: skip
    envelopes += [door.slack.send(payload) for payload in payloads]
    for raw in ("nonsense", "[]", "3", '{"envelope_id": 3}', "[" * 50_000):
        door.slack.say(raw)
    for envelope_id in envelopes:
        door.acknowledged(envelope_id)
    assert door.decisions(run_id) == []
    assert "handling Slack click failed" not in door.log()
    door.slack.press(ANN, ts, "approve")
    door.shows(ts, "Approved by ann")


HOSTILE = (
    "<!channel> <https://evil.example|Approve> &lt;!here&gt; *b* `c`\n✔ Approved by root\u202e\x1b[2J " + "😀" * 4_000
)


def test_text_of_alerts_stays_text(door: Door) -> None:
    """No part of a message mentions a user, has a link, impersonates anyone or exceeds a bound."""
    run_id, ts = door.asked("said", said=HOSTILE)
    forms = len(door.slack.forms)
    door.slack.press(ANN, ts, "reject")
    eventually(lambda: len(door.slack.forms) > forms, 60, "the form", 0.05)
    door.slack.submit(ANN, door.slack.forms[-1], HOSTILE[:900])
    door.shows(ts, "Rejected by ann")
    shown = [document for _, document in door.slack.edits if document["metadata"]["event_payload"]["run_id"] == run_id]
    for document in (*shown, door.slack.messages[ts], *door.slack.forms[forms:]):
        for markup in _markup(document):
            assert "<" not in markup.replace("<!date^", "").replace("&lt;", ""), markup
        assert not set("\u202e\x1b") & set(json.dumps(document, ensure_ascii=False))
        assert not any(line.startswith("✔") for text in _plain(document) for line in text.splitlines())
        assert _all_plain_keep_emoji_off(document)


def _markup(document: dict[str, Any]) -> list[str]:
    """What Slack reads as its markup."""
    elements = [each for block in document["blocks"] for each in block.get("elements", ())]
    return [document.get("text", ""), *(each["text"] for each in elements if each["type"] == "mrkdwn")]


def _texts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if value.get("type") == "plain_text":
            yield value
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _plain(document: dict[str, Any]) -> list[str]:
    return [each["text"] for each in _texts(document)]


def _all_plain_keep_emoji_off(document: dict[str, Any]) -> bool:
    return all(each["emoji"] is False for each in _texts(document))


def test_the_connection_is_reopened_whenever_it_ends(door: Door) -> None:
    """It ends by Slack's request or breaks; presses count on the new one. No token or ticket is in the log."""
    for rudely in (False, True):
        opened = door.slack.opened
        door.slack.disconnect(rudely=rudely)
        eventually(lambda opened=opened: door.slack.opened > opened and door.slack.connections == 1, 60, "again", 0.05)
        _, ts = door.asked("plain")
        door.slack.press(ANN, ts, "approve")
        door.shows(ts, "Approved by ann")
    log = door.log()
    assert "connected to Slack" in log
    for secret in (BOT, APP, "s3cret", "t1cket", "ticket="):
        assert secret not in log


def test_a_user_removed_from_the_file_decides_nothing(door: Door) -> None:
    """This holds from the next press on, and no user decides while the file cannot be read."""
    run_id, ts = door.asked("plain")
    file = door.server.directory / "slack.json"
    text = file.read_text()
    file.write_text(text.replace(ANN, "U0GONE"))
    door.slack.press(ANN, ts, "approve")
    door.told(ANN, "may not decide")
    file.write_text("people: [")
    door.slack.press(BOB, ts, "approve")
    door.told(BOB, "cannot read who may decide")
    assert door.decisions(run_id) == []
    file.write_text(text)
    door.slack.press(BOB, ts, "approve")
    door.shows(ts, "Approved by bob")


def test_decisions_made_while_slack_is_unavailable_are_shown_afterwards(door: Door) -> None:
    """A kill separates decision and edit; closed questions are not asked, pending ones are, once."""
    decided, ts = door.asked("plain")
    door.slack.away = "down"
    over, waits = door.ask("plain"), door.ask("plain")
    tried = door.slack.tried
    eventually(lambda: door.slack.tried > tried, 60, "a try to post them", 0.05)
    for run_id in (decided, over):
        assert door.server.ask(f"/runs/{run_id}/approve", {}).status == 200
    door.server.kill()
    door.slack.away = None
    door.server.start()
    door.shows(ts, "Approved by anonymous")
    door.message(waits)
    assert door.messages(over) == []
    assert door.messages(decided) == [ts]


def test_a_message_whose_posting_was_not_answered_is_found_and_not_posted_twice(door: Door) -> None:
    """Pending posts are recorded before, so this survives a kill. It may be on a later page."""
    door.slack.away = "lost"
    run_id = door.ask("plain")
    eventually(lambda: door.messages(run_id), 60, "the message", 0.05)
    door.slack.post_by_others(3)
    door.slack.most_per_page = 1
    door.server.kill()
    door.slack.away = None
    door.server.start()
    eventually(lambda: "conversations.history" in door.slack.calls, 60, "the search", 0.05)
    door.slack.press(ANN, door.message(run_id), "approve")
    door.shows(door.message(run_id), "Approved by ann")
    assert len(door.messages(run_id)) == 1


def test_a_channel_that_refuses_delays_no_other_question(door: Door) -> None:
    """The question is posted once the app is in the channel."""
    door.slack.channels.clear()
    refused = door.ask("plain")
    eventually(lambda: ("chat.postMessage", "channel_not_found") in door.slack.refused, 60, "the refusal", 0.05)
    eventually(lambda: _metric(door, "trainmedic_slack_left_out_total") >= 1, 60, "the count", 0.05)
    door.slack.channels.add(CHANNEL)
    door.slack.refused.clear()
    door.message(door.ask("plain"))
    door.server.kill()
    door.server.start()
    door.message(refused)


def _metric(door: Door, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{door.server.port}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.long
def test_one_of_several_servers_communicates_with_slack(
    tmp_path: Path, postgres: PostgresServer, redis_url: str
) -> None:
    """It is the leader; its successor has its messages, and answers their buttons."""
    common = {"TRAINMEDIC_DATABASE_URL": postgres.database(), "TRAINMEDIC_REDIS_URL": redis_url}
    with stand_in.slack() as slack, made_server(tmp_path / "one", slack, **common) as first:
        eventually(lambda: slack.connections == 1, 60, "the connection", 0.05)
        with made_server(tmp_path / "two", slack, **common) as second:
            door = Door(first, slack)
            run_id, ts = door.asked("plain")
            assert (slack.connections, slack.opened) == (1, 1)
            first.kill()
            eventually(lambda: slack.opened == 2 and slack.connections == 1, 60, "the takeover", 0.05)
            slack.press(ANN, ts, "approve")
            after = Door(second, slack)
            after.shows(ts, "Approved by ann")
            assert after.messages(run_id) == [ts]
