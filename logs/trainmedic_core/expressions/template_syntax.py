"""Syntax trees of expressions and templates that are safe to compile and run.

Unneeded constructs and overlong texts are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import jinja2
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from trainmedic_core.expressions import sandbox, work_meter
from trainmedic_core.expressions.sandbox import ENVIRONMENT
from trainmedic_core.problems import cut, did_you_mean, shown

T = TypeVar("T")
Found = TypeVar("Found", bound=nodes.Node)

LONGEST_TEMPLATE = 65_536
MOST_NODES = 5_000
"""Handwritten ones have tens."""
# Most levels of nesting, within the limits of Jinja and Python.
_DEEPEST = 100
_RESULT_NAME = "result"
_REFUSED_WORDS = {"callblock": "call", "scopedevalcontextmodifier": "autoescape", "evalcontextmodifier": "autoescape"}
_ALLOWED: tuple[type[nodes.Node], ...] = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.With, nodes.Assign,
    nodes.AssignBlock, nodes.FilterBlock, nodes.Name, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict,
    nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem,
    nodes.Getattr, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand, nodes.BinExpr, nodes.UnaryExpr,
)  # fmt: skip


class Malformed(Exception):
    """No valid expression or template."""


class SyntaxTree(NamedTuple):
    text: str
    root: nodes.Template
    every: Sequence[nodes.Node]  # all nodes
    is_expression: bool
    """True if read without braces."""

    @property
    def expression(self) -> nodes.Expr | None:
        match self.root.body:
            case [nodes.Output(nodes=[expression])] if not isinstance(expression, nodes.TemplateData):
                is_in_braces = self.text.startswith("{{") and self.text.endswith("}}")
                return expression if self.is_expression or is_in_braces else None
        return None

    def all_of(self, kind: type[Found] | tuple[type[Found], ...]) -> Iterator[Found]:
        return (node for node in self.every if isinstance(node, kind))


def parse_expression(text: str) -> SyntaxTree:
    """Raises Malformed."""
    return _checked(text, _expression, is_expression=True)


def parse_template(text: str) -> SyntaxTree:
    """Raises Malformed."""
    return _checked(text, ENVIRONMENT.parse, is_expression=False)


# Shared, because playbooks repeat texts.
_TEMPLATES: WeakValueDictionary[tuple[str, bool], jinja2.Template] = WeakValueDictionary()


def compile_expression(tree: SyntaxTree, expression: nodes.Expr) -> Callable[..., Any]:
    """Return a function of a scope. The tree cannot be used again. Raises Malformed."""
    assignment = nodes.Assign(nodes.Name(_RESULT_NAME, "store", lineno=1), expression, lineno=1)
    compiled = _compiled(tree, _template([assignment]))
    return jinja2.environment.TemplateExpression(compiled, undefined_to_none=False)


def compile_template(tree: SyntaxTree) -> jinja2.Template:
    """The tree cannot be used again. Raises Malformed."""
    return _compiled(tree, tree.root)


def free_names(tree: SyntaxTree) -> set[str]:
    """Return the names used without being set. Raises Malformed."""
    names = list(tree.all_of(nodes.Name))
    if all(name.ctx == "load" for name in names):
        return {name.name for name in names}
    finder = _NameFinder(ENVIRONMENT)
    _or_malformed(lambda: finder.visit(tree.root), tree.text)
    return finder.undeclared_identifiers


def _expression(text: str) -> nodes.Template:
    if "{{" in text:
        raise Malformed(f"{shown(text)}: an expression is written without braces here")
    parser = Parser(ENVIRONMENT, text, state="variable")
    expression = parser.parse_expression()
    if not parser.stream.eos:
        sign = str(parser.stream.current.value)
        raise Malformed(f"{shown(text)}: unexpected {shown(sign)}{_HINTS_BY_SIGN.get(sign, '')}")
    return _template([nodes.Output([expression], lineno=1)])


def _template(body: list[nodes.Node]) -> nodes.Template:
    return nodes.Template(body, lineno=1)


def _checked(text: str, parse: Callable[[str], nodes.Template], *, is_expression: bool) -> SyntaxTree:
    if len(text) > LONGEST_TEMPLATE:
        raise Malformed(f"a template has at most {LONGEST_TEMPLATE} characters")
    root = _or_malformed(lambda: parse(text), text)
    every = _all_nodes(root, text)
    for node in every:
        wrong = _fault_of(node)
        if wrong is not None:
            raise Malformed(f"{shown(text)}: {wrong}")
    return SyntaxTree(text, root, every, is_expression)


def _compiled(tree: SyntaxTree, root: nodes.Template) -> jinja2.Template:
    def compile_root() -> jinja2.Template:
        metered = _Metering().visit(root)
        metered.set_environment(ENVIRONMENT)
        return ENVIRONMENT.from_string(metered)

    # The key suffices, because `SyntaxTree.expression` decides between expression and template by it alone.
    key = (tree.text, tree.is_expression)
    compiled = _TEMPLATES.get(key)
    if compiled is None:
        compiled = _TEMPLATES[key] = _or_malformed(compile_root, tree.text)
    return compiled


def _or_malformed(make: Callable[[], T], text: str) -> T:
    try:
        return make()
    except Malformed:
        raise
    except RecursionError:
        raise Malformed(f"{shown(text)}: too deeply nested") from None
    except Exception as error:  # any exception of Jinja or Python is the text's fault
        raise Malformed(f"{shown(text)}: {_reason(error, text)}") from None


_HINTS_BY_SIGN = {
    "=": "; two values are compared with ==",
    "&&": "; write 'and'",
    "||": "; write 'or'",
    "!": "; write 'not', or != between two values",
    "$": "; names have no $ here: labels.gpu",
}


def _suggestion(name: str, names: Sequence[str]) -> str:
    return did_you_mean(name, names) or f"; there are {', '.join(sorted(names))}"


# Jinja's terms.
_JINJA_TERMS = {"'end of print statement'": "'}}'", "'end of statement block'": "'%}'"}
_CLOSED_BY = "; '{{' is closed by '}}', and '{%' by '%}'"


def _reason(error: Exception, text: str) -> str:
    words = error.msg if isinstance(error, SyntaxError) else str(getattr(error, "message", None) or error)
    if words == "unexpected '}'" and ("{{" in text or "{%" in text):  # in an expression it is a surplus brace
        return words + _CLOSED_BY
    for end, written in _JINJA_TERMS.items():
        words = words.replace(end, written)
    hint = next((hint for sign, hint in _HINTS_BY_SIGN.items() if words.endswith(f"got {sign[0]!r}")), "")
    hint = hint or next((hint for sign, hint in _HINTS_BY_SIGN.items() if f"unexpected char {sign[0]!r}" in words), "")
    return (cut(words) or type(error).__name__) + hint


def _all_nodes(root: nodes.Node, text: str) -> list[nodes.Node]:
    """Return all nodes. Raises Malformed if they are too many or too deep."""
    every: list[nodes.Node] = []
    left = [(root, 1)]
    while left:
        node, depth = left.pop()
        every.append(node)
        if len(every) + len(left) > MOST_NODES:
            raise Malformed(f"{shown(text)}: it has over {MOST_NODES} parts")
        if depth > _DEEPEST:
            raise Malformed(f"{shown(text)}: too deeply nested")
        left.extend((child, depth + 1) for child in reversed(list(node.iter_child_nodes())))
    return every


def _fault_of(node: nodes.Node) -> str | None:
    if not isinstance(node, _ALLOWED) or (isinstance(node, nodes.For) and node.recursive):
        word = "a recursive loop" if isinstance(node, nodes.For) else type(node).__name__.lower()
        return f"{_REFUSED_WORDS.get(word, word)} is not possible in a playbook"
    if isinstance(node, nodes.Filter) and node.name not in sandbox.FILTERS:
        return f"there is no filter {node.name!r}{_suggestion(node.name, sandbox.FILTERS)}"
    if isinstance(node, nodes.Test) and node.name not in sandbox.TESTS:
        return f"there is no test {node.name!r}{_suggestion(node.name, sandbox.TESTS)}"
    number = node.value if isinstance(node, nodes.Const) else None
    if isinstance(number, int) and number.bit_length() > work_meter.LARGEST_NUMBER_BITS:
        return "a number is too long"
    if isinstance(node, nodes.Compare) and len(node.ops) > 1 and any(each.op in ("in", "notin") for each in node.ops):
        return "'in' cannot be chained with another comparison; put 'and' between them"
    return None


# Inserts filters of the `sandbox` that count the work of loops, comparisons and hashes.
class _Metering(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        texts = sum(len(each.data) // 64 for each in node.find_all(nodes.TemplateData))
        # Most nodes take far less than a step; the others count themselves.
        steps = 1 + (_node_count(node) - _node_count(node.iter)) // 4 + texts
        self.generic_visit(node)
        node.iter = _with_filter(sandbox.LOOP, node.iter, nodes.Const(steps, lineno=node.lineno))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if node.ops[0].op in ("in", "notin"):
            test = nodes.Test(node.expr, "in", [node.ops[0].expr], [], None, None, lineno=node.lineno)
            return test if node.ops[0].op == "in" else nodes.Not(test, lineno=node.lineno)
        node.expr = _with_weight(node.expr)
        for operand in node.ops:
            operand.expr = _with_weight(operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _with_filter(sandbox.CONCATENATE, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _with_weight(node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        # Jinja leaves slices to Python, whose compiler warns on standard error about slices of constants.
        node.node = _with_filter(sandbox.WEIGH, node.node)
        return node


def _node_count(tree: nodes.Node) -> int:
    return 1 + sum(1 for _ in tree.find_all(nodes.Node))


def _with_weight(expression: nodes.Expr) -> nodes.Expr:
    return expression if isinstance(expression, nodes.Const) else _with_filter(sandbox.WEIGH, expression)


def _with_filter(name: str, expression: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(expression, name, list(args), [], None, None, lineno=expression.lineno)


class _NameFinder(meta.TrackingCodeGenerator):
    """Like Jinja's `meta.find_undeclared_variables`, but evaluates no constants."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.optimizer = None
