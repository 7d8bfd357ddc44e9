"""Check of types in conditions and templates: what is never or always true is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import nodes

from trainmedic_core.expressions import names
from trainmedic_core.expressions.template_syntax import SyntaxTree
from trainmedic_core.problems import did_you_mean
from trainmedic_server.domain.value_types import ANY, BOOLEAN, NUMBER, TEXT, Each, Shape, member

METHODS = ("get", "items", "keys", "values")  # of mappings; not reported as unknown members

_SIGNS = {"gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "eq": "==", "ne": "!="}
_ORDERS = ("gt", "gteq", "lt", "lteq")
_FILTERS: Mapping[str, Shape] = {
    **dict.fromkeys(("abs", "count", "float", "int", "length", "number", "round", "sum", "time"), NUMBER),
    **dict.fromkeys(("capitalize", "join", "lower", "string", "title", "tojson", "trim", "upper"), TEXT),
}
# Without + and *, which also take text.
_ARITHMETIC = {nodes.Sub: "-", nodes.Div: "/", nodes.FloorDiv: "//", nodes.Pow: "**"}
_FALSE_WORDS = ("false", "no", "off")


def check(tree: SyntaxTree, scope: Mapping[str, Shape]) -> Iterator[str]:
    """Yield the errors, each with what to write. `scope` has the shapes of the visible names."""
    # A template may assign a value to a name.
    assigned = {name.name for name in tree.all_of(nodes.Name) if name.ctx != "load"}
    checking = _Checking({name: shape for name, shape in scope.items() if name not in assigned})
    for node in tree.all_of((nodes.Getattr, nodes.Getitem)):
        yield from checking.unknown_output(node)
        yield from checking.member_of_list(node)
    for compare in tree.all_of(nodes.Compare):
        operands = [compare.expr, *(operand.expr for operand in compare.ops)]
        for left, operand, right in zip(operands, compare.ops, operands[1:], strict=False):
            if operand.op in ("in", "notin"):
                yield from checking.membership(left, right)
            else:
                yield from checking.comparison(left, operand.op, right)
    for kind, sign in _ARITHMETIC.items():
        for calculation in tree.all_of(kind):
            for text, number in ((calculation.left, calculation.right), (calculation.right, calculation.left)):
                if checking.shape_of(text) is TEXT and checking.shape_of(number) is NUMBER:
                    yield f"{_source_of(text)} is text, and a number is calculated by {sign}; write {_as_number(text)}"
    for condition in _conditions(tree):
        yield from checking.truth(condition)


def is_list(tree: SyntaxTree, scope: Mapping[str, Shape]) -> bool:
    shape = _Checking(scope).shape_of(tree.expression) if tree.expression is not None else ANY
    return isinstance(shape, Each) and shape.is_list


class _Checking:
    def __init__(self, scope: Mapping[str, Shape]) -> None:
        self._scope = scope

    def shape_of(self, node: nodes.Node) -> Shape:
        match node:
            case nodes.Name(name=name):
                return self._scope.get(name, ANY)
            case nodes.Const(value=value):
                return _shape_of_constant(value)
            case nodes.Getattr(node=inner, attr=name):
                return self._member(inner, name)
            case nodes.Getitem(node=inner, arg=nodes.Const(value=str() as name)):
                return self._member(inner, name)
            case nodes.Getitem(node=inner, arg=nodes.Const(value=int())):
                owner = self.shape_of(inner)
                return owner.value if isinstance(owner, Each) else ANY
            case nodes.Filter(name="default" | "d", node=nodes.Node() as inner, args=[other, *_]):
                shape = self.shape_of(inner)
                return shape if shape is self.shape_of(other) else ANY
            case nodes.Filter(name="duration", node=nodes.Node() as inner):
                return self._of_duration(inner)
            case nodes.Filter(name=name):
                return _FILTERS.get(name, ANY)
            case nodes.Concat():
                return TEXT
            case nodes.Compare() | nodes.Test() | nodes.Not():
                return BOOLEAN
            case nodes.Neg(node=inner) | nodes.Pos(node=inner):
                return self.shape_of(inner)
            case nodes.BinExpr(left=left, right=right) if not isinstance(node, (nodes.And, nodes.Or)):
                return NUMBER if self.shape_of(left) is self.shape_of(right) is NUMBER else ANY
            case nodes.CondExpr(expr1=first, expr2=nodes.Node() as second):
                shape = self.shape_of(first)
                return shape if shape is self.shape_of(second) else ANY
        return ANY

    def _of_duration(self, inner: nodes.Node) -> Shape:
        """``duration`` makes a text of seconds, and seconds of a text such as 10m."""
        if isinstance(inner, nodes.Const) and isinstance(inner.value, str):
            return ANY if _is_numeric_text(inner.value) else NUMBER
        return TEXT if self.shape_of(inner) is NUMBER else ANY

    def _member(self, inner: nodes.Node, name: str) -> Shape:
        owner = self.shape_of(inner)
        if isinstance(owner, Each) and name in METHODS:
            return ANY
        return member(owner, name)

    def unknown_output(self, node: nodes.Node) -> Iterator[str]:
        owner, name = _owner_and_name(node)
        if owner is None or not _is_of_output(owner):
            return
        shape, parts = self.shape_of(owner), _source_of(owner)
        if shape is NUMBER or shape is BOOLEAN:
            yield f"{parts} has no {name!r}: it is {shape}"
        if not isinstance(shape, Mapping) or name in shape or name in METHODS or not shape:
            return
        chain = names.chain(owner)
        if chain is not None and len(chain) == 3:
            parts = f"the output of step {chain[1]!r}"
        yield f"{parts} has no {name!r}{did_you_mean(name, shape) or _hint_elsewhere(shape, name)}"

    def member_of_list(self, node: nodes.Node) -> Iterator[str]:
        owner, name = _owner_and_name(node)
        shape = self.shape_of(owner) if owner is not None else ANY
        if owner is not None and isinstance(shape, Each) and shape.is_list:
            listed = _source_of(owner)
            yield f"{listed} is a list and has no {name!r}; write {listed}[0], or {listed} | join(', ')"

    def comparison(self, left: nodes.Node, sign: str, right: nodes.Node) -> Iterator[str]:
        written = _SIGNS[sign]
        for one, other in ((left, right), (right, left)):
            kind, other_shape = self.shape_of(one), self.shape_of(other)
            if self._is_text_by_default(one) and other_shape is NUMBER and sign in _ORDERS:
                yield f"{_source_of(one)} can be text and is compared with a number by {written}; add | number"
            elif kind is TEXT and other_shape is NUMBER:
                if isinstance(one, nodes.Const):
                    yield (
                        f"{_source_of(other)} is a number and is compared with the text {one.value!r} by {written}; "
                        f"write the number without quotes"
                    )
                else:
                    yield (
                        f"{_source_of(one)} is text and is compared with a number by {written}; write {_as_number(one)}"
                    )
            elif kind is TEXT and other_shape is BOOLEAN and isinstance(other, nodes.Const):
                word = str(other.value).lower()
                source = _source_of(one)
                yield f'{source} is text and is compared with {word}; write {source} {written} "{word}"'
        if sign in _ORDERS and self.shape_of(left) is self.shape_of(right) is TEXT:
            for text, number in ((left, right), (right, left)):
                if isinstance(number, nodes.Const) and _is_numeric_text(number.value):
                    yield (
                        f"{_source_of(text)} and {number.value!r} are compared as texts, character by character; "
                        f"write {_as_number(text)} {written} {number.value}"
                    )

    def membership(self, left: nodes.Node, right: nodes.Node) -> Iterator[str]:
        if isinstance(right, nodes.Const) and isinstance(right.value, str) and self.shape_of(left) is TEXT:
            if isinstance(left, nodes.Const):
                return
            words = [word for word in right.value.replace("|", " ").replace(",", " ").split() if word]
            listed = ", ".join(f'"{word}"' for word in words)
            yield (
                f"{_source_of(left)} in {right.value!r} compares with parts of that text; "
                f"write {_source_of(left)} in [{listed}]"
            )
        if self.shape_of(left) is NUMBER and self.shape_of(right) is TEXT:
            yield f"{_source_of(left)} is a number and {_source_of(right)} is text; write {_source_of(left)} | string"
        items = right.items if isinstance(right, (nodes.List, nodes.Tuple)) else []
        if items and self.shape_of(left) is TEXT and all(self.shape_of(item) is NUMBER for item in items):
            yield f"{_source_of(left)} is text and the list has numbers; put them in quotes"

    def truth(self, node: nodes.Node) -> Iterator[str]:
        parts = names.chain(node)
        if isinstance(node, nodes.Const) and isinstance(node.value, str) and node.value:
            yield (
                f"the text {node.value!r} alone is always true; compare with each value, "
                f'such as labels.severity in ["warning", "critical"]'
            )
        if parts is None:
            return
        if parts[0] == "steps" and (len(parts) == 2 or (len(parts) == 3 and parts[2] == "status")):
            yield f'{".".join(parts)} alone is always true; write steps.{parts[1]}.status == "succeeded"'
        elif parts in (("alert",), ("alerts",), ("labels",), ("target",), ("run",), ("steps",)):
            yield f"{parts[0]} alone is always true; name a member of it, such as {parts[0]}.{_EXAMPLES[parts[0]]}"

    def _is_text_by_default(self, node: nodes.Node) -> bool:
        match node:
            case nodes.Filter(name="default" | "d", node=nodes.Node() as inner, args=[other, *_]):
                return self.shape_of(inner) is TEXT and self.shape_of(other) is NUMBER
        return False


_EXAMPLES = {
    "alert": "name",
    "alerts": "0",
    "labels": "severity",
    "target": "node",
    "run": "mode",
    "steps": "<id>.status",
}


def always_true(name: str, value: Any) -> str | None:  # the error, if the variable alone is a condition
    if isinstance(value, str) and value.lower() in _FALSE_WORDS:
        return f"vars.{name} is the text {value!r}, which counts as true; write {name}: false"
    return None


def bare_variables(tree: SyntaxTree) -> Iterator[str]:  # that are a condition alone
    for node in _conditions(tree):
        parts = names.chain(node)
        if parts is not None and len(parts) == 2 and parts[0] == "vars":
            yield parts[1]


def _conditions(tree: SyntaxTree) -> Iterator[nodes.Node]:
    roots: list[nodes.Node] = [tree.expression] if tree.is_expression and tree.expression is not None else []
    roots += [node.test for node in tree.all_of(nodes.If)]
    roots += [node.test for node in tree.all_of(nodes.CondExpr)]
    while roots:
        node = roots.pop()
        if isinstance(node, (nodes.And, nodes.Or)):
            roots += [node.right, node.left]
        elif isinstance(node, nodes.Not):
            roots.append(node.node)
        else:
            yield node


def _owner_and_name(node: nodes.Node) -> tuple[nodes.Node | None, str]:
    match node:
        case nodes.Getattr(node=owner, attr=name):
            return owner, name
        case nodes.Getitem(node=owner, arg=nodes.Const(value=str() as name)):
            return owner, name
    return None, ""


def _is_of_output(node: nodes.Node) -> bool:
    while isinstance(node, (nodes.Getattr, nodes.Getitem)):
        parts = names.chain(node)
        if parts is not None:
            return parts[0] == "output" or (parts[0] == "steps" and len(parts) > 2 and parts[2] == "output")
        node = node.node
    return isinstance(node, nodes.Name) and node.name == "output"


def _hint_elsewhere(shape: Mapping[str, Shape], name: str) -> str:
    for key, inner in shape.items():
        if isinstance(inner, Mapping) and name in inner:
            return f"; did you mean '{key}.{name}'?"
    return f"; there are {', '.join(shape)}"


def _shape_of_constant(value: Any) -> Shape:
    leaves: tuple[tuple[type, Shape], ...] = ((bool, BOOLEAN), (int, NUMBER), (float, NUMBER), (str, TEXT))
    return next((shape for kind, shape in leaves if isinstance(value, kind)), ANY)


def _source_of(node: nodes.Node) -> str:
    match node:
        case nodes.Name(name=name):
            return name
        case nodes.Const(value=value):
            return repr(value)
        case nodes.Getattr(node=owner, attr=name):
            return f"{_source_of(owner)}.{name}"
        case nodes.Getitem(node=owner, arg=nodes.Const(value=value)):
            return f"{_source_of(owner)}[{value!r}]"
        case nodes.Filter(node=nodes.Node() as inner, name=name):
            return f"{_source_of(inner)} | {name}"
    return "this"


def _as_number(node: nodes.Node) -> str:
    return f"{_source_of(node)} | number"


def _is_numeric_text(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return isinstance(value, str)
