"""What is checked when a playbook is loaded, each mistake with its place and the nearest right name."""

from __future__ import annotations

import pytest

from tests.unit.catalog.actions import PLAYBOOK, playbook_of, problems_of


def changed(old: str, new: str) -> str:
    assert old in PLAYBOOK
    return PLAYBOOK.replace(old, new)


def with_step(step: str) -> str:
    return PLAYBOOK + "  - " + step + "\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", "1:1: must be a mapping"),
        ("playbook: x\n", "1:1: 'steps' is missing"),
        (changed("target: job", "targt: job"), "4:1: unknown key 'targt'; did you mean 'target'?"),
        (changed("on:\n", "trigger:\n"), "2:1: unknown key 'trigger'; did you mean 'on'?"),
        (changed("target: job", "target: job\ntasks: []"), "5:1: unknown key 'tasks'; did you mean 'steps'?"),
        (changed("target: job", "target: jobs"), "4:9: target: 'jobs' is not one of gpu, node, job, cluster"),
        (changed("target: job", "target: {jb: x}"), "4:10: unknown key 'jb'; did you mean 'job'?"),
        (changed("target: job", "target: {gpu: a}"), "4:9: target: a gpu needs its node too"),
        (changed("target: job", "target: [job]"), "4:9: target: "),
        (changed("alert: TrainingLossSpike", "alert: []"), "3:10: on.alert: must not be empty"),
        (changed("playbook: spike", "playbook: 'a b'"), "1:11: playbook: 'a b' may hold letters"),
        (changed("target: job", "target: job\nmode: enfroce"), "5:7: mode: 'enfroce' is not one of"),
        (changed("target: job", "target: job\nguards: {cooldown: 10}"), "write it with its unit"),
        (changed("target: job", "target: job\nguards: {max_runs: {count: 1, per: 0s}}"), "longer than 0s"),
        (changed("target: job", "target: job\nvars: {a: ['{{ labels.x }}']}"), "5:12: variables are constants"),
        (changed("  alert: T", "  matchers: ['a']\n  alert: T"), "3:14: on.matchers[0]: 'a' is not a matcher"),
        (changed("  alert: T", "  when: lables.x\n  alert: T"), "3:9: when: there is no name 'lables' here; did you"),
        (changed("  alert: T", "  when: steps.a.status\n  alert: T"), "there is no name 'steps' here"),
        (with_step("{}"), "9:5: steps[1]: a step has exactly one of action, wait_for, wait, wait_until, approve"),
        (with_step("{wait_for: resolved, action: test.tell}"), "a step has exactly one of"),
        (with_step("{wait_for: resolve}"), "steps[1].wait_for: must be 'resolved', not 'resolve'"),
        (with_step("{wait_for: resolved, timeut: 5m}"), "9:26: unknown key 'timeut'; did you mean 'timeout'?"),
        (with_step("{wait_for: resolved, timeout: 0s}"), "timeout: must be longer than 0s"),
        (with_step("{id: back, wait_for: resolved}"), "9:10: the id 'back' is used by an earlier step"),
        (with_step("{approve: '{{ labels.x'}"), "9:15: approve: "),
        (with_step("{approve: {message: '{{ lables.x }}'}}"), "did you mean 'labels'"),
        (
            with_step("{action: test.tel, with: {message: a}}"),
            "9:14: there is no action 'test.tel'; did you mean 'test",
        ),
        (with_step("{action: test.tel}"), "did you mean 'test.tell'?"),
        (with_step("{action: test.tell, with: {mesage: a}}"), "9:32: unknown key 'mesage'; did you mean 'message'?"),
        (with_step("{action: test.tell}"), "steps[1].with: 'message' is missing"),
        (with_step("{action: test.tell, with: {message: 5}}"), "message: must be text; put it in quotes"),
        (with_step("{action: test.tell, with: {message: a secret}}"), "with: a message holds no secret"),
        (with_step("{action: test.tell, with: {message: 'secret {{ run.id }}'}}"), "with: a message holds no secret"),
        (
            with_step("{action: test.tell, undo: on_resolve, with: {message: a}}"),
            "action test.tell cannot be undone by itself; write how: undo: {when: on_resolve, action: NAME, with",
        ),
        (
            with_step("{action: test.tell, with: {message: a}, undo: {action: test.tel}}"),
            "there is no action 'test.tel'; did you mean 'test",
        ),
        (
            with_step("{action: test.tell, with: {message: a}, undo: {action: test.tell, with: {mesage: a}}}"),
            "unknown key 'mesage'; did you mean 'message'?",
        ),
        (with_step("{action: test.tell, with: {message: a}, undo: {when: later, action: test.tell}}"), "undo.when"),
        (with_step("{action: test.tell, with: {message: a}, undo: {when: never}}"), "'action' is missing"),
        (
            with_step(
                "{action: test.tell, with: {message: a}, undo: {action: test.tell, with: {message: '{{ outptu.x }}'}}}"
            ),
            "did you mean 'output'?",
        ),
        (with_step("{action: test.tell, with: {message: '{{ output }}'}}"), "there is no name 'output' here"),
        (with_step("{action: test.rollback, with: {steps_back: 0}}"), "must be greater than or equal to 1"),
        (with_step("{action: test.rollback, with: {steps_back: x}}"), "must be a whole number"),
        (
            with_step("{action: test.rollback, with: {how: fats}}"),
            "'fats' is not one of fast, safe; did you mean 'fast'",
        ),
        (with_step("{action: test.rollback, with: {wait: 1x}}"), "'1x' is not a duration"),
        (with_step("{action: test.rollback, with: {skip: [1, x]}}"), "steps[1].with.skip[1]: must be a whole number"),
        (with_step("{action: test.rollback, with: {before: a, steps_back: 1}}"), "give before or steps_back, not both"),
        (with_step("{action: test.rollback, when: steps.bakc.error}"), "there is no step 'bakc'; did you mean 'back'?"),
        (with_step("{id: me, action: test.rollback, when: steps.me.error}"), "there is no step 'me'"),
        (
            PLAYBOOK + "on_success:\n  - {wait_for: resolved, when: 'steps[\"failure-1\"].error'}\n"
            "on_failure:\n  - {wait_for: resolved, when: steps.back.error}\n",
            "step 'failure-1' has not run here",
        ),
        (
            PLAYBOOK + "on_success:\n  - {wait_for: resolved, when: steps.back.error}\n"
            "on_failure:\n  - {wait_for: resolved, when: 'steps[\"success-1\"].error'}\n",
            "step 'success-1' has not run here",
        ),
        (with_step("{wait_for: resolved, when: steps.back.statsu}"), "a step has no 'statsu'; did you mean 'status'?"),
        (with_step("{wait_for: resolved, when: 'steps.back.status == \"ok\"'}"), "'ok' is not a status of a step"),
        (with_step("{wait_for: resolved, when: vars.x}"), "the playbook has no variable 'x'"),
        (with_step("{wait_for: resolved, when: job.verdict.couse}"), "a verdict has no 'couse'; did you mean 'cause'?"),
        (with_step("{wait_for: resolved, when: job.verdikt}"), "a job has no 'verdikt'; did you mean 'verdict'?"),
        (changed("  alert: T", "  when: job.verdict.node\n  alert: T"), "there is no name 'job' here"),
        (with_step("{wait_for: resolved, when: target.gpu}"), "a target of kind job has no 'gpu'"),
        (
            with_step("{wait_for: resolved, when: alert.starts_at}"),
            "an alert has no 'starts_at'; did you mean 'startsAt'",
        ),
        (with_step("{wait_for: resolved, when: labels.x | sotr}"), "there is no filter 'sotr'; did you mean 'sort'?"),
        (with_step("{wait_for: resolved, when: labels.x | zzz}"), "there is no filter 'zzz'; there are abs, "),
        (with_step("{wait_for: resolved, when: labels.x = 'a'}"), "unexpected '='; two values are compared with =="),
        (with_step("{wait_for: resolved, when: labels.x && vars}"), "unexpected char '&' at 9; write 'and'"),
        (with_step("{wait_for: resolved, when: labels.x || vars}"), "; write 'or'"),
        (with_step("{wait_for: resolved, when: '!labels.x'}"), "; write 'not', or != between two values"),
        (with_step("{approve: '{{ $labels.gpu }}'}"), "unexpected char '$' at 3; names have no $ here: labels.gpu"),
        (
            changed("  alert: T", "  when: labels.temp > 80\n  alert: T"),
            "3:9: when: labels.temp is text and is compared with a number by >; write labels.temp | number",
        ),
        (with_step("{wait_for: resolved, when: -1.5 != alert.annotations.x}"), "alert.annotations.x is text"),
        (
            changed("  alert: T", "  matchers: {severity: critical}\n  alert: T"),
            "3:13: on.matchers: must be a list: ['severity=\"critical\"']",
        ),
        (
            changed("  - id: back", "  id: back").replace("    action", "  action").replace("    with", "  with"),
            "steps: must be a list; each entry begins with '- '",
        ),
        (with_step("{action: test.rollback, with: {steps_back: 80%}}"), "must be a whole number; write 80"),
        (with_step("{action: test.tell, message: a}"), "9:25: 'message' belongs under 'with'"),
    ],
)
def test_a_mistake_is_reported_at_its_place(text: str, told: str) -> None:
    """Line and column count from 1; names are compared with the valid ones there."""
    assert any(told in problem for problem in problems_of(text)), problems_of(text)


def test_a_misplaced_parameter_is_reported_once() -> None:
    """It is not also reported as an unknown key."""
    told = problems_of(with_step("{action: test.tell, message: a}"))
    assert not any("unknown key" in problem for problem in told), told


def test_labels_are_compared_with_numbers_once_they_are_numbers() -> None:
    """They can also be compared with text, and step outputs with either."""
    for when in (
        "labels.temp | number > 80",
        "labels.temp == '80'",
        "steps.back.output.x > 80",
        "labels | length > 80",
    ):
        assert problems_of(with_step(f'{{wait_for: resolved, when: "{when}"}}')) == []


def test_an_unknown_output_key_is_reported_if_the_action_declares_its_outputs() -> None:
    """Outputs of a job, which are by node, are not checked."""
    of_gpu = changed("target: job", "target: gpu").replace("test.rollback", "test.read").replace("steps_back: 100", "")
    read = of_gpu + "  - {approve: '{{ steps.back.output.limit_wats }}'}\n"
    told = "the output of step 'back' has no 'limit_wats'; did you mean 'limit_watts'?"
    assert any(told in problem for problem in problems_of(read)), problems_of(read)
    assert problems_of(read.replace("limit_wats", "limit_watts")) == []
    assert (
        problems_of(read.replace("output.limit_wats", "output.get('x', 1)").replace("'{{", '"{{').replace("}}'", '}}"'))
        == []
    )
    assert problems_of(read.replace("target: gpu", "target: job")) == []


def test_an_action_is_rejected_for_an_unsupported_target() -> None:
    """Job commands have no place in a playbook about a GPU."""
    told = "action test.rollback works on a job, not on a gpu"
    assert any(told in problem for problem in problems_of(changed("target: job", "target: gpu")))


def test_dashed_names_need_brackets_and_the_message_says_so() -> None:
    """Jinja reads ``steps.go-back`` as a subtraction."""
    text = changed("id: back", "id: go-back") + "  - {wait_for: resolved, when: steps.go-back.error}\n"
    assert any("steps['go-back']" in problem for problem in problems_of(text))
    assert problems_of(text.replace("steps.go-back.error", "\"steps['go-back'].error\"")) == []


def test_every_mistake_in_a_file_is_reported() -> None:
    """Mistakes in models, expressions and actions are reported together."""
    text = """\
playbook: one
sumary: x
on: {alert: A, matchers: ['a=~"("']}
target: job
steps:
  - {id: a, action: test.tel, when: lables.x, timeot: 5s}
  - {id: a, action: test.tell, with: {mesage: '{{ vars.y }}'}}
---
playbook: two
on: {alert: A}
"""
    lines = [problem.split(":")[0] for problem in problems_of(text)]
    assert lines == ["2", "3", "6", "6", "6", "7", "7", "7", "7", "9", "9"]


def test_templated_parameters_are_checked_as_far_as_they_are_known() -> None:
    """A templated value may become anything; its name and the constants next to it are checked."""
    step = "{action: test.rollback, with: {steps_back: '{{ 5 }}', skip: ['{{ 1 }}', 2], how: safe}}"
    assert problems_of(with_step(step)) == []
    wrong = problems_of(with_step(step.replace("how: safe", "how: fats").replace("skip", "skp")))
    assert len(wrong) == 2


def test_a_parameter_that_is_one_variable_is_checked_as_a_number() -> None:
    """Variables are constants. Where text is wanted, a number is written out."""
    variables = "vars: {steps: %s, word: x}\n"
    step = "{action: test.rollback, with: {steps_back: '{{ vars.steps }}', before: '{{ vars.word }}'}}"
    wrong = problems_of(variables % "0" + with_step(step))
    assert [problem.split(": ", 1)[1] for problem in wrong] == [
        "steps[1].with.steps_back: must be greater than or equal to 1"
    ]
    written_out = "{action: test.tell, with: {message: '{{ vars.steps }}'}}"
    assert problems_of(variables % "5" + with_step(step.replace(", before: '{{ vars.word }}'", ""))) == []
    assert problems_of(variables % "5" + with_step(written_out)) == []


def test_steps_of_on_failure_know_every_step() -> None:
    """When it runs, every step is over; and its own ids come after those of the steps."""
    text = PLAYBOOK + (
        "on_failure:\n"
        "  - {id: say, action: test.tell, with: {message: '{{ steps.back.error }}'}}\n"
        "  - {action: test.tell, with: {message: '{{ steps.say.status }}'}}\n"
    )
    assert problems_of(text) == []
    assert "there is no step 'say'" in problems_of(with_step("{wait_for: resolved, when: steps.say.error}"))[0]


def test_the_version_depends_on_the_documents_own_text() -> None:
    """A change elsewhere in the file makes no new version, one in the document does."""
    alone = playbook_of(PLAYBOOK)
    assert playbook_of(f"# a comment before\n{PLAYBOOK}").version == alone.version
    assert playbook_of(PLAYBOOK.replace("100", "101")).version != alone.version
    assert playbook_of(alone.text).version == alone.version


@pytest.mark.parametrize(
    ("effect", "told"),
    [
        ("{query: 'up{a=\"{{ labels.a }}\"}', better: lower}", None),
        ("{query: \"up{a='{{ target.job }}-{{ vars.n }}'}\", better: higher}", None),
        ("{query: 'up{{ labels.a }}', better: lower}", "must be inside double or single quotes"),
        ("{query: 'up{a=`{{ labels.a }}`}', better: lower}", "must be inside double or single quotes"),
        ("{query: 'up # \" {{ labels.a }}', better: lower}", "must be inside double or single quotes"),
        ("{query: 'up{a=\"{% if 1 %}x{% endif %}\"}', better: lower}", "only values"),
        ("{query: 'up{a=\"{{ steps.x.output }}\"}', better: lower}", "there is no name 'steps' here"),
        ("{query: 'up{a=\"{{ target.gpu }}\"}', better: lower}", "a target of kind job has no 'gpu'"),
        ("{query: up}", "'better' is missing"),
        ("{query: up, better: more}", "more"),
    ],
)
def test_the_query_of_an_effect_has_values_only_within_quotes(effect: str, told: str | None) -> None:
    """Values are escaped there; anywhere else a label could change the query."""
    problems = problems_of(f"effect: {effect}\nvars: {{n: 1}}\n{PLAYBOOK}")
    assert problems == [] if told is None else any(told in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("{approve: {message: a, by: []}}", ""),
        ("{approve: {message: a, cout: 2}}", "unknown key 'cout'; did you mean 'count'?"),
        ("{approve: {message: a, count: 0}}", "count: must be greater than or equal to 1"),
        ("{approve: {message: a, remind: 1h}, timeout: 30m}", "remind: must be shorter than the timeout"),
        ("{approve: {message: a, remind: 0s}}", "remind: must be longer than 0s"),
        ("{approve: {message: a, ask_again: 1h}}", "ask_again: has no effect without a timeout"),
        (
            "{approve: {message: a, ask_again: 1h}, timeout: 30m, on_timeout: approve}",
            "ask_again: cannot be combined with on_timeout approve",
        ),
        ("{approve: a, on_timeout: reject}", "on_timeout: has no effect without a timeout"),
        ("{approve: a, timeout: 30m, on_timeout: escalate}", "escalate needs 'escalate', which names whom to ask next"),
        (
            "{approve: {message: a, escalate: {by: [b]}}, timeout: 30m}",
            "escalate: needs on_timeout: escalate",
        ),
        ("{approve: {message: a, escalate: {by: [b]}}, timeout: 30m, on_timeout: escalate}", ""),
    ],
)
def test_a_contradictory_question_is_rejected(step: str, told: str) -> None:
    """Each mistake has its line and column; the question of mode approve follows the same rules."""
    problems = problems_of(with_step(step))
    assert [told in problem and problem.startswith("9:") for problem in problems] == ([True] if told else [])


@pytest.mark.parametrize(
    ("approval", "told"),
    [
        ("{by: [a], count: 2, timeout: null}", ""),
        ("{on_timeout: approve}", ""),
        ("{ask_again: 1h, on_timeout: approve}", "ask_again: cannot be combined with on_timeout approve"),
        ("{remind: 2h}", "remind: must be shorter than the timeout"),
        ("{message: '{{ lables.x }}'}", "did you mean 'labels'"),
        ("{tiemout: 1h}", "unknown key 'tiemout'; did you mean 'timeout'?"),
    ],
)
def test_the_question_of_mode_approve_is_checked(approval: str, told: str) -> None:
    """Omitted keys get defaults that are consistent with the rest."""
    problems = problems_of(changed("target: job", f"target: job\napproval: {approval}"))
    assert [told in problem for problem in problems] == ([True] if told else [])
