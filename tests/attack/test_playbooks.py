"""Playbooks, templates and patterns drawn at random, and written to do harm: each gives problems with their place,
within bounds of time and memory, and nothing else.

The bounds of time are on the processor time of this thread, so that a loaded machine breaks none of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.attack.effort import random_source, trials
from trainmedic_core import errors
from trainmedic_core.expressions.evaluation import ValueTemplate
from trainmedic_core.expressions.regexes import Pattern, ValueTooLong
from trainmedic_core.expressions.template_syntax import Malformed
from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.library import Library
from trainmedic_server.simulation import suite_format

T = TypeVar("T")
ACTIONS = registry.specs_only()
SHIPPED = Path(__file__).parents[2] / "playbooks"

EVALUATION_SECONDS = 1.0
"""Of processor time; on an idle machine the worst take a twentieth of it."""
COMPILATION_SECONDS = 5.0
FILE_SECONDS = 20.0
MATCH_SECONDS = 1.0
MEMORY_MIB = 400
"""By which the process may grow in a test."""

SCOPE: dict[str, Any] = {
    "labels": {"severity": "warning", "long": "ab " * 20_000, "same": "a" * 2_500, "half": "a" * 1_250},
    "annotations": {f"a{number}": "x" for number in range(1_000)},
    "alerts": [{"name": "A", "labels": {"gpu": str(number)}} for number in range(2_000)],
    "vars": {"n": 3, "f": 1.5, "xs": list(range(20_000)), "big": 10**300, "none": None},
}
# fmt: off
ATOMS = (
    "labels.severity", "labels.long", "labels.same", "labels.half", "labels", "labels.items()", "annotations",
    "alerts", "vars.n", "vars.f", "vars.xs", "vars.big", "vars.none", "labels.missing", "nothing", "0", "-1", "7",
    "1e308", "1e-9", "1000000000", "99999999999999999999", "true", "none", "'a'", "''", "'%1000000000d'",
    "'{:>1000000000}'", "'\\ud800'", "[]", "{}", "()", "[1,2]", "{'a':1}", "(1,)", "'ab", "'", "loop", "loop.index",
    "a",
)
FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "join",
    "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round",
    "select", "selectattr", "slice", "sort", "string", "sum", "title", "trim", "truncate", "unique", "upper",
    "urlencode", "tojson", "duration", "center", "indent", "format", "batch", "pprint", "upcase",
)
TESTS = (
    "odd", "even", "divisibleby", "defined", "undefined", "none", "string", "number", "in", "eq", "lt", "sameas",
    "lower", "iterable", "mapping", "filter",
)
METHODS = (
    "upper", "split", "join", "replace", "strip", "rfind", "rsplit", "count", "find", "format", "format_map",
    "ljust", "zfill", "center", "expandtabs", "translate", "encode", "items", "keys", "get", "values", "index",
    "append", "__class__", "bit_length", "to_bytes", "mro", "cycle", "startswith",
)
# fmt: on
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">=", "in", "and", "or", "not in", "is"]
STATEMENTS = (
    "{% for a in X %}Y{% endfor %}",
    "{% for a in X if X %}Y{{ loop.length }}{% else %}Y{% endfor %}",
    "{% for a, b in X %}Y{% endfor %}",
    "{% for a in X recursive %}{{ loop(X) }}{% endfor %}",
    "{% if X %}Y{% elif X %}Y{% else %}Y{% endif %}",
    "{% set a = X %}Y",
    "{% set a %}Y{% endset %}{{ a }}",
    "{% set a = [a, a] %}{% set a = [a, a] %}{% set a = [a, a] %}{% set a = [a, a] %}{{ a }}",
    "{% with a = X %}Y{% endwith %}",
    "{% filter upper %}Y{% endfilter %}",
    "{% macro f() %}Y{{ f() }}{% endmacro %}{{ f() }}",
    "{% call X %}Y{% endcall %}",
    "{% block b %}Y{% endblock %}",
    "{% raw %}Y{% endraw %}",
    "{# Y #}",
    "{% include X %}",
    "{% extends X %}",
    "{% autoescape X %}Y{% endautoescape %}",
)


def within(seconds: float, what: str, work: Callable[[], T]) -> T:
    """Return what `work` returns. Fails where it took longer."""
    began = time.thread_time()
    made = work()
    took = time.thread_time() - began
    assert took < seconds, f"{took:.1f} s: {what[:2000]!r}"
    return made


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def expression(draw: random.Random, depth: int = 0) -> str:
    if depth > 5 or draw.random() < 0.2:
        return draw.choice(ATOMS)
    one, other = expression(draw, depth + 1), expression(draw, depth + 1)
    shapes: tuple[Callable[[], str], ...] = (
        lambda: f"({one} {draw.choice(OPERATORS)} {other})",
        lambda: f"{one} | {draw.choice(FILTERS)}",
        lambda: f"{one} | {draw.choice(FILTERS)}({other})",
        lambda: f"{one} | {draw.choice(FILTERS)}({other}, {draw.choice(ATOMS)})",
        lambda: f"{one} | {draw.choice(FILTERS)}({draw.choice(['attribute', 'start', 'precision', 'd'])}={other})",
        lambda: f"{one} is {draw.choice(TESTS)}",
        lambda: f"{one} is {draw.choice(TESTS)}({other})",
        lambda: f"({one}).{draw.choice(METHODS)}({other})",
        lambda: f"({one})['{draw.choice(METHODS)}']()",
        lambda: f"({one})[{other}:{draw.choice(ATOMS)}]",
        lambda: f"({one})[{other}]",
        lambda: f"[{one}, {other}] * {draw.choice(ATOMS)}",
        lambda: f"{{{one}: {other}}}",
        lambda: f"({one} if {other} else {draw.choice(ATOMS)})",
        lambda: f"(not {one})",
        lambda: f"-{one}",
    )
    return draw.choice(shapes)()


def template(draw: random.Random, depth: int = 0) -> str:
    if depth > 4 or draw.random() < 0.3:
        return "x" * draw.choice([0, 1, 1, 1, 5_000]) + "{{ " + expression(draw) + " }}"
    made = draw.choice(STATEMENTS)
    while "X" in made:
        made = made.replace("X", expression(draw, 2), 1)
    while "Y" in made:
        made = made.replace("Y", template(draw, depth + 1), 1)
    return made if draw.random() < 0.95 else mutated(draw, made)


def mutated(draw: random.Random, text: str) -> str:
    """Return the text with a piece doubled, cut out or replaced."""
    start, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
    odd = draw.choice(
        ["", "{{", "}}", "{%", "(", "'", '"', "\x00", "\ud800", "9" * 5_000, "- " * 70, "&a *a", ": ", "é"]
    )
    return text[:start] + draw.choice([odd, text[start:end] * 2]) + text[end:]


def render(text: str) -> None:
    """Compile and evaluate a template. Raises nothing but what is said of a bad one."""
    with contextlib.suppress(Malformed, errors.ExpressionError):
        compiled = within(COMPILATION_SECONDS, text, lambda: ValueTemplate(text, "with"))
        within(EVALUATION_SECONDS, text, lambda: compiled.render(SCOPE))


def test_random_templates_compile_or_are_reported_as_malformed() -> None:
    """A compiled template yields a value or an error."""
    draw, before = random_source(), peak_mib()
    for _ in range(trials(600, 100_000)):
        render(template(draw))
    assert peak_mib() - before < MEMORY_MIB


def test_random_playbook_files_give_problems_with_a_location() -> None:
    """Shipped playbooks and their tests are mutated and get random templates."""
    draw = random_source()
    texts = [path.read_text() for path in sorted(SHIPPED.glob("*.yaml"))]
    for _ in range(trials(60, 20_000)):
        text = draw.choice(texts)
        for _ in range(draw.randrange(1, 4)):
            text = mutated(draw, text)
        if draw.random() < 0.5:
            text += "  - approve: " + repr(template(draw)) + "\n"
        _, problems = within(FILE_SECONDS, text, functools.partial(loader.load, text, "f", ACTIONS))
        assert all(
            problem.line and problem.column for problem in problems if "the others are not shown" not in problem.message
        )
        assert all(len(problem.message) < 2_000 for problem in problems)
        assert not any("cannot be checked" in problem.message for problem in problems), (text, problems)


def test_random_playbook_tests_give_problems(tmp_path: Path) -> None:
    """The reader reports problems for them too."""
    draw = random_source()
    texts = [path.read_text() for path in sorted(SHIPPED.glob("*_test.yaml"))]
    path = tmp_path / "a_test.yaml"
    for _ in range(trials(60, 20_000)):
        text = mutated(draw, mutated(draw, draw.choice(texts)))
        path.write_text(text, errors="replace")
        within(FILE_SECONDS, text, lambda: suite_format.read(path))


HEAD = "playbook: a\non: {alert: A}\ntarget: node\n"
HOSTILE_FILES = {
    "unknown keys": "".join(f"k{number}: 1\n" for number in range(24_000)),
    "unknown keys of steps": HEAD + "steps:\n" + "".join(f"  - {{k{number}: 1}}\n" for number in range(16_000)),
    "many steps": HEAD + "steps:\n" + "  - {wait_for: resolved}\n" * 20_000,
    "one step by alias": HEAD + "steps:\n  - &a {wait_for: resolved}\n" + "  - *a\n" * 15_000,
    "many documents": "---\na: 1\n" * 80_000,
    "large templates": HEAD + "steps:\n" + ("  - {approve: '" + "{{ 1 }}" * 4_800 + "'}\n") * 28,
    "long templates": HEAD + "steps:\n" + ("  - {approve: '" + "x" * 60_000 + "{{ 1 }}'}\n") * 16,
    "long conditions": HEAD
    + "steps:\n"
    + ("  - {wait_for: resolved, when: '" + " or ".join(["labels.a"] * 90) + "'}\n") * 190,
    "wrong names": HEAD
    + "vars:\n"
    + "".join(f"  k{number}: 1\n" for number in range(20_000))
    + "steps:\n"
    + "".join(f"  - {{wait_for: resolved, when: vars.q{number} or vars.r or vars.s}}\n" for number in range(190)),
    "one long text of matchers": "playbook: a\non: {alert: A, matchers: ['" + "a=b," * 200_000 + "']}\n",
    "laughs": "a: &a [x, x]\n"
    + "".join(
        f"k{number}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
        for number, (old, new) in enumerate(zip("abcdefgh", "bcdefghi", strict=True))
    ),
    "deep": "[" * 500_000,
    "long number": "a: 0x" + "f" * 1_000_000,
    "escapes": 'a: "' + "\\n" * 500_000 + '"',
    "anchors": "a:\n" + "".join(f"  - &a{number} x\n" for number in range(45_000)),
    "comments": "# aaaaaaaa\n" * 95_000,
    "bytes": "a: " + "x" * 3_000_000,
}


def test_harmful_playbook_files_are_read_in_bounded_time() -> None:
    """Each is bounded in time."""
    before = peak_mib()
    for name in random_source().sample(sorted(HOSTILE_FILES), trials(3, len(HOSTILE_FILES))):
        within(FILE_SECONDS, name, functools.partial(loader.load, HOSTILE_FILES[name], name, ACTIONS))
    assert peak_mib() - before < MEMORY_MIB


def test_unreadable_playbook_files_do_not_affect_good_ones(tmp_path: Path) -> None:
    """Link loops, devices, pipes and bombs lie next to a good file, which is still loaded."""
    for name in ("laughs", "deep", "long number"):
        (tmp_path / f"{name}.yaml").write_text(HOSTILE_FILES[name])
    (tmp_path / "good.yaml").write_text(HEAD + "steps: [{wait_for: resolved}]\n")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self.yaml").symlink_to("self.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "random.yaml").symlink_to("/dev/urandom")
    (tmp_path / "terminal.yaml").symlink_to("/dev/tty")
    (tmp_path / "messages.yaml").symlink_to("/proc/kmsg")
    os.mkfifo(tmp_path / "pipe.yaml")
    library = Library([tmp_path], ACTIONS)
    within(FILE_SECONDS, "all of them", library.reload)
    assert library.get("a") is not None
    refused = {Path(problem.file).stem for problem in library.problems}
    assert refused >= {"self", "zero", "random", "terminal", "pipe", "laughs", "deep", "long number"}


# fmt: off
PATTERN_PARTS = (
    r".", r"\w", r"\d", r"\pL", r"[a-z]", r"[^a]", r"a", r"b", r"(a|b)", r"(a|ab|b)*", r"(a+)+", r"(a*)*", r"(.*)*",
    r"(.*a){20}", r".{1000}", r"x?", r"(?i)a", r"^", r"$", r"\b", r"(llm|train|llm-train|-)+", r"{2,}", r"{1,1000}",
    r"*", r"+", r"?", r"[", r"(", r")", r"|", r"\1", r"(?=a)", r"(?<n>a)", r"\Q..", r"\C", r"\x{10ffff}",
    r"[[:alpha:]]", r"\pN{50}",
)
# fmt: on


def test_harmful_label_patterns_are_refused_or_matched_in_time() -> None:
    """A pattern is refused, too large for the value, or matched within its time."""
    draw, before = random_source(), peak_mib()
    texts = [
        "a" * 65_536,
        "ab" * 32_768,
        "llm-train-" * 6_500 + "!",
        "é" * 65_536,
        "\ud800" * 10_000,
        "\U0010ffff" * 60_000,
        "",
    ]
    for _ in range(trials(300, 30_000)):
        pattern = "".join(draw.choices(PATTERN_PARTS, k=draw.randrange(1, 12))) * draw.choice([1, 1, 5, 30])
        with contextlib.suppress(ValueError, ValueTooLong):
            compiled = within(MATCH_SECONDS, pattern, functools.partial(Pattern, pattern))
            within(MATCH_SECONDS, pattern, functools.partial(compiled.matches, draw.choice(texts)))
    assert peak_mib() - before < MEMORY_MIB
