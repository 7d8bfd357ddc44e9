"""Check of ``runs.count`` in templates, whose windows must be constants."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from jinja2 import nodes

from trainmedic_core import duration
from trainmedic_core.expressions import names
from trainmedic_core.expressions.template_syntax import SyntaxTree
from trainmedic_core.problems import shown

_COUNT = ("runs", "count")
_EXAMPLE = 'write runs.count("1d")'


def windows(tree: SyntaxTree) -> tuple[Mapping[str, timedelta] | None, list[str]]:
    """Return the windows by their text, None without ``runs``, and all errors."""
    if not any(name.name == "runs" for name in tree.all_of(nodes.Name)):
        return None, []
    lengths: dict[str, timedelta] = {}
    wrong: list[str] = []
    counted = 0
    for call in tree.all_of(nodes.Call):
        if names.chain(call.node) != _COUNT:
            continue
        counted += 1
        window = _window(call)
        if isinstance(window, str):
            wrong.append(window)
        else:
            lengths[window[0]] = window[1]
    used = sum(parts == _COUNT for parts in names.chains(tree))
    if used > counted:
        wrong.append(f"runs.count is a function; {_EXAMPLE}")
    return lengths, wrong


def _window(call: nodes.Call) -> tuple[str, timedelta] | str:
    if len(call.args) != 1 or call.kwargs:
        return f"runs.count takes one time; {_EXAMPLE}"
    argument = call.args[0]
    if not isinstance(argument, nodes.Const):
        return f"runs.count takes a time that is written out; {_EXAMPLE}"
    if not isinstance(argument.value, str):
        return f"runs.count: {shown(argument.value)} is not a time in quotes with its unit; {_EXAMPLE}"
    try:
        window = duration.check_back(duration.parse(argument.value))
    except ValueError as error:
        return f"runs.count: {error}"
    return (argument.value, window) if window else f"runs.count: must be longer than 0s; {_EXAMPLE}"
