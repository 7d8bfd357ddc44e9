"""Playbook tests: what they can say, and what they tell when it is not so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest

from tests.unit.simulation.actions import PLAYBOOK, SimulatedActions
from trainmedic_logs.simulation import test_results
from trainmedic_logs.simulation.test_results import FileResult
from trainmedic_server.simulation import suite

HOT = "{labels: {alertname: Hot, node: n1, runbook: r}}"
Run = Callable[..., FileResult]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the tests of a text, beside a playbook."""

    def _run(tests: str, playbook: str = PLAYBOOK) -> FileResult:
        (tmp_path / "cap.yaml").write_text(playbook)
        (tmp_path / "cap_test.yaml").write_text(tests)
        return suite.run_file(tmp_path / "cap_test.yaml", SimulatedActions())

    return _run


def one(body: str) -> str:
    return "tests:\n  - name: t\n" + indent(body, "    ")


def failures(result: FileResult) -> list[str]:
    """Problems and failures as ``line: message``."""
    problems = [*result.problems, *(failure for test in result.results for failure in test.failures)]
    return [f"{problem.line}: {problem.message.removeprefix('t: ')}" for problem in problems]


def test_a_run_is_followed_through_time(run: Run) -> None:
    """Retries, waits, undo and guards happen as they would, at their virtual times."""
    result = run(
        one(f"""\
alerts:
  - {{alert: &hot {HOT}}}
  - {{at: 2m, alert: *hot, status: resolved}}
  - {{at: 5m, alert: *hot}}
replies:
  cap: [{{failed: busy}}, {{applied: {{was: 90}}}}]
expect:
  - at: 1s
    runs: [{{status: waiting, steps: {{cap: {{status: waiting, attempts: 1}}}}}}]
  - at: 1m
    runs: [{{status: waiting, steps: {{cap: {{status: succeeded, attempts: 2, undo: armed}}}}}}]
  - decisions: [started, {{playbook: cap, target: "node:n1", decision: cooldown}}]
    runs:
      - playbook: cap
        target: "node:n1"
        mode: enforce
        decision: started
        status: succeeded
        alerts: 1
        steps:
          cap:
            params: {{amount: 80}}
            output: {{was: 90}}
            undo: {{status: done, action: test.uncap, params: {{amount: 90}}}}
          cooled: succeeded
          harder: skipped
        events: [started, step_started, step_succeeded, undo_done]
      - {{decision: cooldown, status: not_started}}
    calls: [test.cap, test.cap, {{action: test.uncap, undo: true, params: {{amount: 90}}}}]
    paused: false
    breaker_open: false
""")
    )
    assert failures(result) == []
    assert result.passed


@pytest.mark.parametrize(
    ("expectation", "message"),
    [
        ("runs: [{status: failed}]", "expected failed, got succeeded"),
        ("runs: [{decision: joined}]", "expected joined, got started"),
        ("runs: [{target: 'node:n2'}]", "expected node:n2, got node:n1"),
        ("runs: []", "expected 0, got 1:\n      cap node:n1: succeeded (started)"),
        ("runs: [{steps: {cap: failed}}]", "runs[0].steps.cap.status: expected failed, got succeeded"),
        ("runs: [{steps: {harder: {params: {amount: 50}}}}]", "params.amount: expected 50, got 60.0"),
        (
            "runs: [{steps: {harder: {params: {percent: 50}}}}]",
            "params.percent: expected 50, got nothing; available: am",
        ),
        ("runs: [{steps: {cooled: {error: nobody}}}]", "expected a text with nobody, got the alert had not resolved"),
        ("runs: [{steps: {cap: {attempts: 2}}}]", "attempts: expected 2, got 1"),
        ("runs: [{steps: {cap: {undo: done}}}]", "undo.status: expected done, got armed"),
        ("runs: [{steps: {cooled: {undo: done}}}]", "undo: expected an undo, got none"),
        ("runs: [{events: [closed, started]}]", "events[1]: expected started next, got the events started"),
        ("calls: [test.cap]", "calls: expected 1, got 2:\n      test.cap {'amount': 80.0}"),
        ("calls: [test.cap, test.tell]", "calls[1].action: expected test.tell, got test.cap"),
        ("decisions: []", "decisions: expected 0, got 1:\n      cap node:n1: started"),
        ("decisions: [joined]", "decisions[0].decision: expected joined, got started"),
        ("paused: true", "paused: expected True, got False"),
    ],
)
def test_what_is_not_as_expected_is_told_at_its_place(run: Run, expectation: str, message: str) -> None:
    """With what was expected, what was got, and the line of the expectation."""
    result = run(one(f"alerts: [{{alert: {HOT}}}]\nexpect:\n  {expectation}\n"))
    assert not result.passed
    (failure,) = failures(result)
    assert failure.startswith("5: at the end, ")
    assert message in failure


def test_the_place_is_that_of_the_value_in_a_list_of_checks_too(run: Run) -> None:
    """Line and column of what was expected."""
    result = run(one(f"alerts: [{{alert: {HOT}}}]\nexpect:\n  - at: 1m\n    runs:\n      - status: failed\n"))
    (failure,) = result.results[0].failures
    assert (failure.line, failure.column) == (7, 21)
    assert failure.message == "t: at 1m, runs[0].status: expected failed, got waiting"


@pytest.mark.parametrize(
    ("reply", "status", "attempts"),
    [
        ("applied", "succeeded", 1),
        ("{applied: {was: 5}, after: 10s}", "succeeded", 1),
        ("[{failed: busy}, applied]", "succeeded", 2),
        ("{failed: busy}", "failed", 3),
        ("{failed: other batches came, output: {verified: {batches: {agreed: 0}}}}", "failed", 1),
        ("{rejected: not now}", "failed", 1),
        ("unsupported", "failed", 1),
        ("timeout", "unknown", 3),
        ("[timeout, timeout, applied]", "succeeded", 3),
    ],
)
def test_replies_are_taken_one_after_the_other_and_the_last_stays(
    run: Run, reply: str, status: str, attempts: int
) -> None:
    """By a step's id or by an action's name."""
    for key in ("cap", "test.cap"):
        expect = f"runs: [{{steps: {{cap: {{status: {status}, attempts: {attempts}}}}}}}]"
        result = run(one(f"alerts: [{{alert: {HOT}}}]\nreplies: {{{key}: {reply}}}\nexpect:\n  {expect}\n"))
        assert failures(result) == []


def test_an_undo_has_replies_of_its_own(run: Run) -> None:
    """Under the step's id and ``undo``."""
    result = run(
        one(f"""\
alerts:
  - {{alert: &hot {HOT}}}
  - {{at: 1m, alert: *hot, status: resolved}}
replies: {{cap.undo: [{{failed: busy}}, applied]}}
expect: {{runs: [{{steps: {{cap: {{undo: done}}}}}}], calls: [test.cap, test.uncap, test.uncap]}}
""")
    )
    assert failures(result) == []


def test_operators_take_part(run: Run) -> None:
    """Approve, pause, resume, cancel and undo; an order that is refused must be expected."""
    result = run(
        one(f"""\
mode: approve
alerts: [{{alert: {HOT}}}]
orders:
  - {{do: undo, refused: true}}
  - {{at: 1m, do: pause}}
  - {{at: 2m, do: approve, by: alice}}
  - {{at: 3m, do: resume}}
  - {{at: 4m, do: undo, playbook: cap, target: "node:n1"}}
expect:
  - {{at: 30s, runs: [{{status: awaiting_approval, steps: {{approval: waiting}}}}]}}
  - {{at: 2m, paused: true, calls: [], runs: [{{steps: {{approval: succeeded, cap: pending}}}}]}}
  - {{at: 3m, calls: [test.cap]}}
  - {{runs: [{{status: cancelled, message: operator, steps: {{cap: {{undo: done}}}}}}]}}
""")
    )
    assert failures(result) == []
    unexpected = run(one("orders: [{do: approve}]\nexpect: {runs: []}\n"))
    assert failures(unexpected) == ["3: at 0s the order approve was refused: there is no such run yet"]


def test_a_restart_forgets_nothing(run: Run) -> None:
    """The server is killed where it stands; its runs go on, and time has passed."""
    result = run(
        one(f"""\
alerts: [{{alert: {HOT}}}]
orders: [{{at: 1m, do: restart, down: 2m}}]
expect:
  - {{at: 4m, runs: [{{steps: {{cap: succeeded, cooled: waiting}}}}]}}
  - {{runs: [{{status: succeeded, steps: {{cooled: timed_out, harder: succeeded}}}}]}}
""")
    )
    assert failures(result) == []


def test_an_old_alert_is_stale_and_mode_observe_acts_on_nothing(run: Run) -> None:
    """``starts_at`` may lie before the test; ``mode`` is the server's."""
    stale = one(f"alerts: [{{alert: {HOT}, starts_at: -20m}}]\nexpect: {{runs: [{{decision: stale}}], calls: []}}\n")
    observe = one(
        f"mode: observe\nalerts: [{{alert: {HOT}}}]\n"
        "expect: {runs: [{status: observed, steps: {cap: {status: observed, params: {amount: 80}}}}], calls: []}\n"
    )
    assert failures(run(stale)) == []
    assert failures(run(observe)) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("expct: {}", "unknown key 'expct'; did you mean 'expect'?"),
        ("expect: {runs: [{status: faild}]}", "'faild' is not one of"),
        (
            "expect: {runs: [{steps: {cpa: failed}}]}",
            "there is no step 'cpa' in the playbooks under test; did you mean",
        ),
        ("expect: {runs: [{playbook: cup}]}", "there is no playbook 'cup' in the playbooks under test; did you mean"),
        ("replies: {tst.cap: applied}\nexpect: {runs: []}", "there is no step or action 'tst.cap'"),
        ("replies: {cap: aplied}\nexpect: {runs: []}", "'aplied' is not one of applied, failed"),
        ("end: 1s\norders: [{at: 2s, do: pause}]\nexpect: {runs: []}", "an entry at 2s is after the test's end"),
        ("end: 30d\nexpect: {runs: []}", "a test lasts at most 7d"),
        ("orders: [{do: restart, down: 7000y}]\nexpect: {runs: []}", "'down' is at most 7d"),
        (f"alerts: [{{alert: {HOT}, starts_at: -3000y}}]\nexpect: {{runs: []}}", "1095000d is too long"),
        ("expect: []", "must not be empty"),
    ],
)
def test_a_test_that_cannot_mean_what_it_says_is_refused(run: Run, body: str, message: str) -> None:
    """A misspelt expectation would otherwise pass for ever."""
    result = run(one(body + "\n"))
    assert result.results == ()
    assert any(message in failure for failure in failures(result)), failures(result)


def test_mistakes_of_the_playbook_are_told_and_nothing_runs(run: Run) -> None:
    """The test names the playbook of its own file name, unless it says others."""
    broken = run(one("expect: {runs: []}\n"), playbook=PLAYBOOK.replace("target: node", "targt: node"))
    assert any("unknown key 'targt'" in failure for failure in failures(broken))
    missing = run("playbooks: [other.yaml]\n" + one("expect: {runs: []}\n"))
    assert any("no such file" in problem.message for problem in missing.problems)


def test_an_alert_that_no_playbook_reacts_to_is_told_with_the_reason(run: Run) -> None:
    """Otherwise nobody would know why nothing happened."""
    other = HOT.replace("Hot", "Cold")
    result = run(one(f"alerts: [{{alert: {other}}}]\nexpect: {{decisions: [started]}}\n"))
    assert failures(result)[0].endswith("got 0:\n      cap did not react to Cold: alertname is 'Cold', not 'Hot'")


def test_the_report_reads_like_a_test_runners(run: Run) -> None:
    """A line for each file, the failures, the sum."""
    good = run(one(f"alerts: [{{alert: {HOT}}}]\nexpect: {{decisions: [started]}}\n"))
    bad = run(one(f"alerts: [{{alert: {HOT}}}]\nexpect: {{decisions: []}}\n"))
    lines = list(test_results.results([good, bad], verbose=True))
    assert lines[0].startswith("ok   ")
    assert lines[1] == "  ok   t"
    assert lines[2].startswith("FAIL ")
    assert lines[-1].startswith("2 tests, 1 failed, ")


def test_many_tests_of_one_file_do_not_touch_each_other(run: Run) -> None:
    """Each has a world of its own; none waits for real time, however long its runs last."""
    test = f"  - name: t%d\n    alerts: [{{alert: {HOT}}}]\n    expect: {{runs: [{{status: succeeded}}]}}\n"
    result = run("tests:\n" + "".join(test % number for number in range(50)))
    assert result.passed
    assert len(result.results) == 50


def test_each_failure_says_why_the_run_failed(run: Run) -> None:
    """The reason of a missing call is often that a step before it failed."""
    playbook = PLAYBOOK.replace("amount: 80", "amount: '{{ labels.rack | float }}'")
    tests = f"alerts: [{{alert: {HOT}}}]\nexpect: {{calls: [test.cap, test.cap]}}\n"
    for told in failures(run(one(tests), playbook)):
        assert "cap node:n1 failed: step cap: " in told, told
        assert told.endswith("there is no 'rack' here"), told


ASKS = """\
playbook: cap
on: {alert: Hot}
target: job
steps:
  - {id: of_card, when: 'job.verdict.cause == "gpu" and 9 in job.verdict.ranks', action: test.tell, with: {text: card}}
  - {id: without, when: not job.verdict.cause, action: test.tell, with: {text: none}}
"""


@pytest.mark.parametrize(
    ("job", "steps"),
    [
        ("{name: llm-1, verdict: {cause: gpu, node: n1, ranks: [8-9]}}", "{of_card: succeeded, without: skipped}"),
        ("{name: other, verdict: {cause: gpu, ranks: [9]}}", "{of_card: skipped, without: succeeded}"),
        ("{name: llm-1}", "{of_card: skipped, without: succeeded}"),
    ],
)
def test_the_verdict_on_the_target_is_given(run: Run, job: str, steps: str) -> None:
    """A playbook on any alert of a job asks for it, and none is no error."""
    alert = "{alert: {labels: {alertname: Hot, job_name: llm-1}}}"
    result = run(one(f"job: {job}\nalerts: [{alert}]\nexpect: {{runs: [{{steps: {steps}}}]}}\n"), playbook=ASKS)
    assert failures(result) == []


def test_an_approval_is_answered_by_whom_the_playbook_names(run: Run) -> None:
    """By name or by group, and by as many as it asks for."""
    asking = PLAYBOOK + "approval: {by: [hardware], count: 2}\n"
    result = run(
        one(f"""\
mode: approve
alerts: [{{alert: {HOT}}}]
orders:
  - {{do: approve, by: bob, refused: true}}
  - {{at: 1m, do: approve, by: ann, groups: [hardware]}}
  - {{at: 2m, do: approve, by: ann, groups: [hardware], refused: true}}
  - {{at: 3m, do: approve, by: carl, groups: [hardware, on-call]}}
expect:
  - {{at: 2m, calls: []}}
  - {{at: 3m, runs: [{{steps: {{approval: {{status: succeeded, output: {{approved_by: [ann, carl]}}}}}}}}]}}
"""),
        asking,
    )
    assert failures(result) == []


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("{do: start}", "start needs 'playbook'"),
        ("{do: approve, inputs: {a: 1}}", "only start takes 'inputs'"),
        ("{do: start, playbook: cap, target: 'rack:1'}", "the order start was refused: target: "),
        ("{do: start, playbook: cap, target: 'node:n1', inputs: {a: 1}}", "takes no inputs"),
        ("{do: start, playbook: cop, target: 'node:n1'}", "the order start was refused: no playbook cop is loaded"),
    ],
)
def test_a_start_that_cannot_be_is_told_at_its_line(run: Run, order: str, told: str) -> None:
    """As a person would be told by the server."""
    (failure,) = failures(run(one(f"orders:\n  - {order}\nexpect: {{}}\n")))
    assert failure.startswith("4: ")
    assert told in failure


def test_numbers_of_a_group_are_not_those_of_a_single_run(run: Run) -> None:
    """The difference names what there is."""
    result = run(one(f"alerts:\n  - alert: {HOT}\nexpect:\n  runs: [{{group: {{total: 1}}}}]\n"))
    assert failures(result) == ["6: at the end, runs[0].group: expected a group, got a run of one target"]
