"""``trainmedic now``: nothing is cut, and acts without an undo are no changes that stand."""

from __future__ import annotations

from typing import Any

from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.cli import now, status
from trainmedic_server.console.assets import Assets
from trainmedic_server.console.rendering import Renderer
from trainmedic_server.console.standing import StandingView
from trainmedic_server.presentation.waiting import waiting_for_person

AT = "2026-01-31T12:00:00Z"
RUN = {"run_id": "019b76da-a800-7000-9cd2-736bad6fbc45", "playbook": "p", "target": "job:llm-1"}
QUESTION = f"May the job llm-1 go back {'to the checkpoint of step 187 ' * 8}now?"


def change(action: str, *, is_reversible: bool) -> dict[str, Any]:
    times = {"since": AT, "latest": None, "lease_seconds": None, "undo_error": None}
    values = {"before": None, "after": None, "params": {"factor": 0.5}, "is_certain": True}
    return {**RUN, **times, **values, "action": action, "is_reversible": is_reversible, "given_back": "when A resolves"}


STANDING = {
    "at": AT,
    "mode": "enforce",
    "paused": [],
    "breaker": {"open": False, "reason": None},
    "approvals": [
        {**RUN, "question": QUESTION, "until": None, "gpus": None, "nodes": [], "asked_at": AT, "steps": []},
    ],
    "changed": [change("job.scale_lr", is_reversible=True), change("job.rollback", is_reversible=False)],
    "changed_since": AT,
    "running": [],
    "lost": [],
    "last_hour": {"decisions": {}},
    "counts": {"open": {}, "owing": 0, "left_out": 0},
}


def test_a_long_question_is_wrapped_to_the_terminal() -> None:
    """Each part is within the width, and all words are there."""
    parts = [part for line in now.lines(STANDING) for part in now._wrapped(line, 60)]
    assert max(map(len, parts)) <= 60
    whole = " ".join(" ".join(parts).split())
    assert QUESTION in whole
    assert "…" not in whole
    begun = next(place for place, part in enumerate(parts) if "May the job" in part)
    assert parts[begun + 1].startswith("      ")


def test_a_change_that_has_ended_is_not_called_active() -> None:
    lost = {
        **change("gpu.power_limit", is_reversible=True),
        "lease_seconds": 300.0,
        "lost_because": "its lease had run out",
    }
    text = " ".join("\n".join(now.lines({**STANDING, "changed": [lost]})).split())
    assert "; ENDED EARLY: its lease had run out; back when A resolves" in text
    assert "after the last renewal" not in text


def test_actions_without_an_undo_are_listed_separately() -> None:
    """A change that cannot be reverted is not shown as active until it is reverted."""
    text = "\n".join(now.lines(STANDING))
    changes, acts = text.split("Active changes (1)")[1].split("Done, without an undo (1)")
    assert "job.scale_lr" in changes
    assert "back when A resolves" in changes
    assert "job.rollback" not in changes
    assert "job.rollback factor=0.5" in acts
    assert "back" not in acts.split("\n")[1].replace("rollback", "")


def test_a_cap_of_a_lost_agent_is_said_to_stay_perhaps() -> None:
    """Nobody ends it while the agent is dead; other changes on the node do not depend on the agent."""
    node = {"target": "gpu:node-7/3", "lease_seconds": 300.0}
    standing: dict[str, Any] = {
        **STANDING,
        "changed": [
            {**change("gpu.power_limit", is_reversible=True), **node},
            {**change("gpu.power_limit", is_reversible=True), **node, "target": "gpu:node-8/3"},
            {**change("k8s.cordon", is_reversible=True), "target": "node:node-7"},
        ],
        "lost": [{"kind": "agent", "name": "node-7", "since": AT, "reason": "it is silent"}],
    }
    warned = [line for line in now.lines(standing) if "LOST" in line]
    assert [line.partition("; back ")[2] for line in warned] == [
        "when A resolves, or 5 min after the last renewal; "
        "agent node-7 is LOST: if it is dead, the cap stays until it restarts"
    ]
    standing["last_hour"] = {"decisions": {}, "statuses": {}}
    page = Renderer(SystemClock(), Assets()).text("now_parts.html", standing=StandingView(1, standing, ready=True))
    assert page.count("agent node-7 is LOST") == 1


FAILED = {**RUN, "alert_name": "TrainingLossSpike", "ended_at": AT, "message": "no checkpoint"}


def test_a_gone_job_is_not_reported_as_connected_until_then() -> None:
    """The server may have noticed later, as after its own restart."""
    lost = [{"kind": kind, "name": "n1", "since": AT, "reason": "it is silent"} for kind in ("agent", "job")]
    agent, job = [line for line in now.lines({**STANDING, "lost": lost}) if "it is silent" in line]
    assert "last connected" in agent
    assert "last connected" not in job
    assert "found gone" in job


def test_failed_runs_need_attention_in_every_surface() -> None:
    """A question and a failed run count as two in the list, the status and the console."""
    standing = {**STANDING, "failed": [FAILED], "last_hour": {"decisions": {}, "statuses": {}}}
    text = "\n".join(now.lines(standing))
    assert "Waits for you (2)" in text
    assert "FAILED, now, and TrainingLossSpike still fires: no checkpoint" in text
    assert status.counts_of_waiting(standing) == {"approvals": 1, "failed": 1}
    view = StandingView(1, standing, ready=True)
    page = Renderer(SystemClock(), Assets()).text("now_parts.html", standing=view)
    assert 'Waits for you <span class="n">2</span>' in page
    assert str(waiting_for_person(standing)) == "1 approval, 1 failed run"


def test_an_earlier_server_has_no_failed_runs() -> None:
    """Its answer counts as none, and so does no answer."""
    assert len(waiting_for_person(STANDING)) == 1
    assert str(waiting_for_person(None)) == "nothing"


def test_a_question_states_in_words_what_would_be_done() -> None:
    """The sentences are those of the page and of ``trainmedic approvals``."""
    step = {"action": "job.scale_lr", "params": {"factor": 0.5}}
    question = {**STANDING["approvals"][0], "steps": [step, {"action": "job.stop", "params": {}}]}
    text = "\n".join(now.lines({**STANDING, "approvals": [question]}))
    assert "would 1. Lower the learning rate of job llm-1 by half" in text
    assert "2. Stop job llm-1 after a checkpoint" in text
