"""The story of one run, as the command line tells it."""

from __future__ import annotations

from typing import Any

from trainmedic_server.cli import story

ASKED: dict[str, Any] = {
    "id": "sure",
    "phase": "steps",
    "kind": "approve",
    "status": "waiting",
    "message": "Halve the rate of llm-1?",
    "params": {
        "steps": [{"id": "slow", "action": "job.scale_lr", "params": {"factor": 0.5}, "targets": ["job:llm-1"]}],
        "by": ["ann", "hardware"],
        "count": 2,
        "on_timeout": "reject",
        "asked": 3,
        "void": [],
    },
}


def test_whether_a_run_helped_is_shown() -> None:
    """The measured values are shown, or else why nothing was measured."""
    measured = {"verdict": "helped", "reason": "from 91 to 70", "before": 80.0, "at": 91.5, "after": 70.0}
    told = [line.strip() for line in story.lines({"run_id": "r", "effect": measured})]
    assert "effect    helped: before 80, at the act 91.5, 10 min after 70, from 91 to 70" in told
    not_measured = {"verdict": "not_measured", "reason": "no Prometheus", "before": None, "at": None, "after": None}
    told = [line.strip() for line in story.lines({"run_id": "r", "effect": not_measured})]
    assert "effect    not measured: no Prometheus" in told


def test_a_pending_effect_states_when_it_will_be_measured() -> None:
    """It does not state only that it is pending."""
    pending = {"verdict": "pending", "due_at": "2026-01-31T12:10:00Z", "before": None, "at": None, "after": None}
    (line,) = (line for line in story.lines({"run_id": "r", "effect": pending}) if "effect" in line)
    assert line.strip().startswith("effect    pending: measured at 2026-01-31 12:10Z (")


def test_an_approval_states_what_it_would_allow_and_who_may_give_it() -> None:
    """It does not repeat the terms as they are stored."""
    told = [line.strip() for line in story.lines({"run_id": "r", "steps": [ASKED]})]
    assert "would    1. Lower the learning rate of job llm-1 by half" in told
    assert "of       ann or hardware, 2 different people; asked 3 times" in told
    assert not any("on_timeout" in line or "{" in line for line in told)


def test_the_run_that_is_waited_for_is_named_as_in_the_table() -> None:
    """It is named by the end of its id, which every command accepts."""
    run = "01a2067f-0e28-7007-b926-e046f06b8a6f"
    upcoming = dict.fromkeys(
        ("now", "not_before", "deadline", "step", "outcome", "params", "action", "question", "note")
    )
    upcoming |= {"waits_for": f"job:llm-7, held by run {run}", "holder": run}
    assert "waits for job:llm-7, held by run f06b8a6f" in story.next_line(upcoming, "2026-01-31T03:00:00Z")


def test_a_waiting_run_states_what_it_waits_for_how_long_and_since_when() -> None:
    """It names the playbook that has the target, what that does, and the latest end."""
    run = "01a2067f-0e28-7007-b926-e046f06b8a6f"
    upcoming = dict.fromkeys(
        ("now", "not_before", "deadline", "step", "outcome", "params", "action", "question", "note")
    )
    held_by = {"run_id": run, "playbook": "cap", "doing": "waits for Hot to resolve", "until": "2026-01-31T03:12:00Z"}
    held_by["at_deadline"] = "the run continues"
    upcoming |= {"waits_for": f"node:n1, held by run {run}", "holder": run, "held_by": held_by}
    upcoming["waiting_since"] = "2026-01-31T02:57:00Z"
    line = story.next_line(upcoming, "2026-01-31T03:00:00Z")
    assert line.startswith(
        "waits for node:n1, held by run f06b8a6f; that run of cap waits for Hot to resolve, "
        "at the latest 03:12Z (in 12 min): the run continues; waiting since 02:57Z (3 min ago)"
    )


def test_a_claimed_job_is_shown_as_a_claim() -> None:
    """It stands next to the node that the finding is about, and never as its job."""
    finding = {"id": "f", "target": "node:gpu-9", "claimed_job": "llm-2", "node": "gpu-9", "job": None}
    told = [line.strip() for line in story.finding_lines(finding)]
    assert "claim     a log file that names job llm-2" in told
    assert not any(line.startswith("job ") for line in told)
    assert story.finding_target(finding) == "node:gpu-9 (a log file that names job llm-2)"
    assert story.finding_target({"target": "job:llm-1", "claimed_job": None}) == "job:llm-1"
