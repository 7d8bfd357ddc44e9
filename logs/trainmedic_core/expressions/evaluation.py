"""Expressions and templates: the part of Jinja2 that ``template_syntax`` accepts, in the ``sandbox``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jinja2

from trainmedic_core.errors import ExpressionError
from trainmedic_core.expressions import sandbox, template_syntax, work_meter
from trainmedic_core.expressions.template_syntax import SyntaxTree
from trainmedic_core.problems import cut, shown

Scope = Mapping[str, Any]
T = TypeVar("T")

_VARIABLE = re.compile(r"^\{\{[+-]? *vars\.(\w+) *[+-]?\}\}$")
LONGEST_TEXT = 65_536
"""Characters of a template's output."""


def is_template(value: Any) -> bool:
    return isinstance(value, str) and ("{{" in value or "{%" in value)


# `name` says in errors where an expression or template stands.
class Expression:
    def __init__(self, text: str, name: str, compiled: Callable[..., Any]) -> None:
        self.text = text
        self._name = name
        self._compiled = compiled

    def evaluate(self, scope: Scope) -> Any:
        """Raises ExpressionError."""

        def work(meter: work_meter.WorkMeter) -> Any:
            value = self._compiled(scope)
            if isinstance(value, jinja2.Undefined):
                str(value)  # raises, with the reason
            meter.weigh(value)
            if isinstance(value, str):
                _check_length(len(value))
            return value

        return _with_named_errors(self._name, self.text, work)

    def holds(self, scope: Scope) -> bool:
        """Raises ExpressionError."""
        return _with_named_errors(self._name, self.text, lambda _: bool(self._compiled(scope)))


class TextTemplate:
    def __init__(self, text: str, name: str, compiled: jinja2.Template) -> None:
        self.text = text
        self._name = name
        self._compiled = compiled

    def evaluate(self, scope: Scope) -> str:
        """Raises ExpressionError."""

        def work(_: work_meter.WorkMeter) -> str:
            pieces: list[str] = []
            length = 0
            for piece in self._compiled.generate(scope):
                length += len(piece)
                _check_length(length)
                pieces.append(piece)
            return "".join(pieces)

        return _with_named_errors(self._name, self.text, work)


def as_text(value: Any) -> str:
    """Write booleans as YAML does, and None as empty text."""
    return "" if value is None else sandbox.written(value)


def _check_length(length: int) -> None:
    if length > LONGEST_TEXT:
        raise jinja2.TemplateRuntimeError(f"it makes over {LONGEST_TEXT} characters")


def compile_expression(text: str, name: str) -> Expression:
    """Raises Malformed."""
    made = compile_parsed(template_syntax.parse_expression(text), name)
    assert isinstance(made, Expression)
    return made


def compile_text(text: str, name: str) -> Expression | TextTemplate:
    """Return an `Expression` for exactly one ``{{ expression }}``. Raises Malformed."""
    return compile_parsed(template_syntax.parse_template(text), name)


def compile_parsed(tree: SyntaxTree, name: str) -> Expression | TextTemplate:
    """As `compile_text`. The tree cannot be used again. Raises Malformed."""
    text = tree.text
    if tree.expression is None:
        return TextTemplate(text, name, template_syntax.compile_template(tree))
    compiled = template_syntax.compile_expression(tree, tree.expression)
    return Expression(text if tree.is_expression else text[2:-2].strip("+- "), name, compiled)


class ValueTemplate:
    """Value with templates in strings at any depth, except keys."""

    def __init__(self, value: Any, name: str, compiled: Mapping[str, Expression | TextTemplate] | None = None) -> None:
        """`compiled`: templates by text. Raises Malformed."""
        self._name = name
        self._made = self._compile(value, compiled or {})

    def render(self, scope: Scope) -> Any:
        """Evaluate within one work limit. Raises ExpressionError."""
        with work_meter.metered():
            return _render(self._made, scope)

    def _compile(self, value: Any, compiled: Mapping[str, Expression | TextTemplate]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._compile(each, compiled) for key, each in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [self._compile(each, compiled) for each in value]
        if not is_template(value):
            return value
        return compiled.get(value) or compile_text(value, self._name)


def _render(made: Any, scope: Scope) -> Any:
    if isinstance(made, dict):
        return {key: _render(each, scope) for key, each in made.items()}
    if isinstance(made, list):
        return [_render(each, scope) for each in made]
    return made.evaluate(scope) if isinstance(made, (Expression, TextTemplate)) else made


def with_variables(value: Any, variables: Mapping[str, Any]) -> Any:
    """Replace each text that is only ``{{ vars.name }}`` of a numeric variable by its number."""
    if isinstance(value, Mapping):
        return {key: with_variables(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [with_variables(each, variables) for each in value]
    match = _VARIABLE.match(value) if isinstance(value, str) else None
    number = variables.get(match[1]) if match else None
    return number if isinstance(number, (int, float)) else value


def _with_named_errors(name: str, text: str, work: Callable[[work_meter.WorkMeter], T]) -> T:
    """Raise `work`'s errors with the template's name; unexpected ones without text, which may hold data."""
    try:
        with work_meter.metered() as meter:
            return work(meter)
    except jinja2.TemplateRuntimeError as error:
        raise ExpressionError(f"{name} {shown(text)}: {cut(error.message or type(error).__name__)}") from error
    except TypeError as error:
        raise ExpressionError(f"{name} {shown(text)}: {cut(str(error))}") from error
    except Exception as error:  # any exception is the template's fault
        raise ExpressionError(f"{name} {shown(text)}: {type(error).__name__}") from error
