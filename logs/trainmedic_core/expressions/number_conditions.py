"""Fast path for conditions on numbers, such as ``fields.loss > 1e3``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import nodes

from trainmedic_core.expressions import template_syntax

Condition = Callable[[Mapping[str, Any]], bool | None]
"""Returns None if the sandbox must decide. Raises `MissingMember` where the sandbox would fail."""

_Value = Callable[[Mapping[str, Any]], Any]
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le, "gt": operator.gt, "gteq": operator.ge
}  # fmt: skip
_LARGEST = 1 << 63  # integers of this size or more are left to the sandbox


class MissingMember(Exception):
    """The mapping lacks a compared member."""


class _NotPlain(Exception):
    """Condition or operand is more than numbers."""


def number_condition(text: str, name: str, functions: Mapping[str, Callable[[Any], Any]]) -> Condition | None:
    """Compile an expression on the mapping `name`; None if it needs the sandbox. Raises Malformed."""
    match template_syntax.parse_expression(text).root.body:
        case [nodes.Output(nodes=[expression])]:
            try:
                return _answer(_Compiler(name, functions).compiled(expression))
            except _NotPlain:
                return None
    return None


def _answer(value: _Value) -> Condition:
    def condition(fields: Mapping[str, Any]) -> bool | None:
        try:
            return bool(value(fields))
        except MissingMember:
            raise
        except Exception:  # the sandbox reports the error, if there is one
            return None

    return condition


class _Compiler:
    def __init__(self, name: str, functions: Mapping[str, Callable[[Any], Any]]) -> None:
        self._name = name
        self._functions = functions

    def compiled(self, node: nodes.Node) -> _Value:
        match node:
            case nodes.Const(value=int() | float() as value):
                return lambda _: value
            case nodes.Not(node=inner):
                denied = self.compiled(inner)
                return lambda fields: not denied(fields)
            case nodes.And(left=left, right=right):
                first, second = self.compiled(left), self.compiled(right)
                return lambda fields: first(fields) and second(fields)
            case nodes.Or(left=left, right=right):
                first, second = self.compiled(left), self.compiled(right)
                return lambda fields: first(fields) or second(fields)
            case nodes.Compare(expr=left, ops=[nodes.Operand(op=sign, expr=right)]) if sign in _COMPARISONS:
                first, second, compared = self.compiled(left), self.compiled(right), _COMPARISONS[sign]
                return lambda fields: compared(first(fields), second(fields))
            case nodes.Call(node=nodes.Name(name=called), args=[argument], kwargs=[], dyn_args=None, dyn_kwargs=None):
                return self._call(called, self.compiled(argument))
        return self._member(node)

    def _call(self, name: str, argument: _Value) -> _Value:
        function = self._functions.get(name)
        if function is None:
            raise _NotPlain
        return lambda fields: function(argument(fields))

    def _member(self, node: nodes.Node) -> _Value:
        match node:
            case nodes.Getattr(node=nodes.Name(name=self._name), attr=member):
                return lambda fields: _required(fields, member)
            case nodes.Call(
                node=nodes.Getattr(node=nodes.Name(name=self._name), attr="get"),
                args=[nodes.Const(value=str() as member)],
                kwargs=[],
                dyn_args=None,
                dyn_kwargs=None,
            ):
                return lambda fields: _optional(fields, member)
        raise _NotPlain


def _required(fields: Mapping[str, Any], name: str) -> float:
    if name in fields:
        return _number(fields[name])
    raise _NotPlain if hasattr(fields, name) else MissingMember  # members take precedence over methods


def _optional(fields: Mapping[str, Any], name: str) -> Any:
    if "get" in fields:
        raise _NotPlain  # members take precedence over methods
    value = fields.get(name)
    return None if value is None else _number(value)


def _number(value: Any) -> float:
    if type(value) is float or (type(value) is int and -_LARGEST < value < _LARGEST):
        return value
    raise _NotPlain
