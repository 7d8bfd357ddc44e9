"""Whatever a template does, when it is compiled or evaluated, is an error of that template, and soon."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.catalog.actions import PLAYBOOK, problems_of
from trainmedic_core import errors
from trainmedic_core.expressions import template_syntax
from trainmedic_core.expressions.evaluation import ValueTemplate, compile_expression
from trainmedic_core.expressions.template_syntax import Malformed

SCOPE: dict[str, Any] = {
    "labels": {"long": "ab " * 20_000, "half": "a" * 1_250, "whole": "a" * 2_500, "severity": "warning"},
    "vars": {"xs": list(range(50_000)), "groups": [{"k": "a", "n": 1}, {"k": "b", "n": 2}, {"k": "a", "n": 3}]},
}
DOUBLED = "{% set a = START %}" + "{% set a = STEP %}" * 60


def doubled(start: str, step: str, use: str) -> str:
    return DOUBLED.replace("START", start).replace("STEP", step) + use


@pytest.mark.parametrize(
    "text",
    [
        "{{ vars.x | round(precision=1, precision=2) }}",
        "{{ " + "9" * 5_000 + " }}",
        "{{ 0x" + "f" * 5_000 + " }}",
        "{% for a in vars.xs %}" * 25 + "{% endfor %}" * 25,
        "{{ " + "not " * 210 + "true }}",
        "{{ " + "-" * 500 + "1 }}",
        "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
        "{{ " + "[" * 90 + "]" * 90 + " }}",
        "{{ " + "1 + " * 150 + "1 }}",
        "{{ 1 " + "| abs " * 3_000 + "}}",
        "{{ 1 }}" * 6_000,
        "{{ 'a' }}" + " " * 70_000,
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in vars.xs recursive %}{{ loop(vars.xs) }}{% endfor %}",
        "{% autoescape true %}{% endautoescape %}",
        "{% set loop.x = 1 %}",
        "{{ 1 in [1] == true }}",
    ],
)
def test_uncompilable_templates_are_malformed(text: str) -> None:
    """The failure may come from Jinja, or from Python on Jinja's output."""
    with pytest.raises(Malformed):
        ValueTemplate(text, "with")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{{ 20000000 | round(20000000, 'ceil') }}", "precision of at most 30"),
        ("{{ 'x' | round(9, 'ceil') }}", "round takes a number"),
        ("{{ '{:>1000000000}'.format('x') }}", "unsafe"),
        ("{{ '{:>1000000000}'['format']('x') }}", "unsafe"),
        ("{{ '%1000000000d' % 1 }}", "not formatted"),
        ("{{ '%1000000000d' is odd }}", "odd takes numbers"),
        ("{{ '%1000000000d' is divisibleby(3) }}", "divisibleby takes numbers"),
        ("{{ ['%1000000000d'] | select('even') }}", "even takes numbers"),
        ("{{ 'x'.zfill(1000000000) }}", "unsafe"),
        ("{{ 'x' * 1000000000 }}", "too long"),
        ("{{ 1000000000 * [1] }}", "too long"),
        ("{{ [1] | slice(1000000000) }}", "too much work"),
        ("{{ labels.long | replace('a', 'b' * 60000) }}", "too much work"),
        ("{{ labels.long.replace('', 'b' * 60000) }}", "too much work"),
        ("{{ labels.long.split(' ') | join('b' * 60000) }}", "too much work"),
        ("{{ ('b' * 60000).join(labels.long.split(' ')) }}", "too much work"),
        ("{{ labels.long | trim(labels.long) }}", "too much work"),
        ("{{ labels.long.rfind('a' * 30000) }}", "too much work"),
        ("{% for x in vars.xs %}{{ labels.half in labels.whole }}{% endfor %}", "too much work"),
        ("{% for x in vars.xs %}{% for y in vars.xs %}{% endfor %}{% endfor %}", "too much work"),
        ("{% for x in vars.xs %}{{ vars.xs == vars.xs[:] }}{% endfor %}", "too much work"),
        ("{% set t %}{% for x in vars.xs %}" + "x" * 60_000 + "{% endfor %}{% endset %}", "too much work"),
        ("{{ [['a'], ['b']] | sum(start=[]) }}", "sum starts with a number"),
        ("{{ ('9' * 4000) | int * 2 }}", "too large"),
        ("{{ ('f' * 4000) | int(base=16) }}", "too large"),
        ("{{ {[]: 1} }}", "unhashable"),
        ("{{ labels.severity | truncate(1) }}", "AssertionError"),
        ("{{ labels() }}", "only methods"),
        (doubled("(1, 2)", "(a, a)", "{{ {a: 1} }}"), "too much work"),
        (doubled("[1, 2]", "[a, a]", "{{ a }}"), "too much work"),
        (doubled("[1, 2]", "[a, a]", "{{ a | tojson }}"), "too much work"),
        (doubled("[1, 2]", "[a, a]", "{{ a ~ 'x' }}"), "too much work"),
        (doubled("[1, 2]", "[a, a]", "{{ a == a[:] }}"), "too much work"),
        (doubled("'xx'", "a ~ a", "{{ a | length }}"), "too much work"),
        (doubled("'xx'", "a + a", "{{ a | length }}"), "too much work"),
        (doubled("[1]", "a + a", "{{ a | length }}"), "too much work"),
        (doubled("7", "a * a", "{{ a }}"), "too large"),
    ],
)
def test_too_expensive_operations_fail_before_they_run(text: str, told: str) -> None:
    """This includes single calls into C, which nothing can interrupt."""
    template = ValueTemplate(text, "with")
    with pytest.raises(errors.ExpressionError) as caught:
        template.render(SCOPE)
    assert told in str(caught.value)
    assert len(str(caught.value)) < 500


def test_all_templates_of_a_step_share_one_bound() -> None:
    """A step with a hundred templates does not take a hundred times as long."""
    half = "{{ vars.xs[:9000] | sort | length }}"
    assert ValueTemplate([half], "with").render(SCOPE) == [9_000]
    with pytest.raises(errors.ExpressionError, match="too much work"):
        ValueTemplate([half] * 5, "with").render(SCOPE)


def test_a_value_that_is_passed_on_whole_is_bounded_too() -> None:
    """It would be checked, stored and sent."""
    with pytest.raises(errors.ExpressionError, match="over 65536 characters"):
        compile_expression("labels.long ~ labels.long", "with").evaluate(SCOPE)
    with pytest.raises(errors.ExpressionError, match="too much work"):
        compile_expression("[" + ", ".join(["vars.xs"] * 10) + "]", "with").evaluate(SCOPE)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("{% for g in vars.groups | groupby('k') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}", "a2b1"),
        ("{% for k, gs in vars.groups | groupby('k') %}{{ k }}{{ gs | sum(attribute='n') }}{% endfor %}", "a4b2"),
        ("{% for x in 'abc' if x != 'b' %}{{ loop.index }}/{{ loop.length }}{{ x }} {% endfor %}", "1/2a 2/2c "),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{{ 'warn' in labels.severity }}", True),
        ("{{ 'x' not in labels.severity and 1 < 2 < 3 }}", True),
        ("{{ labels.severity.split('n') | map('upper') | join('-') }}", "WAR-I-G"),
        ("{{ vars.groups | selectattr('n', 'gt', 1) | map(attribute='k') }}", ["b", "a"]),
        ("{{ vars.groups | map(attribute='k') | unique | list }}", ["a", "b"]),
        ("{{ [3, 1, 2] | sort | reverse | first }}", 3),
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ labels.severity[:4] }}", "warn"),
        ("{{ 7 is odd and 6 is divisibleby 3 }}", True),
        ("{{ 42.55 | round(1, 'floor') }}", 42.5),
        ("{% set x %}<{{ labels.severity }}>{% endset %}{{ x | upper }}", "<WARNING>"),
        ("{% with y = 2 %}{{ y * 3 }}{% endwith %}{% filter upper %}a{% endfilter %}", "6A"),
        ("{{ labels.nothing | default('d') if labels.nothing is not defined else 'x' }}", "d"),
        ("{{ '{{ 1 }}' }}", "{{ 1 }}"),
    ],
)
def test_jinja_features_work_unchanged(text: str, made: Any) -> None:
    """The bounds change nothing for a template that stays within them."""
    assert ValueTemplate(text, "with").render(SCOPE) == made


def test_nothing_is_evaluated_at_compilation() -> None:
    """A constant can take as long as any other expression."""
    tree = template_syntax.parse_template("{{ 20000000 | round(20000000, 'ceil') }}{{ 'x' * 100000000000 }}")
    template_syntax.compile_template(tree)
    tree = template_syntax.parse_template("{% set it = 9 ** 9 ** 9 %}{{ it + labels.a }}")
    assert template_syntax.free_names(tree) == {"labels"}


def test_a_slice_of_a_constant_writes_no_warning_to_standard_error(recwarn: pytest.WarningsRecorder) -> None:
    """Python's compiler would write one there; evaluating the slice is an error."""
    with pytest.raises(errors.ExpressionError, match="not subscriptable"):
        ValueTemplate("{{ 1[0:2] }}", "with").render(SCOPE)
    assert list(recwarn) == []


def test_a_bad_template_is_reported_at_its_place() -> None:
    """It is reported like every mistake of a playbook."""
    for text in ("{{ vars.x | round(precision=1, precision=2) }}", "{% for a in [] %}" * 25 + "{% endfor %}" * 25):
        (problem,) = problems_of(PLAYBOOK + f'  - {{approve: "{text}"}}\n')
        assert problem.startswith("9:15: approve: "), problem
