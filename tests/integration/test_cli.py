"""The command line against a real server."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine
from tests.support.programs import Program, eventually, start_server

PLAYBOOKS = """
playbook: ask-first
summary: Asks, and then tells.
on: {alert: Trouble}
target: job
steps:
  - id: sure
    approve: Is {{ target.job }} really in trouble?
    timeout: 1h
  - id: tell
    action: http.request
    with: {url: "http://127.0.0.1:1/", method: GET}
"""
GO_BACK = """
playbook: go-back
on: {alert: Jump}
target: job
steps:
  - id: back
    action: job.rollback
    timeout: 10m
"""
BY_HAND = """
playbook: by-hand
on:
  manual:
    by: ["user:ann"]
    inputs:
      job: {type: job, required: true}
      watts: {type: number, default: 250}
target: {job: "{{ inputs.job }}"}
steps:
  - id: sure
    approve: Cap {{ target.job }} at {{ inputs.watts + 1 }} watts?
    timeout: 1h
  - id: tell
    action: http.request
    with: {url: "http://127.0.0.1:1/", method: GET}
"""


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A server in mode enforce that knows an operator, and a viewer whose token is "look"."""
    directory = tmp_path_factory.mktemp("server")
    (directory / "playbooks").mkdir()
    (directory / "playbooks" / "ask.yaml").write_text(PLAYBOOKS)
    (directory / "playbooks" / "back.yaml").write_text(GO_BACK)
    (directory / "playbooks" / "hand.yaml").write_text(BY_HAND)
    entries = [
        {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), "roles": roles}
        for name, token, roles in (("ann", "act", ["operator", "webhook"]), ("vic", "look", ["viewer"]))
    ]
    (directory / "tokens.yaml").write_text(json.dumps(entries))
    program, url = start_server(
        *(directory, "--mode", "enforce", "--tokens", str(directory / "tokens.yaml")),
        playbooks=directory / "playbooks",
    )
    with program:
        yield CommandLine(url, "act")


def test_a_run_waits_and_is_approved_from_the_command_line(command_line: CommandLine) -> None:
    """The operator finds it in the history and approves it; the note and the actor are stored."""
    run_id = command_line.alert("llm-approved")
    listed = command_line.run("history", "--status", "awaiting_approval", "--job", "llm-approved")
    assert run_id[-8:] in listed.out
    assert "asks" in listed.out
    approved = command_line.run("runs", "approve", run_id[-8:], "--note", "go ahead")
    assert approved.code == 0, approved.err
    assert approved.out.startswith("ask-first job:llm-approved: ")
    story = command_line.run("history", "show", run_id).out
    assert "asks     Is llm-approved really in trouble?" in story
    assert "by ann" in story
    assert '"go ahead"' in story


def test_a_cancellation_during_a_step_is_reported_to_end_with_it(command_line: CommandLine) -> None:
    """The operator neither waits for a next step nor believes that the command was lost."""
    run_id = command_line.alert("llm-cancelled", "Jump")
    command_line.wait_for_line(run_id, "at back")
    ordered = command_line.run("runs", "cancel", run_id)
    assert ordered.out.startswith("go-back job:llm-cancelled: running, and ends after its present step")
    assert "then cancelled (ann has ended it)" in command_line.run("history", "show", run_id).out
    assert "then cancelled (ann has ended it)" in command_line.run("now").out


def test_a_playbook_is_started_with_inputs(command_line: CommandLine) -> None:
    """They name the target and reach the question; wrong ones are rejected by name, also ``true`` as a number."""
    started = command_line.run("runs", "start", "by-hand", "--input", "job=llm-9", "--input", "watts=300")
    assert started.code == 0, started.err
    command_line.wait_for_line(started.out.rpartition("run ")[2].strip(), "Cap llm-9 at 301 watts?")
    wrong = command_line.run("runs", "start", "by-hand", "--input", "watts=many", "--input", "nam=x")
    assert wrong.code == 1
    assert all(part in wrong.err for part in ("inputs.job", "is required", "inputs.nam", "inputs.watts", "'many'"))
    body = {"playbook": "by-hand", "inputs": {"job": "llm-9", "watts": True}}
    request = urllib.request.Request(
        f"{command_line.url}/runs",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer act"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert (refused.value.code, "inputs.watts" in refused.value.read().decode()) == (422, True)


def test_a_key_belongs_to_one_request(command_line: CommandLine) -> None:
    """Repeated with other labels it starts nothing, and is not answered with the earlier run."""
    request = ["runs", "start", "by-hand", "--input", "job=llm-10", "--key", "once", "--label", "team=a"]
    started = command_line.run(*request)
    assert started.code == 0, started.err
    run_id = started.out.rpartition("run ")[2].strip()
    assert run_id in command_line.run(*request).out
    refused = command_line.run(*request[:-1], "team=b")
    assert refused.code == 1
    assert f"the key 'once' was used for another request, which has started run {run_id}" in refused.err


def test_a_command_that_does_not_apply_is_rejected_with_1(command_line: CommandLine) -> None:
    """The server gives the reason."""
    run_id = command_line.alert("llm-rejected")
    assert command_line.run("runs", "reject", run_id).code == 0
    refused = command_line.run("runs", "approve", run_id)
    assert refused.code == 1
    assert refused.err.startswith("Error: ")
    assert "rejected" in refused.err


def test_a_missing_object_ends_with_5(command_line: CommandLine) -> None:
    """A missing run is distinguished from an unavailable server."""
    missing = command_line.run("history", "show", "019c1415-6c05-7c11-9a0d-6f1d2e3c4b5a")
    assert missing.code == 5
    assert "019c1415-6c05-7c11-9a0d-6f1d2e3c4b5a" in missing.err


def test_an_unknown_job_cannot_be_declared_ended(command_line: CommandLine) -> None:
    """This holds for any name; neither a viewer nor a user without a note may declare it."""
    for job in ("llm-9", "team/llm 9?#"):
        refused = command_line.run("jobs", "end", job, "--note", "by scancel")
        assert refused.code == 5, refused
        assert "No job of that name is known" in refused.err
    assert command_line.run("jobs", "end", "llm-9", "--note", "x", TRAINMEDIC_TOKEN="look").code == 4
    assert command_line.run("jobs", "end", "llm-9").code == 2


def test_an_unauthorized_token_ends_with_4(command_line: CommandLine) -> None:
    """Unknown tokens and tokens without the role each give their reason."""
    assert command_line.run("history", TRAINMEDIC_TOKEN="guess").code == 4
    viewer = command_line.run("pause", TRAINMEDIC_TOKEN="look")
    assert viewer.code == 4
    assert "role" in viewer.err


def test_the_token_can_be_in_a_file(command_line: CommandLine, tmp_path: Path) -> None:
    """It then appears in no command line or environment."""
    file = tmp_path / "token"
    file.write_text("look\n")
    assert command_line.run("history", TRAINMEDIC_TOKEN="", TRAINMEDIC_TOKEN_FILE=str(file)).code == 0


def test_pause_and_resume_are_shown_in_the_status(command_line: CommandLine) -> None:
    """The status names the actor if the server states it."""
    assert command_line.run("pause").out.startswith("paused by ann since ")
    paused = command_line.run("status")
    assert paused.code == 0
    assert "mode enforce; PAUSED by ann " in paused.out
    assert command_line.run("resume").out == "not paused, breaker closed\n"


def test_the_status_is_available_as_json(command_line: CommandLine) -> None:
    """One JSON document contains everything that the text shows."""
    status = json.loads(command_line.run("status", "--output", "json").out)
    assert status["ready"]["ready"] is True
    assert [item["name"] for item in status["playbooks"]["items"]] == ["ask-first", "by-hand", "go-back"]


def test_the_history_is_available_as_json_and_csv(command_line: CommandLine) -> None:
    """Both hold the same runs, and a filter without matches gives empty ones."""
    run_id = command_line.alert("llm-listed")
    (item,) = json.loads(command_line.run("history", "--job", "llm-listed", "--output", "json").out)
    assert item["run_id"] == run_id
    (row,) = csv.DictReader(io.StringIO(command_line.run("history", "--job", "llm-listed", "--output", "csv").out))
    assert row["run_id"] == run_id
    assert json.loads(row["alert_labels"])["job_name"] == "llm-listed"
    assert json.loads(command_line.run("history", "--job", "none", "--output", "json").out) == []
    nothing = command_line.run("history", "--job", "none", "--playbook", "ask-frist").err
    assert nothing.startswith("No run matches.\njob 'none' is unknown")
    assert "playbook 'ask-frist' is not loaded; did you mean 'ask-first'?" in nothing


def test_repeated_options_add_up_or_are_rejected(command_line: CommandLine) -> None:
    """None is dropped silently."""
    first, second = command_line.alert("llm-first"), command_line.alert("llm-second")
    both = command_line.run("history", "--job", "llm-first", "--job", "llm-second", "--output", "json")
    assert [item["run_id"] for item in json.loads(both.out)] == [second, first]
    open_ones = command_line.run("history", "--open", "--job", "llm-first")
    assert first[-8:] in open_ones.out
    refused = command_line.run("history", "--since", "1h", "--since", "2h")
    assert (refused.code, "given more than once" in refused.err) == (2, True)


def test_now_and_the_lists_show_what_is_pending_and_connected(command_line: CommandLine) -> None:
    """`now` lists pending approvals; playbooks, agents and jobs have their own commands."""
    run_id = command_line.alert("llm-now")
    told = command_line.run("now").out
    assert told.startswith("mode enforce; not paused; breaker closed; ")
    assert f"{run_id[-8:]}  job:llm-now  ask-first  Is llm-now really in trouble?" in told
    standing = json.loads(command_line.run("now", "--output", "json").out)
    assert run_id in {approval["run_id"] for approval in standing["approvals"]}
    assert "ask-first" in command_line.run("playbook", "list").out
    assert command_line.run("agents").err == "No agent is connected.\n"
    assert command_line.run("jobs").err == "No job is connected.\n"
    assert "next tell: http.request" in command_line.run("history", "show", run_id[-8:]).out


def test_a_limit_is_applied(command_line: CommandLine) -> None:
    """The option --all lifts it."""
    for number in range(3):
        command_line.alert(f"llm-many-{number}")
    limited = json.loads(command_line.run("history", "--limit", "2", "--output", "json").out)
    assert len(limited) == 2
    assert len(json.loads(command_line.run("history", "--all", "--output", "json").out)) > 2


@pytest.mark.parametrize("since", ["1h", "2020-01-01", "2020-01-01T00:00:00Z"])
def test_times_are_absolute_or_relative(command_line: CommandLine, since: str) -> None:
    """A time without a zone is in this machine's zone."""
    assert command_line.run("history", "--since", since).code == 0


def test_a_wrong_time_ends_with_2(command_line: CommandLine) -> None:
    """The server is not asked."""
    wrong = command_line.run("history", "--since", "yesterday")
    assert wrong.code == 2
    assert "neither a time" in wrong.err


def test_a_server_can_be_named_before_the_subcommand(command_line: CommandLine) -> None:
    """``history --server URL show RUN`` asks that server."""
    run_id = command_line.alert("llm-named")
    shown = command_line.run(
        "history", "--server", command_line.url, "show", run_id, TRAINMEDIC_URL="http://127.0.0.1:1"
    )
    assert shown.code == 0, shown.err


def test_text_in_an_alert_cannot_control_the_terminal(command_line: CommandLine) -> None:
    """Escape sequences and direction marks in annotations are shown, not obeyed."""
    run_id = command_line.alert("llm-evil", summary="\x1b[2J\u202egnp.exe")
    story = command_line.run("history", "show", run_id).out
    assert "\\x1b[2J\\u202egnp.exe" in story
    assert "\x1b" not in story


def test_follow_shows_past_and_new_events(command_line: CommandLine, tmp_path: Path) -> None:
    """Existing entries come first, then each event of the selected runs."""
    log = tmp_path / "followed"
    arguments = [sys.executable, "-u", "-m", "trainmedic_server", "history", "--follow", "--playbook", "ask-first"]
    with Program(arguments, log, command_line.environment()) as following:
        eventually(lambda: "RUN" in log.read_text(), 60, f"the page\n{following.tail()}")
        shown: list[str] = []

        def is_followed() -> bool:
            """Post an alert each time: the stream is opened after the page was printed, and nothing tells when."""
            shown.append(command_line.alert(f"llm-followed-{len(shown)}")[-8:])
            return any(run_id in log.read_text() for run_id in shown)

        eventually(is_followed, 60, "a run that began later", every=1.0)
        assert "job:llm-followed-" in log.read_text()


def test_why_explains_what_happened_to_an_alert_and_what_would_happen_now(command_line: CommandLine) -> None:
    """It works with a viewer's token and names the open run."""
    run_id = command_line.alert("llm-why")
    told = command_line.run("why", "--alert", "Trouble", "--label", "job_name=llm-why", TRAINMEDIC_TOKEN="look")
    assert told.code == 0, told.err
    assert f"ask-first: started  (run {run_id})" in told.out
    assert "server: mode enforce" in told.out
    assert "decision: joined" in told.out
    listed = json.loads(
        command_line.run("why", "--alert", "Trouble", "--label", "job_name=llm-why", "--output", "json").out
    )
    assert [alert["reacted"] for alert in listed["heard"]] == [True]


def test_why_reports_what_is_missing_for_an_alert_never_received(command_line: CommandLine) -> None:
    """It says that the alert did not arrive and that no playbook would handle it."""
    told = command_line.run("why", "--alert", "Troubles", "--label", "job_name=x")
    assert "No alert Troubles with these labels was received" in told.out
    assert "no playbook reacts to 'Troubles'; did you mean 'Trouble'?" in told.out
    assert command_line.run("why", "--alert", "Trouble", "--label", "job_name").code == 2


def test_an_alert_suppressed_by_alertmanager_is_explained_as_such(command_line: CommandLine, tmp_path: Path) -> None:
    """The output describes what would follow, and that the alert will not come."""
    alert = tmp_path / "alerts.json"
    labels = {"alertname": "Trouble", "job_name": "llm-silenced"}
    status = {"state": "suppressed", "silencedBy": ["5f3a"], "inhibitedBy": []}
    alert.write_text(json.dumps([{"labels": labels, "status": status, "startsAt": datetime.now(UTC).isoformat()}]))
    explained = command_line.run("playbook", "explain", str(alert), "--server", command_line.url).out
    assert "Alertmanager does not send it: silenced by 5f3a. If it did:" in explained
    assert "decision: started" in explained


def test_a_run_can_be_explained_by_the_server(command_line: CommandLine, tmp_path: Path) -> None:
    """The history of a run contains an alert that explain accepts."""
    run_id = command_line.alert("llm-explained")
    shown = tmp_path / "run.json"
    shown.write_text(command_line.run("history", "show", run_id, "--output", "json").out)
    explained = command_line.run("playbook", "explain", str(shown), "--server", command_line.url)
    assert f"decision: duplicate (run {run_id} was decided for this same alert)" in explained.out, explained.err
    refused = command_line.run("playbook", "explain", str(shown), "--server", command_line.url, "--playbooks", ".")
    assert refused.code == 2
