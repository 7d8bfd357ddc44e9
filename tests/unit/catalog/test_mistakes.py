"""Natural mistakes are refused at their line, with the cure. Texts that only look like one are accepted."""

from __future__ import annotations

import pytest

from tests.unit.catalog.mistakes import BASE, mistakes
from trainmedic_core import duration
from trainmedic_core.expressions import template_syntax
from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader, scope_check
from trainmedic_server.catalog.scope_check import STEP_NAMES, VisibleNames
from trainmedic_server.domain import value_types
from trainmedic_server.ports.actions import Action

ACTIONS = registry.Registry({action.name: action for action in registry.BUILT_IN})
TABLE = tuple(mistakes())


def problems_of(text: str) -> list[str]:
    """Return ``line:column: message`` of each error, by the actions of the server."""
    _, problems = loader.load(text, "p", ACTIONS)
    return [str(problem).removeprefix("p:") for problem in problems]


def test_the_table_is_large_and_has_no_entry_twice() -> None:
    """It has at least 120 mistakes."""
    assert len(TABLE) >= 120
    assert len({text for text, *_ in TABLE}) == len(TABLE)


@pytest.mark.parametrize(("text", "line", "named", "cure"), TABLE)
def test_a_mistake_is_rejected_with_its_remedy(text: str, line: int, named: str, cure: str) -> None:
    """The error is at the mistake's line, names it, and states the correction."""
    problems = problems_of(text)
    assert any(each.startswith(f"{line}:") and named in each and cure in each for each in problems), problems


@pytest.mark.parametrize(
    "step",
    [
        "{wait_for: resolved, when: steps.f.output.cpu.percent > 80 and labels.a == '80'}",
        "{wait_for: resolved, when: 'labels.temp | default(0) | float > 80'}",
        '{wait_for: resolved, when: \'"NaN" in annotations.summary or labels.a in ["1", "2"]\'}',
        "{wait_for: resolved, when: 'steps.f.output.disks[\"/\"].percent > 90'}",
        "{wait_for: resolved, when: steps.f.output.gpu.ecc.volatile_uncorrected | default(0) > 0}",
        '{wait_for: resolved, when: \'steps.f.output.get("cpu", {}).get("percent", 0) > vars.limit\'}',
        "{wait_for: resolved, when: labels.a}",
        '{action: notify, with: {message: \'{{ labels.a or "none" }}, {{ "a" if labels.b else "c" }}\'}}',
        "{action: notify, with: {message: 'GPU #3'}}",
        "{approve: Cap the GPU?}   # a comment",
        "{action: k8s.cordon}   #cordon",
        "{action: gpu.power_limit, with: {percent: 1}}",
        "{action: alertmanager.silence, with: {duration: 5m}}\n  - {wait_for: resolved, timeout: 10m}",
        "{action: alertmanager.silence, with: {duration: 5m}}\n  - {wait_for: resolved}",
    ],
)
def test_a_valid_step_stays_valid(step: str) -> None:
    """Types that are not known, and comments behind a blank, are no mistakes."""
    assert problems_of(f"{BASE}  - {step}\n") == []


def test_on_limited_may_notify() -> None:
    limited = "max_runs: {count: 5, per: 1h}, on_limited: [{action: notify, with: {message: a}}]"
    assert problems_of(f"{BASE}guards: {{{limited}}}\n") == []


@pytest.mark.parametrize(
    "on",
    [
        "{alert: 'High load (>5) on GPU, rack 7'}",
        "{alert: A, matchers: ['node=~\"a|b\"', 'path=\"/a|/b\"', 'mount=\"/\"', 'owner=\"a b|c\"']}",
    ],
)
def test_alertnames_and_values_of_matchers_may_have_any_characters(on: str) -> None:
    """Only those that are certainly meant as a pattern are refused."""
    assert problems_of(BASE.replace("{alert: A}", on)) == []


@pytest.mark.parametrize("action", registry.BUILT_IN, ids=lambda action: action.name)
def test_members_of_a_step_and_of_its_output_are_known_for_every_action(action: type[Action]) -> None:
    """This holds also if the output has a member of the same name, as the ``status`` of ``http.request``."""
    outputs = value_types.of_outputs(getattr(action, "outputs", ()))
    names = VisibleNames(STEP_NAMES, steps=("x",), outputs={"x": outputs})
    members = ["status", "params", "output", "error", "attempts", *(f"output.{key}" for key in outputs)]
    trees = [template_syntax.parse_template(f"{{{{ steps.x.{member} }}}}") for member in members]
    assert [scope_check.check(tree, names) for tree in trees] == [[]] * len(members)


@pytest.mark.parametrize("retry", ["{attempts: 0}", "{attempts: 101}", "{attempts: 3, delay: 2}", "{backoff: 0}"])
def test_a_wrong_part_of_retry_gets_no_advice_for_the_whole(retry: str) -> None:
    """It was told to write attempts: 0, or the delay as attempts."""
    (told,) = problems_of(f"{BASE}  - {{action: notify, with: {{message: a}}, retry: {retry}}}\n")
    assert "write retry" not in told


def test_text_for_a_number_is_one_mistake() -> None:
    """A factor may be whole or not."""
    scale = "  - {action: job.scale_lr, with: {factor: half}}\n"
    (told,) = problems_of(BASE.replace("target: gpu", "target: job") + scale)
    assert told.endswith("with.factor: must be a number")


def test_an_output_of_a_job_is_checked_where_no_ranks_or_nodes_are_merged() -> None:
    """``job.load`` and ``http.request`` have one output; that of ``node.facts`` on a job is not known to the leaf."""
    of_job = BASE.replace("target: gpu", "target: job") + "  - {id: load, action: job.load}\n"
    assert problems_of(f"{of_job}  - {{wait_for: resolved, when: steps.f.output.lowest.cpu.percent > 8}}\n") == []
    wrong = problems_of(f"{of_job}  - {{wait_for: resolved, when: steps.load.output.thruput > 8}}\n")
    assert any("did you mean 'throughput'?" in each for each in wrong), wrong


@pytest.mark.parametrize(
    ("written", "cure"),
    [
        ("10 minutes", "write 10m"),
        ("1 hour 30 min", "write 1h30m"),
        ("90 SECONDS", "write 1m30s"),
        ("0 min", "90s, 10m"),
        ("soon", "90s, 10m"),
        ("9" * 400 + " h", "90s, 10m"),
        ("9999999 years", "it is too long"),
        ("5m\n", "write 5m"),
        ("500 milliseconds", "write 500ms"),
        ("5 months", "90s, 10m"),
        ("20 microseconds", "90s, 10m"),
    ],
)
def test_a_duration_in_words_is_rejected_with_its_short_form(written: str, cure: str) -> None:
    """Hostile ones are rejected too, in little time."""
    with pytest.raises(ValueError, match="is not a duration") as refused:
        duration.parse(written)
    assert cure in str(refused.value)


@pytest.mark.parametrize(
    "step",
    [
        "{action: gpu.power_limit, with: {percent: 80}, timeout: 2900000d}",
        "{action: gpu.power_limit, with: {percent: 80}, retry: {attempts: 2, max_delay: 2900000d}}",
        "{wait_for: resolved, timeout: 2900000d}",
        "{wait: 2900000d}",
        "{action: alertmanager.silence, with: {duration: 2900000d}}",
        "{approve: {message: Cap?, remind: 2900000d}}",
        "{action: k8s.drain, with: {checkpoint: 2900000d}}",
        "{action: k8s.drain, with: {grace_period: 2900000d}}",
        "{action: slurm.drain, with: {resume_after: 2900000d}}",
    ],
)
def test_a_time_that_ends_after_the_year_9999_is_rejected(step: str) -> None:
    """The error names its line and the longest valid time."""
    (problem,) = problems_of(f"{BASE}  - {step}\n")
    assert problem.startswith(f"{BASE.count(chr(10)) + 1}:"), problem
    assert "'2900000d' is too long; write at most 2555000d" in problem
    assert problems_of(f"{BASE}  - {step.replace('2900000d', '2555000d')}\n") == []
    (problem,) = problems_of(f"{BASE}  - {step.replace('2900000d', '9' * 5000 + 'y')}\n")
    assert "is too long; write at most 2555000d" in problem


@pytest.mark.parametrize(
    ("last", "field", "most"),
    [
        ("guards: {cooldown: TIME}", "cooldown", "2555000d"),
        ("guards: {max_runs: {count: 1, per: TIME}}", "per", "2555000d"),
        ("  - {wait_for: resolved, when: 'runs.count(\"TIME\") > 3'}", "runs.count", "365000d"),
    ],
)
def test_a_time_that_would_start_before_the_first_date_is_rejected(last: str, field: str, most: str) -> None:
    """The error names the longest time that works at every date."""
    text = f"{BASE}{last}\n"
    for written in ("1001y" if most == "365000d" else "7001y", "9999999d"):
        (problem,) = problems_of(text.replace("TIME", written))
        assert problem.startswith(f"{text[: text.index('TIME')].count(chr(10)) + 1}:"), problem
        assert field in problem
        assert "is too long; write at most" in problem
    assert problems_of(text.replace("TIME", most)) == []
