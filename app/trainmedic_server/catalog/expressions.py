"""Jinja2 expressions and templates: compiled when a playbook is loaded, evaluated on plain data.

The environment is sandboxed and strict: no globals, a fixed set of filters and tests, undefined
names and members are errors, and what a template makes is bounded. Values are data: nothing that
a template has produced is ever rendered again. The bounds are there for an author's slip; a
playbook itself is trusted.

Not here: which names exist where (``scope_check``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import jinja2
from jinja2 import nodes, sandbox
from jinja2.environment import TemplateExpression

from trainmedic_server import errors
from trainmedic_server.catalog.problems import did_you_mean, shown
from trainmedic_server.domain import duration

Scope = Mapping[str, Any]
T = TypeVar("T")

LONGEST_TEXT = 65_536
"""Characters that one template may make."""
_LONGEST_SEQUENCE = 100_000
_LARGEST_EXPONENT = 64

# fmt: off
_FILTERS = frozenset(
    {
        "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby",
        "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject",
        "rejectattr", "replace", "reverse", "round", "select", "selectattr", "slice", "sort",
        "string", "sum", "title", "trim", "truncate", "unique", "upper",
    }
)
# fmt: on
_GROWING = frozenset(
    {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill", "to_bytes"}
)
"""Methods of text and numbers whose result can be far larger than what they are given."""
_METHODS = frozenset({"get", "items", "keys", "values"})

_RUNTIME = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """Members of mappings come before their methods, so that a label called ``items`` can be read."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping):
            return self._member(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, Mapping) and isinstance(argument, str):
            return self._member(obj, argument)
        return super().getitem(obj, argument)

    def _member(self, obj: Mapping[str, Any], name: str) -> Any:
        if name in obj:
            return obj[name]
        if name in _METHODS:
            return getattr(obj, name)
        return self.undefined(hint=f"there is no {name!r} here{did_you_mean(name, map(str, obj))}")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _GROWING and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(right) > _LARGEST_EXPONENT or abs(left) > 1e6):
            raise jinja2.TemplateRuntimeError("the power is too large")
        if operator == "%" and isinstance(left, (str, bytes)):
            raise jinja2.TemplateRuntimeError("text is not formatted with %; use ~ to join")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and len(sequence) * count > _LONGEST_SEQUENCE:
                    raise jinja2.TemplateRuntimeError("the repeated text or list is too long")
        return super().call_binop(context, operator, left, right)


def _urlencode(value: Any) -> str:
    """Return one path segment or query value; everything that could end it is escaped, '/' too."""
    if isinstance(value, jinja2.Undefined):
        str(value)  # raises, as every use of something undefined does
    return quote(value if isinstance(value, str) else str(value), safe="")


def _tojson(value: Any) -> str:
    if isinstance(value, jinja2.Undefined):
        str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _duration(value: Any) -> str:
    """Seconds, as a Prometheus duration."""
    return duration.write(value if isinstance(value, timedelta) else timedelta(seconds=float(value)))


def _environment() -> _Environment:
    environment = _Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.globals.clear()
    environment.filters = {name: environment.filters[name] for name in _FILTERS}
    environment.filters.update(urlencode=_urlencode, tojson=_tojson, duration=_duration)
    environment.policies["truncate.leeway"] = 0
    return environment


ENVIRONMENT = _environment()


class Malformed(Exception):
    """A text is not an expression or template."""


def parse_expression(text: str) -> nodes.Template:
    """Return the syntax tree of an expression, as a template that outputs it. Raises Malformed."""
    if "{{" in text:
        raise Malformed(f"{shown(text)}: an expression is written without braces here")
    try:
        parser = jinja2.parser.Parser(ENVIRONMENT, text, state="variable")
        expression = parser.parse_expression()
        if not parser.stream.eos:
            raise Malformed(f"{shown(text)}: unexpected {shown(parser.stream.current.value)}")
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        raise Malformed(f"{shown(text)}: {_syntax(error)}") from None
    tree = nodes.Template([nodes.Output([expression], lineno=1)], lineno=1)
    tree.set_environment(ENVIRONMENT)
    _refuse_unknown(tree, text)
    return tree


def parse_template(text: str) -> nodes.Template:
    """Return the syntax tree of a template. Raises Malformed."""
    tree = _made(ENVIRONMENT.parse, text)
    _refuse_unknown(tree, text)
    return tree


def _made(make: Callable[[str], T], text: str) -> T:
    """Return what Jinja makes of `text`. Raises Malformed."""
    try:
        return make(text)
    except (jinja2.TemplateError, RecursionError) as error:
        raise Malformed(f"{shown(text)}: {_syntax(error)}") from None


def _refuse_unknown(tree: nodes.Template, text: str) -> None:
    """Refuse filters, tests and statements that there are not; Jinja itself finds some of them only when it runs."""
    for node in tree.find_all((nodes.Filter, nodes.Test, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        if not isinstance(node, (nodes.Filter, nodes.Test)):
            raise Malformed(f"{shown(text)}: {type(node).__name__.lower()} is not possible in a playbook")
        kind = "filter" if isinstance(node, nodes.Filter) else "test"
        available = ENVIRONMENT.filters if kind == "filter" else ENVIRONMENT.tests
        if node.name not in available:
            raise Malformed(f"{shown(text)}: there is no {kind} {node.name!r}{did_you_mean(node.name, available)}")


def is_template(value: Any) -> bool:
    return isinstance(value, str) and ("{{" in value or "{%" in value)


class Expression:
    """One compiled expression. `evaluate` returns its native value."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self._name = name
        compile_: Callable[[str], TemplateExpression] = partial(ENVIRONMENT.compile_expression, undefined_to_none=False)
        self._compiled = _made(compile_, text)

    def evaluate(self, scope: Scope) -> Any:
        """Raises ExpressionError."""

        def work() -> Any:
            value = self._compiled(scope)
            if isinstance(value, jinja2.Undefined):
                str(value)  # raises with the reason
            return value

        return _guarded(self._name, self.text, work)

    def holds(self, scope: Scope) -> bool:
        """Return whether the value is true. Raises ExpressionError."""
        return _guarded(self._name, self.text, lambda: bool(self._compiled(scope)))


class TextTemplate:
    """One compiled template that makes text."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self._name = name
        self._compiled: jinja2.Template = _made(ENVIRONMENT.from_string, text)

    def evaluate(self, scope: Scope) -> str:
        """Raises ExpressionError."""

        def work() -> str:
            pieces: list[str] = []
            length = 0
            for piece in self._compiled.generate(scope):
                length += len(piece)
                if length > LONGEST_TEXT:
                    raise jinja2.TemplateRuntimeError(f"it makes over {LONGEST_TEXT} characters")
                pieces.append(piece)
            return "".join(pieces)

        return _guarded(self._name, self.text, work)


def compile_text(text: str, name: str) -> Expression | TextTemplate:
    """Return a template. One that is exactly one ``{{ expression }}`` keeps the type of its value. Raises Malformed."""
    body = parse_template(text).body
    inner = _between_braces(text)
    is_single = len(body) == 1 and isinstance(body[0], nodes.Output) and len(body[0].nodes) == 1
    return Expression(inner, name) if is_single and inner is not None else TextTemplate(text, name)


def _between_braces(text: str) -> str | None:
    if not (text.startswith("{{") and text.endswith("}}")):
        return None
    return text[2:-2].removeprefix("-").removeprefix("+").removesuffix("-").removesuffix("+").strip()


class ValueTemplate:
    """Any value in which strings may be templates, at any depth; keys are never templates."""

    def __init__(self, value: Any, name: str) -> None:
        self._name = name
        self._made = self._compile(value)

    def render(self, scope: Scope) -> Any:
        """Return a new value with every template evaluated. Raises ExpressionError."""
        return _render(self._made, scope)

    def _compile(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._compile(each) for key, each in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [self._compile(each) for each in value]
        return compile_text(value, self._name) if is_template(value) else value


def _render(made: Any, scope: Scope) -> Any:
    if isinstance(made, dict):
        return {key: _render(each, scope) for key, each in made.items()}
    if isinstance(made, list):
        return [_render(each, scope) for each in made]
    return made.evaluate(scope) if isinstance(made, (Expression, TextTemplate)) else made


def _guarded(name: str, text: str, work: Callable[[], T]) -> T:
    """Run `work`; every error that an expression can cause becomes one that names it, without its data."""
    try:
        return work()
    except (jinja2.UndefinedError, jinja2.TemplateRuntimeError) as error:
        raise errors.ExpressionError(f"{name} {shown(text)}: {error.message}") from error
    except TypeError as error:
        raise errors.ExpressionError(f"{name} {shown(text)}: {error}") from error
    except _RUNTIME as error:
        raise errors.ExpressionError(f"{name} {shown(text)}: {type(error).__name__}") from error


def _syntax(error: Exception) -> str:
    return str(getattr(error, "message", "") or "too deeply nested")
