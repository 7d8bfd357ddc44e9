"""What is asked at 3 a.m.: each question has one command, one call and one page, and the three say the same."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from typing import Any

import pytest
from click.testing import CliRunner

from tests.conftest import RedisServer
from tests.support import lab_past
from tests.support.lab import AGENTS, JOBS, Lab, night
from tests.support.programs import eventually
from trainmedic_core.command import main

_SHOWN = re.compile(r'href="([^"]+)">show (\d+)</a>')


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The lab after the alerts, when everything has come to rest; one approval was given, one part is paused."""
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    redis.start()
    alerts = night()
    assert len(alerts) == 204
    try:
        with Lab(tmp_path_factory.mktemp("lab"), redis.url) as running:
            running.fire(alerts)
            eventually(lambda: _has_come_to_rest(running, changed=8, asking=5), 60, "the first repairs", 0.1)
            [first, *_] = running.get("/history?status=awaiting_approval")["items"]
            running.ask(f"/runs/{first['run_id']}/approve", body={"note": "go on"})
            running.ask("/pause", body={"node": "node-9", "for": "2h", "note": "new fans"})
            eventually(lambda: _has_come_to_rest(running, changed=9, asking=4), 60, "the approved one", 0.1)
            yield running
    finally:
        redis.kill()


def _has_come_to_rest(lab: Lab, changed: int, asking: int) -> bool:
    """Whether so many changes are made, and so many runs ask. A change that a job has not answered yet is listed, but
    nobody knows what was there before."""
    standing = lab.get("/now")
    certain = [each for each in standing["changed"] if each["is_certain"]]
    failed = lab.get("/history?status=failed")["items"]
    is_measured = lab.get(f"/history/{_cooled(lab)}")["effect"]["verdict"] != "pending"
    return is_measured and (len(certain), len(standing["approvals"]), len(failed)) == (changed, asking, 3)


def command(lab: Lab, *words: str) -> str:
    """What the command prints."""
    done = CliRunner().invoke(main, words, env={"TRAINMEDIC_URL": lab.url, "COLUMNS": "400"})
    assert done.exit_code == 0, done.output
    return done.output


def short(run_id: str) -> str:
    return run_id[-8:]


@dataclass(frozen=True)
class Question:
    """A question, and where it is answered; ``facts`` are what of the call's answer command and page must say too."""

    words: str
    command: Callable[[Lab], tuple[str, ...]]
    call: Callable[[Lab], str]
    page: Callable[[Lab], str]
    facts: Callable[[Any], list[str]]


def _open_run(lab: Lab) -> str:
    run_id: str = lab.get("/history?playbook=ask-first&status=awaiting_approval")["items"][0]["run_id"]
    return run_id


def _job(target: str) -> str:
    """Return the job's name: the page writes ``job llm-1`` for ``job:llm-1``."""
    kind, _, name = target.partition(":")
    assert kind == "job"
    return name


def _changes(standing: Any) -> list[str]:
    changed = standing["changed"]
    assert len(changed) == 9
    assert {(each["before"], each["after"]) for each in changed} == {("0.001", "0.0005")}
    assert {each["given_back"] for each in changed} == {"when LabLR resolves", "when LabAsk resolves"}
    return [text for each in changed for text in (_job(each["target"]), each["before"], each["after"])]


def _next(run: Any) -> list[str]:
    upcoming = run["next"]
    assert (upcoming["step"], upcoming["action"], upcoming["params"]) == ("slow_down", "job.scale_lr", {"factor": 0.5})
    return [upcoming["step"], upcoming["action"], upcoming["waits_for"]]


def _approvals(listed: Any) -> list[str]:
    assert len(listed["items"]) == 4
    return [text for each in listed["items"] for text in (_job(each["target"]), each["question"])]


def _unheard(listed: Any) -> list[str]:
    assert listed["items"]
    assert not any(item["reactions"] for item in listed["items"])
    return ["NobodyKnows"]


def _lost(standing: Any) -> list[str]:
    names = [each["name"] for each in standing["lost"]]
    assert sorted(names) == ["llm-lost", "node-lost"]
    return names


def _paused(standing: Any) -> list[str]:
    [pause] = standing["paused"]
    assert (pause["by"], pause["note"]) == ("anonymous", "new fans")
    assert pause["until"] is not None
    return ["enforce", "anonymous", "new fans"]


def _decided(listed: Any) -> list[str]:
    [item] = listed["items"]
    assert item["approved_by"] == ["anonymous"]
    assert item["decided_at"] is not None
    return [item["target"], item["playbook"]]


def _of_node(listed: Any) -> list[str]:
    items = listed["items"]
    assert {item["node"] for item in items} == {"node-1"}
    return sorted({item["alert_name"] for item in items})


def _playbooks(listed: Any) -> list[str]:
    by_name = {item["name"]: item for item in listed["items"]}
    assert by_name["broken"]["runs"] == {"failed": 3}
    return sorted(by_name)


def _helped(run: Any) -> list[str]:
    effect = run["effect"]
    assert (effect["verdict"], effect["before"], effect["at"], effect["after"]) == ("helped", 70, 91, 68)
    return ["helped", "70", "91", "68"]


def _kept(report: Any) -> list[str]:
    """By the one GPU that was cooled within six minutes, where a person would have come after thirty."""
    kept = report["gpu_hours_kept"]
    assert (kept["gpu_hours"], kept["runs"]) == (0.4, 1)
    return ["0.4", kept["formula"], *kept["assumptions"]]


def _coming_back(report: Any) -> list[str]:
    nodes = [str(node["node"]) for node in report["nodes"] if node["came_back"]]
    assert nodes == [lab_past.HOT_NODE]
    return nodes


def _cooled(lab: Lab) -> str:
    """The run whose effect has been measured."""
    run_id: str = lab.get("/history?alertname=LabHot")["items"][0]["run_id"]
    return run_id


QUESTIONS = (
    Question(
        "Did it help?",
        lambda lab: ("history", "show", short(_cooled(lab))),
        lambda lab: f"/history/{_cooled(lab)}",
        lambda lab: f"/runs/{_cooled(lab)}",
        _helped,
    ),
    Question(
        "How many GPU-hours were saved?",
        lambda lab: ("report", "--since", "7d"),
        lambda lab: "/report?since=7d",
        lambda lab: "/report?since=7d&whole=1",
        _kept,
    ),
    Question(
        "Which node comes back again and again?",
        lambda lab: ("report", "--since", "7d"),
        lambda lab: "/report?since=7d",
        lambda lab: "/report?since=7d&whole=1",
        _coming_back,
    ),
    Question(
        "What changed in the playbook?",
        lambda lab: ("playbook", "versions", "lower-rate"),
        lambda lab: "/playbooks/lower-rate/versions",
        lambda lab: "/playbooks/lower-rate",
        lambda listed: [item["version"][:12] for item in listed["items"] if item["loaded"] and item["runs"] == 8],
    ),
    Question(
        "What was heard that nobody took?",
        lambda lab: ("alerts", "--nobody", "--all"),
        lambda lab: "/alerts?reacted=false&limit=1000",
        lambda lab: "/alerts?reacted=false",
        lambda listed: sorted({item["alert_name"] for item in listed["items"]}),
    ),
    Question(
        "Why did nothing happen for this alert?",
        lambda lab: ("why", "--alert", "NobodyKnows"),
        lambda lab: "/alerts?alertname=NobodyKnows",
        lambda lab: "/alerts?alertname=NobodyKnows",
        _unheard,
    ),
    Question(
        "What is changed right now, and when is it given back?",
        lambda lab: ("now",),
        lambda lab: "/now",
        lambda lab: "/",
        _changes,
    ),
    Question(
        "What will happen next?",
        lambda lab: ("history", "show", short(_open_run(lab))),
        lambda lab: f"/history/{short(_open_run(lab))}",
        lambda lab: f"/runs/{_open_run(lab)}",
        _next,
    ),
    Question(
        "Is it allowed to act? Who paused it, and why?",
        lambda lab: ("status",),
        lambda lab: "/now",
        lambda lab: "/",
        _paused,
    ),
    Question(
        "What waits for me, until when, what would it do?",
        lambda lab: ("approvals",),
        lambda lab: "/approvals",
        lambda lab: "/approvals",
        _approvals,
    ),
    Question(
        "Who approved?",
        lambda lab: ("history", "--by", "anonymous"),
        lambda lab: "/history?by=anonymous",
        lambda lab: "/runs?by=anonymous",
        _decided,
    ),
    Question(
        "What happened to this node tonight?",
        lambda lab: ("history", "--node", "node-1", "--since", "12h"),
        lambda lab: "/history?node=node-1&since=12h",
        lambda lab: "/nodes/node-1",
        _of_node,
    ),
    Question(
        "Which playbooks misfire?",
        lambda lab: ("playbook", "list"),
        lambda lab: "/playbooks",
        lambda lab: "/playbooks",
        _playbooks,
    ),
    Question(
        "Which agents or jobs are missing?",
        lambda lab: ("now",),
        lambda lab: "/now",
        lambda lab: "/",
        _lost,
    ),
    Question(
        "Is only a part paused, for how long?",
        lambda lab: ("pauses",),
        lambda lab: "/now",
        lambda lab: "/settings",
        lambda standing: [pause["note"] for pause in standing["paused"]],
    ),
)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.words)
def test_the_command_the_api_and_the_page_give_the_same_answer(lab: Lab, question: Question) -> None:
    """The API's data appear in the output of the command and on the page."""
    facts = question.facts(lab.get(question.call(lab)))
    assert facts
    printed = command(lab, *question.command(lab))
    page = unescape(lab.ask(question.page(lab), accept="text/html"))
    assert [fact for fact in facts if fact not in printed] == []
    assert [fact for fact in facts if fact not in page] == []


def test_connected_jobs_and_agents_are_counted_and_listed(lab: Lab) -> None:
    """`status` counts them; `jobs` and `agents` list them."""
    status = command(lab, "status")
    assert f"{JOBS} connected: 'trainmedic jobs'" in status
    assert f"{AGENTS} connected: 'trainmedic agents'" in status
    assert len(status) < 2000
    assert all(f"llm-{number} " in command(lab, "jobs") for number in range(JOBS))
    assert all(f"node-{number} " in command(lab, "agents") for number in range(AGENTS))


def test_a_night_of_204_alerts_fits_one_screen(lab: Lab) -> None:
    """The first page shows what is open, though most decisions were not to act; the table fits 120 columns."""
    done = CliRunner().invoke(main, ["history"], env={"TRAINMEDIC_URL": lab.url, "COLUMNS": "120"})
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 120
    assert len(lines) <= 32
    open_runs = lab.get("/history?open=true&limit=1000")["items"]
    assert len(open_runs) == 8 + 8 + 5 + 4
    assert all(short(run["run_id"]) in done.output for run in open_runs)
    page = lab.ask("/runs", accept="text/html")
    assert all(f'id="run-{run["run_id"]}"' in page for run in open_runs)
    [apart] = [href for href, count in _SHOWN.findall(page) if count == "92"]
    assert lab.ask(unescape(apart), accept="text/html").count('<tr id="run-') == 60
    heard = lab.ask("/alerts", accept="text/html")
    assert sorted(count for _, count in _SHOWN.findall(heard)) == ["40", "52", "92"]
    assert "×92" in done.output
    every = json.loads(command(lab, "history", "--all", "--output", "json"))
    assert len(every) == len(lab.get("/history?limit=1000")["items"]) > 100


def test_failed_runs_are_retried_by_command_api_and_page(lab: Lab) -> None:
    """The page links to the new run, and each new run names the run that it repeats."""
    failed = lab.get("/history?status=failed&playbook=broken")["items"]
    by_command, by_call, by_page = (item["run_id"] for item in failed)
    command(lab, "runs", "retry", short(by_command), "--note", "the service is up")
    assert json.loads(lab.ask(f"/runs/{by_call}/retry", body={"note": "again"}))["decision"] == "started"
    form = urllib.request.Request(f"{lab.url}/console/runs/{by_page}/retry", b"note=again", {"Origin": lab.url})
    with urllib.request.urlopen(form, timeout=60) as reply:
        assert reply.url.startswith(f"{lab.url}/runs/")
        assert not reply.url.endswith(by_page)
    repeats = {item["repeats"] for item in lab.get("/history?playbook=broken")["items"]}
    assert {by_command, by_call, by_page} <= repeats
