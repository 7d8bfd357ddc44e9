"""Expressions and templates: strict, bounded, and data stays data."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainmedic_core import errors
from trainmedic_core.expressions import template_syntax
from trainmedic_core.expressions.evaluation import ValueTemplate, compile_expression, compile_text
from trainmedic_core.expressions.template_syntax import Malformed

SCOPE: dict[str, Any] = {
    "labels": {"severity": "warning", "items": "label called items", "evil": "{{ vars.n }}"},
    "vars": {"n": 3, "xs": [1, 2]},
    "steps": {"cooled": {"status": "timed_out", "output": {"free": 0.5}}},
}


def render(value: Any) -> Any:
    return ValueTemplate(value, "with").render(SCOPE)


def test_a_single_expression_keeps_its_type() -> None:
    """Other templates produce text; a plain string is left unchanged."""
    given = {
        "count": "{{ vars.n }}",
        "text": "n is {{ vars.n }}",
        "list": ["{{ vars.xs }}", 7, None],
        "deep": {"a": [{"b": "{{ steps.cooled.output.free }}"}]},
        "plain": "100% {not} a template {# nor this",
    }
    assert render(given) == {
        "count": 3,
        "text": "n is 3",
        "list": [[1, 2], 7, None],
        "deep": {"a": [{"b": 0.5}]},
        "plain": "100% {not} a template {# nor this",
    }


def test_a_value_that_looks_like_a_template_is_not_rendered() -> None:
    """Alert values are data, alone and inside a text."""
    assert render("{{ labels.evil }}") == "{{ vars.n }}"
    assert render("<{{ labels.evil }}>") == "<{{ vars.n }}>"


def test_a_text_in_use_is_not_compiled_again() -> None:
    """Each user has its own name in errors; the same characters as an expression are compiled separately."""
    text = "{{ vars.n }} and {{ nothing }}"
    first, second = (template_syntax.compile_template(template_syntax.parse_template(text)) for _ in range(2))
    assert first is second
    for name in ("if of steps[0]", "message"):
        with pytest.raises(errors.ExpressionError, match=re.escape(f"{name} '{text}': 'nothing' is undefined")):
            compile_text(text, name).evaluate(SCOPE)
    assert (compile_text("vars.n", "with").evaluate(SCOPE), compile_expression("vars.n", "if").evaluate(SCOPE)) == (
        "vars.n",
        3,
    )


def test_members_take_precedence_over_methods() -> None:
    """A label may be called like a method of a mapping."""
    assert render("{{ labels.items }}") == "label called items"
    assert render("{% for k, v in vars.items() %}{{ k }} {% endfor %}") == "n xs "


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("labels.servity == 'x'", "there is no 'servity' here; did you mean 'severity'?"),
        ("nothing", "'nothing' is undefined"),
        ("not nothing", "'nothing' is undefined"),
        ("vars.n / 0", "ZeroDivisionError"),
        ("vars.n + labels.severity", "unsupported operand"),
        ("9 ** 9 ** 9", "too large"),
        ("'a' * 10 ** 9", "too long"),
        ("'%999999999d' % 1", "not formatted with %"),
        ("labels.severity.ljust(10 ** 9)", "unsafe"),
        ("''.__class__.__mro__", "unsafe"),
        ("vars.xs.append(1)", "unsafe"),
    ],
)
def test_errors_name_the_expression(text: str, told: str) -> None:
    """An undefined name is never quietly false, and no expression can exhaust the server."""
    with pytest.raises(errors.ExpressionError) as caught:
        compile_expression(text, "when").holds(SCOPE)
    assert told in str(caught.value)
    assert text[:20] in str(caught.value)


def test_checking_whether_something_is_defined_is_no_error() -> None:
    """The same holds for a default."""
    assert compile_expression("labels.team is not defined", "when").holds(SCOPE)
    assert compile_expression("labels.team | default('ml') == 'ml'", "when").holds(SCOPE)


def test_an_error_does_not_reveal_values() -> None:
    """A failed conversion does not put an alert's values into messages."""
    with pytest.raises(errors.ExpressionError) as caught:
        compile_expression("[labels.severity] | sum", "when").evaluate(SCOPE)
    assert "warning" not in str(caught.value)


def test_the_added_filters_work() -> None:
    """One path segment or query value; JSON; seconds as a duration."""
    assert render("{{ 'a/../b ä' | urlencode }}") == "a%2F..%2Fb%20%C3%A4"
    assert render("{{ {'a': '<1>'} | tojson }}") == '{"a": "<1>"}'
    assert render("{{ 5400 | duration }}") == "1h30m"


@pytest.mark.parametrize(
    "template",
    [
        "it is {{ 1 > 2 }}",
        "{{ 'it is ' ~ (1 > 2) }}",
        "{{ 'it is ' ~ (1 > 2) | string }}",
        "{{ ['it is', 1 > 2] | join(' ') }}",
        "{{ [{'a': 'it is'}, {'a': 1 > 2}] | join(' ', 'a') }}",
        "it is {{ (1 > 2) | urlencode }}",
        "it is {{ (1 > 2) | trim }}",
        "it is {{ (1 > 2) | replace('x', 'y') }}",
    ],
)
def test_a_boolean_becomes_text_as_in_yaml(template: str) -> None:
    assert render(template) == "it is false"


def test_an_endlessly_growing_text_is_stopped() -> None:
    """It ends with an error, not with a cut text."""
    with pytest.raises(errors.ExpressionError, match="over 65536"):
        render("{% for a in 'x' * 400 %}{% for b in 'x' * 400 %}{{ b }}{% endfor %}{% endfor %}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a b", "unexpected 'b'"),
        ("{{ a }}", "without braces"),
        ("a ==", "unexpected 'end"),
        ("a }", "unexpected '}'$"),
        ("(" * 600, "nested"),
    ],
)
def test_an_invalid_expression_is_rejected(text: str, told: str) -> None:
    """The error comes when the playbook is loaded."""
    with pytest.raises(Malformed, match=told):
        template_syntax.parse_expression(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{{ a", "unexpected end of template, expected '}}'"),
        ("{% if a", "unexpected end of template, expected '%}'"),
        ("{{ a } b", "unexpected '}'; '{{' is closed by '}}'"),
        ("{% include 'x' %}", "include is not possible"),
        ("{{ a | upcase }}", "no filter 'upcase'"),
        ("{% if a is definde %}{% endif %}", "no test 'definde'; did you mean 'defined'"),
    ],
)
def test_an_invalid_template_is_rejected(text: str, told: str) -> None:
    """The error comes when the playbook is loaded; unknown filters and tests count too."""
    with pytest.raises(Malformed) as caught:
        ValueTemplate(text, "with")
    assert told in str(caught.value)


def test_only_one_pair_of_braces_keeps_the_type() -> None:
    """The output of a statement is text, and braces in a string of an expression have no meaning."""
    assert render(["{{ 1 }}", "{% print 1 %}", "{{ 1 }}{{ 2 }}"]) == [1, "1", "12"]
    assert compile_expression("labels.severity != '{% x %}'", "when").holds(SCOPE)


def test_a_default_applies_to_missing_members_at_any_depth() -> None:
    """The first member that is missing is the reason where there is no default."""
    scope = {"gpu": {"name": "H100"}, "labels": {}}
    missing = "gpu.ecc.volatile['uncorrected']"
    assert compile_expression(f"{missing} | default(0)", "when").evaluate(scope) == 0
    assert not compile_expression(f"{missing} | default(0) > 0", "when").holds(scope)
    assert not compile_expression(f"{missing} is defined", "when").holds(scope)
    assert ValueTemplate("a{{ labels.a.b | default('x') }}", "text").render(scope) == "ax"
    for text in (f"{missing} > 0", missing, f"{missing} is none or {missing}", f"{missing}.get('a')", f"not {missing}"):
        with pytest.raises(errors.ExpressionError, match="there is no 'ecc' here"):
            compile_expression(text, "when").evaluate(scope)
