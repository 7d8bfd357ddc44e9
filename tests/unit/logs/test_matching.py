"""Which rule takes a line, and what rules become on their way to an agent."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.logs.reading import line
from trainmedic_core.target import TargetKind
from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.lines.blocks import TRACEBACK
from trainmedic_logs.lines.line import LONGEST
from trainmedic_logs.lines.matcher import LineMatcher
from trainmedic_logs.lines.rule import Confirmation, LinePattern, LogRule, RequiredCount, RuleAlert, RuleSet


def rule(name: str = "oom", pattern: str = "CUDA out of memory", **members: Any) -> LogRule:
    given: dict[str, Any] = {
        "sources": ("training",),
        "role": Role.ROOT,
        "cause": CauseClass.GPU_MEMORY,
        "contains": ("CUDA",),
        "match": (LinePattern(pattern),),
    }
    return LogRule(name, **{**given, **members})


def taken(text: str, *rules: LogRule, source: str = "training") -> str | None:
    match = LineMatcher(RuleSet(rules)).match(line(text, source))
    return match.rule.name if match.rule else None


def test_a_rule_takes_lines_with_its_literal_and_its_pattern() -> None:
    """Named groups are fields; a literal without the pattern is near."""
    matcher = LineMatcher(RuleSet((rule(pattern=r"CUDA out of (?P<what>\w+)(?P<none>X)?"),)))
    match = matcher.match(line("an Ärger: CUDA out of memory"))
    assert (match.rule and match.rule.name, match.fields, match.start) == ("oom", {"what": "memory"}, 10)
    assert matcher.match(line("CUDA is fine")).near == ("oom",)
    assert matcher.match(line("quiet")).near == ()


def test_a_rule_takes_lines_of_its_sources_alone() -> None:
    """What the kernel says counts only where the kernel says it."""
    assert taken("CUDA out of memory", rule(), source="kernel") is None


def test_noise_comes_first_and_general_rules_last() -> None:
    """Among the others the order of names decides, so that it never changes."""
    noise = rule("z-noise", "out of memory", role=Role.NOISE)
    general = rule("a-general", "CUDA", is_general=True)
    assert taken("CUDA out of memory", rule("b"), rule("a"), general) == "a"
    assert taken("CUDA out of memory", rule("a"), noise, general) == "z-noise"
    assert taken("CUDA error", rule("a"), noise, general) == "a-general"


def test_exceptions_and_conditions_are_kept() -> None:
    """A line of `unless` is not taken, nor one for which `when` does not hold or cannot be asked."""
    assert taken("CUDA out of memory, retrying", rule(unless=("retrying",))) is None
    xid = rule("xid", r"CUDA (?P<xid>\d+)", when='xid(fields.xid).action == "reset_gpu"')
    assert taken("CUDA 48", xid) == "xid"
    assert taken("CUDA 13", xid) is None
    assert taken("CUDA 48", rule("x", "CUDA", when="fields.nothing > 1")) is None


def test_a_pattern_can_have_a_role_of_its_own() -> None:
    """One rule takes lines that mean more or less."""
    both = rule(match=(LinePattern("CUDA a"), LinePattern("CUDA b", Role.CASCADE)))
    matcher = LineMatcher(RuleSet((both,)))
    assert [matcher.match(line(text)).role for text in ("CUDA a", "CUDA b")] == [Role.ROOT, Role.CASCADE]


def test_records_are_taken_by_their_numbers() -> None:
    """And the text of an event by the rules over text."""
    nan = rule("nan", contains=(), match=(), record="step", when="not is_finite(fields.loss)")
    high = rule("high", contains=(), match=(), record="step", when="fields.loss > 1e3")
    assert taken("{'loss': nan}", nan, high) == "nan"
    assert taken("{'loss': 2e3}", nan, high) == "high"
    assert taken("{'loss': 2.0}", nan, high) is None
    assert taken("{'eval_loss': nan}", nan, high) is None
    assert taken('{"event": "exception", "message": "CUDA out of memory"}', rule()) == "oom"
    refused = LineMatcher(RuleSet((nan, high))).match(line("{'loss': 1.0}")).refused
    assert refused == ("high", "nan")


def test_our_own_notices_are_no_lines() -> None:
    """Or a notice in a training's log would be found again."""
    assert taken("trainmedic: on llm-1: CUDA out of memory", rule()) is None


def test_a_rule_set_travels_and_comes_back() -> None:
    """Every part of a rule, and the same version on both sides."""
    full = rule(
        summary="s", unless=("u",), when="fields.x", is_general=True, gpu="{{ fields.pci }}", ends=("e",),
        target=TargetKind.GPU, lasting=timedelta(minutes=1), silence=timedelta(hours=2), until="boot",
        count=RequiredCount(3, timedelta(minutes=5)), match=(LinePattern("p", Role.CASCADE), LinePattern("q")),
        alert=RuleAlert("A", "critical", "gpu", {"xid": "x"}, "s", "d", Confirmation(timedelta(minutes=1), ("b",))),
    )  # fmt: skip
    rules = RuleSet((full, rule("b", record="step", count=RequiredCount(5, in_a_row=True)), rule("c")))
    back = RuleSet.decode(rules.encode())
    assert back == rules
    assert back.version == rules.version
    assert RuleSet((rule("c"),)).version != rules.version


def test_the_form_of_a_rule_set_stays() -> None:
    """Agents and servers of other releases read and write these bytes: times are seconds, defaults are left out, but
    for labels."""
    alert = RuleAlert("A", confirm=Confirmation(timedelta(seconds=1.5), ("b",)))
    rules = RuleSet((rule("a", lasting=timedelta(minutes=1), count=RequiredCount(3, timedelta(hours=1)), alert=alert),))
    assert rules.encode() == (
        b'{"rules":[{"alert":{"confirm":{"by":["b"],"within":1.5},"labels":{},"name":"A"},"cause":"gpu_memory",'
        b'"contains":["CUDA"],"count":{"at_least":3,"per":3600.0},"lasting":60.0,'
        b'"match":[{"pattern":"CUDA out of memory"}],"name":"a","role":"root","sources":["training"]}],"version":1}'
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version": 2, "rules": []}',
        b'{"version": 1, "rules": [1]}',
        b'{"version": 1, "rules": [{"name": "a"}]}',
        RuleSet((rule("a"),)).encode().replace(b'"root"', b'"unheard-of"'),
        RuleSet((rule("a"),)).encode().replace(b'"name":"a"', b'"name":7'),
    ],
)
def test_what_is_no_rule_set_is_refused(data: bytes) -> None:
    """With one kind of error."""
    with pytest.raises(ValueError):
        RuleSet.decode(data)


@pytest.mark.parametrize("path", [(), ("alert",), ("alert", "confirm"), ("count",)])
def test_a_rule_with_an_unknown_member_at_any_depth_is_left_out(path: tuple[str, ...]) -> None:
    confirm = Confirmation(timedelta(minutes=5), ("b",))
    made = rule("a", alert=RuleAlert("Alert", confirm=confirm), count=RequiredCount(2, timedelta(minutes=1)))
    document = json.loads(RuleSet((made,)).encode())
    inner = document["rules"][0]
    for name in path:
        inner = inner[name]
    assert RuleSet.decode(json.dumps(document).encode()).rules == (made,)
    inner["newer"] = True
    assert RuleSet.decode(json.dumps(document).encode()) == RuleSet((), ("a",))


def test_a_rule_of_a_newer_server_is_left_out() -> None:
    """What its unknown member means is not known; the others load."""
    rules = RuleSet((rule("a"), rule("b"))).encode()
    newer = RuleSet.decode(rules.replace(b'"name":"b"', b'"name":"b","at_night":true'))
    assert ([each.name for each in newer.rules], newer.left_out) == (["a"], ("b",))


def test_a_hostile_line_costs_no_more_than_its_length() -> None:
    """Patterns that ruin a backtracking engine, on lines that are made for them."""
    bad = rule(pattern=r"CUDA.*x.*y.*z$", unless=(r"(a|a)*b.*c.*d",))
    hostile = line("CUDA" + "xy" * LONGEST)
    matcher = LineMatcher(RuleSet((bad,)))
    matcher.match(hostile)
    began = time.thread_time()
    matcher.match(hostile)
    assert time.thread_time() - began < 0.05


@pytest.mark.parametrize(
    "shown",
    [
        f'{TRACEBACK}\n  File "a.py", line 3, in f\n    raise Full("CUDA out of memory")\nKeyError: 1',
        '  + Exception Group Traceback (most recent call last):\n  |   File "a.py", line 3, in f\n'
        '  |     raise Full("CUDA out of memory")\n  | KeyError: 1',
        f"{TRACEBACK}\n│ a.py:3 in f │\n│   2   except Full:  # CUDA out of memory │\n╰──╯\nKeyError: 1",
        '│ ❱ 3 │   │   if "CUDA out of memory" in str(error): │',
        "│ │ error = Full('CUDA out of memory') │ │",
    ],
)
def test_what_a_traceback_shows_of_the_program_is_not_what_happened(shown: str) -> None:
    """Of its source and its variables no word counts, and none is near."""
    match = LineMatcher(RuleSet((rule(),))).match(line(shown))
    assert (match.rule, match.near) == (None, ())


def test_a_pattern_that_begins_with_the_end_of_a_line_was_found_in_the_next() -> None:
    text = f"{TRACEBACK}\n  ^^^^\nCUDAError: CUDA out of memory"
    match = LineMatcher(RuleSet((rule(pattern=r"(?:^|\n)CUDAError: CUDA out"),))).match(line(text))
    assert text[match.start :] == "CUDAError: CUDA out of memory"


def test_what_a_traceback_says_is_found_where_it_stands() -> None:
    """The exception, also one of several lines, and the places of the calls."""
    text = f'{TRACEBACK}\n  File "/CUDA/a.py", line 3, in f\n    "Ä"\nE: one\n    CUDA out of memory'
    match = LineMatcher(RuleSet((rule(),))).match(line(text))
    assert text[match.start :] == "CUDA out of memory"
    assert taken(text, rule(pattern='"/CUDA/a')) == "oom"
