"""Figures of the product's tree: its size, its names, its cycles, its broad excepts.

    python -m tests.architecture.tree_figures [CHECKOUT]

prints those of this checkout, or of another one, so that two can be compared. `test_names` holds this one to bounds.
"""

from __future__ import annotations

import ast
import graphlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

VAGUE = frozenset(
    {"one", "ones", "found", "told", "known", "wanted", "said", "seen", "given", "stuff", "thing", "things"}
)
"""Names of variables that leave their reader to guess what they hold."""
LONGEST_FUNCTION = 80
LONGEST_FILE = 600


@dataclass(frozen=True)
class Module:
    """One file of the product. ``name`` is how it is imported."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def code_lines(self) -> int:
        """Lines with code on them: no blank line, comment or text that stands alone, such as a docstring."""
        texts = {
            line
            for node in self.nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        numbered = enumerate(self.text.splitlines(), 1)
        return sum(1 for number, line in numbered if number not in texts and line.strip()[:1] not in ("", "#"))


class TreeFigures:
    """The server and the SDK of a checkout, without the migrations, which stay as they were written."""

    def __init__(self, root: Path, folders: Sequence[str] = ("app", "agent", "logs", "sdk")) -> None:
        self.modules = [
            Module(path.relative_to(root), _dotted(path, root), text, ast.parse(text))
            for folder in folders
            for path in sorted((root / folder).rglob("*.py"))
            if not {"versions", "build", ".venv"} & set(path.parts)
            for text in (path.read_text(encoding="utf-8"),)
        ]

    def shared_class_names(self) -> dict[str, list[str]]:
        """Public class names that stand for several classes, and the files of each."""
        places: dict[str, list[str]] = {}
        for module in self.modules:
            for node in module.nodes:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(module.path))
        return {name: files for name, files in places.items() if len(files) > 1}

    def overridden_private_methods(self, package: str) -> list[str]:
        """Private methods of a class in ``package`` that a class of another of its modules overrides.

        Bases are looked up by their names, so of a shared class name each class counts.
        """
        classes: Classes = {}
        for module in self.modules:
            for node in module.nodes if module.name.partition(".")[0] == package else ():
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, []).append((module, node))
        return sorted(
            f"{module.name}.{node.name}.{method} of {owner.name}.{base.name}"
            for places in classes.values()
            for module, node in places
            for owner, base in _ancestors(node, classes)
            if owner is not module
            for method in _private_methods(node) & _private_methods(base)
        )

    def variables(self) -> list[str]:
        """The names of all parameters and assigned variables."""
        return [name for module in self.modules for name in _variables(module)]

    def long_functions(self) -> list[str]:
        return [
            f"{module.path}:{node.lineno} {node.name}"
            for module in self.modules
            for node in module.nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and (node.end_lineno or node.lineno) - node.lineno + 1 > LONGEST_FUNCTION
        ]

    def long_files(self) -> list[str]:
        return [f"{module.path}: {module.lines}" for module in self.modules if module.lines > LONGEST_FILE]

    def broad_excepts(self) -> tuple[list[str], list[str]]:
        """Those that raise again, or have a comment beside them that gives the reason; and those without either."""
        reasoned, bare = [], []
        for module in self.modules:
            lines = module.text.splitlines()
            for node in module.nodes:
                if isinstance(node, ast.ExceptHandler) and _is_broad(node):
                    near = lines[node.lineno - 2 : node.lineno + 1]
                    is_reasoned = _raises_again(node) or any("#" in line for line in near)
                    (reasoned if is_reasoned else bare).append(f"{module.path}:{node.lineno}")
        return reasoned, bare

    def cycle(self) -> list[str]:
        """Modules that import each other in a ring, for type checkers only included; none where there is no ring."""
        names = {module.name for module in self.modules}
        graph = {module.name: _imported(module, names) for module in self.modules}
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            return list(error.args[1])
        return []


def _dotted(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    start = next(
        index for index, _ in enumerate(parts) if (root.joinpath(*parts[: index + 1]) / "__init__.py").exists()
    )
    parts = parts[start:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


Classes = dict[str, list[tuple[Module, ast.ClassDef]]]
"""The classes of a package by their names, each with its module."""


def _ancestors(node: ast.ClassDef, classes: Classes) -> Iterator[tuple[Module, ast.ClassDef]]:
    for expression in node.bases:
        named = expression.value if isinstance(expression, ast.Subscript) else expression
        name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
        for module, base in classes.get(name, ()):
            if base is not node:
                yield module, base
                yield from _ancestors(base, classes)


def _private_methods(node: ast.ClassDef) -> set[str]:
    methods = {member.name for member in node.body if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return {name for name in methods if name.startswith("_") and not name.endswith("__")}


def _variables(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or getattr(handler.type, "id", "") in ("Exception", "BaseException")


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _imported(module: Module, names: set[str]) -> set[str]:
    """The modules that it imports at its top level. A package whose name alone is used does not count its members."""
    targets: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            targets |= members & names or {node.module}
    # A package's __init__ may import its members, and they its other members.
    return {target for target in targets & names if target != module.name}


def report(figures: TreeFigures) -> str:
    """All figures, one a line."""
    lines = [module.lines for module in figures.modules]
    names = figures.variables()
    vague = sum(name in VAGUE for name in names)
    reasoned, bare = figures.broad_excepts()
    longest = max(figures.modules, key=lambda module: module.lines)
    ring = figures.cycle()
    return "\n".join(
        (
            f"files: {len(lines)}",
            f"lines: {sum(lines)}, of them code: {sum(module.code_lines for module in figures.modules)}",
            f"median file: {statistics.median(lines):g} lines",
            f"longest file: {longest.lines} lines ({longest.path})",
            f"files over {LONGEST_FILE} lines: {len(figures.long_files())}",
            f"functions over {LONGEST_FUNCTION} lines: {len(figures.long_functions())}",
            f"import cycle: {' -> '.join(ring) if ring else 'none'}",
            f"class names of several classes: {len(figures.shared_class_names())}",
            f"vague names: {vague} of {len(names)} ({vague / len(names):.2%})",
            f"broad excepts: {(len(reasoned) + len(bare)) / sum(lines) * 1000:.2f} in 1000 lines; "
            f"{len(reasoned)} of {len(reasoned) + len(bare)} raise again or have a reason beside them",
        )
    )


if __name__ == "__main__":
    print(report(TreeFigures(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]).resolve())))
