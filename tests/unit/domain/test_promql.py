"""What an alert's rule compares, and text within a query."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

from trainmedic_core.expressions import evaluation
from trainmedic_server.catalog import quoted_query
from trainmedic_server.domain.promql import NOT_A_NUMBER, Comparison, QuoteScan, comparisons, escaped, narrowed

RULES = Path(__file__).parents[3] / "monitoring" / "rules"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("temp > 85", [("temp", ">", 85.0)]),
        ("(temp > 85)", [("temp", ">", 85.0)]),
        ("85 < temp", [("temp", ">", 85.0)]),
        ("up == bool 0", [("up", "==", 0.0)]),
        ("-0x10 < errors", [("errors", ">", -16.0)]),
        (f"errors > 0x{'F' * 300}", [("errors", ">", None)]),
        ("free / size < 0.1 and size > 0", [("free / size", "<", 0.1)]),
        ("a > 1 unless on (node) b > 2", [("a", ">", 1.0)]),
        ('a > 85 or (a > 80 and ignoring (x) ALERTS{y="z"})', [("a", ">", 85.0), ("a", ">", 80.0)]),
        (
            "a * on (n) group_left (j) b > 0.9 or ignoring (j) a > 0.9",
            [("a * on (n) group_left (j) b", ">", 0.9), ("a", ">", 0.9)],
        ),
        ("loss > on (job) group_left () (base + 1)", [("loss", ">", None)]),
        ("loss != loss or norm!=norm", [("loss", NOT_A_NUMBER, None), ("norm", NOT_A_NUMBER, None)]),
        ('rate(x{a=">1 or <2"}[5m]) >= 3 # > 4', [('rate(x{a=">1 or <2"}[5m])', ">=", 3.0)]),
        ("max by (node) (a > 3)", []),
        ("absent(up)", []),
        ("1 < a < 2", []),
        ("", []),
        (") > (", []),
    ],
)
def test_the_compared_side_of_each_branch_is_found(
    expression: str, expected: list[tuple[str, str, float | None]]
) -> None:
    """Strings, comments and brackets hide what is in them; what compares nothing gives nothing."""
    found = [(each.query, each.operator, each.limit) for each in comparisons(expression)]
    assert found == expected


def lines_run(call: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(earlier)
    return count


@pytest.mark.parametrize(
    "form",
    [
        lambda size: "(" * size + "a > 1" + ")" * size,
        lambda size: "(" * size + "a > 1" + " or b > 2)" * size,
        lambda size: "(" * size + "a > 1" + " and b > 2)" * size,
        lambda size: "a > 1 or on (x) " * size + "b > 2",
        lambda size: "(a and (" * size + "b" + "))" * size,
        lambda size: "(" * size + "a > 1" + ")" * (size // 2),
    ],
)
def test_the_work_grows_with_the_length_only(form: Callable[[int], str]) -> None:
    """Twice as long an expression, as of a rule that nests, is twice the work, and nests as deep as it wants."""
    small, large = (lines_run(lambda size=size: comparisons(form(size))) for size in (1500, 3000))
    assert large < 2.2 * small


def test_a_text_without_end_is_read_once() -> None:
    """Else each of its escaped quotes begins another search for the end."""
    assert comparisons('a > "' + '\\"' * 5000) == [Comparison("a", ">", None)]
    assert lines_run(lambda: comparisons('a > "' + '\\"' * 5000)) < 200


@pytest.mark.parametrize(("value", "text"), [(None, "None"), (True, "true"), (2, "2")])
def test_a_value_in_a_query_is_a_labels_text(value: object, text: str) -> None:
    # Not empty without a value: that would match series that lack the label.
    made = quoted_query.compiled('a{b="{{ vars.x }}"}', lambda template: evaluation.compile_text(template, "query"))
    assert isinstance(made, quoted_query.QuotedQuery)
    assert made.rendered({"vars": {"x": value}}) == f'a{{b="{text}"}}'


def test_many_templates_of_a_query_are_found_in_one_pass() -> None:
    """A query is not read again from its beginning for each value in it."""
    small, large = (
        lines_run(lambda count=count: quoted_query.compiled('a{b="{{ x }}"} ' * count, str)) for count in (200, 400)
    )
    assert large < 2.2 * small


@pytest.mark.parametrize(
    ("comparison", "value", "holds"),
    [
        (Comparison("a", ">", 1.0), 2.0, True),
        (Comparison("a", "<=", 1.0), 2.0, False),
        (Comparison("a", ">", None), 2.0, None),
        (Comparison("a", ">", 1.0), math.nan, None),
        (Comparison("a", NOT_A_NUMBER, None), math.nan, True),
    ],
)
def test_a_condition_holds_or_not_or_cannot_be_told(comparison: Comparison, value: float, holds: bool | None) -> None:
    """Of no number nothing is told, but by what asks for it."""
    assert comparison.holds(value) is holds


@pytest.mark.parametrize("text", ['"', "'", "`", "\\", "\n", 'x"} or up{a="', "$1", "é\u2028\x00", "\ud800"])
def test_text_stays_within_its_quotes(text: str) -> None:
    """Whatever a label holds, it ends no string and begins no expression."""
    for quote in "\"'":
        assert QuoteScan().read(f"a{{b={quote}{escaped(text)}")


@pytest.mark.parametrize("text", ["", "a{b=", 'a{b="c"', "a{b=`", 'a # "', 'a{b="\\\\"'])
def test_text_outside_of_quotes_or_in_raw_ones_is_known(text: str) -> None:
    """There, nothing that is escaped could stand."""
    assert not QuoteScan().read(text)


def test_what_is_narrowed_is_valid_for_prometheus(tmp_path: Path) -> None:
    """promtool reads each query that is made of the shipped rules, with hostile labels too."""
    promtool = shutil.which("promtool")
    assert promtool, "prometheus is installed by scripts/system-packages"
    labels = {"node": 'n"1\\', "job": "a$1`\n'", "bad-name": "x", "__meta": "y", "empty": ""}
    queries = []
    for path in sorted(RULES.glob("*.yaml")):
        for group in yaml.safe_load(path.read_bytes())["groups"]:
            for rule in group["rules"]:
                queries += [narrowed(each.query, labels) for each in comparisons(rule["expr"]) if "alert" in rule]
    assert len(queries) > 20
    rules = [{"record": f"q{number}", "expr": query} for number, query in enumerate(queries)]
    written = tmp_path / "rules.yaml"
    written.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", written], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(" or vector(1))" in query and "bad-name" not in query for query in queries)


def test_what_is_no_label_name_narrows_nothing() -> None:
    """Prometheus would refuse the query."""
    assert narrowed("loss", {"job\n": "llm"}) == "(loss)"
