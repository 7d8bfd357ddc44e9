from __future__ import annotations

from collections.abc import Collection, Iterator

from jinja2 import nodes

from trainmedic_core.expressions import template_syntax
from trainmedic_core.expressions.template_syntax import SyntaxTree
from trainmedic_core.problems import did_you_mean


def unknown(tree: SyntaxTree, names: Collection[str]) -> list[str]:
    """Return an error for each unknown name. Raises Malformed."""
    return [unknown_name(name, names) for name in sorted(template_syntax.free_names(tree) - set(names))]


def unknown_name(name: str, names: Collection[str]) -> str:
    hint = did_you_mean(name, names) or f"; there are {', '.join(names)}"
    return f"there is no name {name!r} here{hint}"


def chains(tree: SyntaxTree) -> Iterator[tuple[str, ...]]:
    """Yield each ``name.member.member`` with constant members."""
    for node in tree.all_of((nodes.Getattr, nodes.Getitem)):
        parts = chain(node)
        if parts is not None:
            yield parts


def chain(node: nodes.Node) -> tuple[str, ...] | None:
    """Return None for other expressions than names with constant members."""
    if isinstance(node, nodes.Name):
        return (node.name,)
    inner = chain(node.node) if isinstance(node, (nodes.Getattr, nodes.Getitem)) else None
    if inner is None:
        return None
    if isinstance(node, nodes.Getattr):
        return (*inner, node.attr)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
        return (*inner, node.arg.value)
    return None


_COMPARISONS = {"gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "eq": "==", "ne": "!="}


def texts_compared_with_numbers(tree: SyntaxTree) -> Iterator[str]:
    for compare in tree.all_of(nodes.Compare):
        operands = [compare.expr, *(operand.expr for operand in compare.ops)]
        for left, operand, right in zip(operands, compare.ops, operands[1:], strict=False):
            sign = _COMPARISONS.get(operand.op)
            for text, number in ((left, right), (right, left)):
                parts = chain(text)
                if sign is None or parts is None or not _is_text(parts) or not _is_number(number):
                    continue
                name = ".".join(parts)
                yield f"{name} is text and is compared with a number by {sign}; write {name} | float"


def _is_text(parts: tuple[str, ...]) -> bool:
    # `labels.x` and `annotations.x`, alone or of `alert`.
    return parts[-2:-1] in (("labels",), ("annotations",)) and parts[:-2] in ((), ("alert",))


def _is_number(node: nodes.Node) -> bool:
    if isinstance(node, (nodes.Neg, nodes.Pos)):
        return _is_number(node.node)
    return isinstance(node, nodes.Const) and type(node.value) in (int, float)
