"""Matchers mean what they mean in Alertmanager."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trainmedic_core.expressions.regexes import LARGEST_PROGRAM, MOST_WORK, Pattern, ValueTooLong
from trainmedic_server.catalog import matchers

ALERT = {"severity": "warning", "team": "", "path": "/data/ckpt", "a b": "1", "note": "first\nsecond"}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("severity=warning", True),
        ('severity!="critical"', True),
        ('severity=~"warning|critical"', True),
        ("severity=~warn", False),
        ('severity=~"warn.*"', True),
        ('severity!~"warn"', True),
        ('missing=""', True),
        ('missing!="x"', True),
        ('missing=~".*"', True),
        ('missing=~".+"', False),
        ('team=""', True),
        (r'path=~"/data/\w+"', True),
        (r'path=~"/data/\\w+"', True),
        ('"a b"=1', True),
        ('severity=~"(?i)WARNING"', True),
        ('note=~"first.second"', False),
        ('note=~"(?s)first.second"', True),
        ('note="first\\nsecond"', True),
        ('{severity="warning", path=~"/data.*"}', True),
        ('severity="warning",path="other"', False),
    ],
)
def test_a_matcher_works_as_in_alertmanager(text: str, holds: bool) -> None:
    """Regular expressions match the whole value; a missing label is the empty text."""
    assert all(matcher.matches(ALERT) for matcher in matchers.parse(text)) is holds


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("severity", "not a matcher"),
        ("severity=", 'severity=""'),
        ("=x", "not a matcher"),
        ("severity==x", "not a matcher"),
        ("severity='x'", "outside double quotes"),
        ('severity="x', "outside double quotes"),
        ("a=b c=d", "expected ','"),
        ("", "a matcher is"),
        ('{a="b"', "not closed"),
        ('a=~"("', "not a regular expression: missing )"),
        ('a=~"[a"', "missing ]"),
        ('a=~"(?=x)"', "invalid perl operator: (?="),
        (r'a=~"(x)\\1"', "invalid escape sequence"),
        ('a=~"x{1001}"', "invalid repetition size: {1001}"),
        ('a=~"(x{1000}){1000}"', "invalid repetition size"),
        ('a=~"x**"', "bad repetition operator: **"),
        ('a=~"x++"', "bad repetition operator: ++"),
        (r'a=~"\\pL{300}"', "too large"),
        ('a=~"' + ".{30}" * 100 + '"', "too large when its repetitions are written out"),
        ('a=~"' + "x" * 1001 + '"', "1000 characters"),
        ("a=b," * 10_000, "10000 characters"),
    ],
)
def test_an_invalid_matcher_is_rejected_with_the_reason(text: str, told: str) -> None:
    """So the error is found when the playbook is loaded."""
    with pytest.raises(ValueError) as caught:
        matchers.parse(text)
    assert told in str(caught.value)


def test_a_large_pattern_is_not_matched_against_a_long_value() -> None:
    """A match is bounded by the product of both lengths; usual patterns match every accepted label."""
    longest = {"a": "x" * 65_536}
    large = matchers.parse('a=~".{1000}"')[0]
    assert not large.matches({"a": "x" * (MOST_WORK // LARGEST_PROGRAM)})
    with pytest.raises(ValueTooLong, match="label a: it has 65536 characters"):
        large.matches(longest)
    assert matchers.parse('a=~"(x|xx|xxx)+"')[0].matches(longest)
    assert matchers.parse("a!=b")[0].matches(longest)


@pytest.mark.parametrize(
    ("pattern", "value", "holds"),
    [
        ("(a+)+", "a" * 60_000 + "b", False),
        ("(a|b*)*", "ab" * 30_000, True),
        (".*a.*a.*a.*a.*a.*b", "a" * 60_000, False),
        ("(llm|train|llm-train|-)+[0-9]*", "llm-train-" * 6_000 + "!", False),
        ("b(?i)c", "bC", True),
        (r"\pL+", "Ünïcödé", True),
    ],
)
def test_no_pattern_backtracks(pattern: str, value: str, holds: bool) -> None:
    """A match takes time in proportion to the value, so every pattern that RE2 can parse is allowed."""
    assert Pattern(pattern).matches(value) is holds


def test_half_a_surrogate_pair_becomes_the_replacement_character() -> None:
    """JSON can write it, and UTF-8 cannot; Go, and so Alertmanager, reads U+FFFD."""
    assert Pattern("a.b").matches("a\ud800b")
    assert Pattern("\ufffd").matches("\udfff")
    assert matchers.parse('a=~".."')[0].matches({"a": "\ud83d\ude00x"})


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        (r"[[:digit:]]+", "12"),
        (r"\Qa.b\E", "a.b"),
        (r"\x{41}\x42", "AB"),
        (r"(?P<a>x)(?<b>y)", "xy"),
        (r"[]a]", "]"),
        (r"[^\d]", "a"),
        (r"a{2,3}", "aaa"),
        (r"(?:ab)?c", "c"),
        (r"\Aab\z", "ab"),
        (r"[a[]", "["),
    ],
)
def test_re2_syntax_is_understood(pattern: str, value: str) -> None:
    """The forms that Python's own `re` writes differently, too."""
    assert Pattern(pattern).matches(value)


def test_amtool_accepts_every_matcher_accepted_here(tmp_path: Path) -> None:
    """Matchers that load here can be copied into an Alertmanager's route."""
    written = ['severity=~"warning|critical"', "a=b", 'c!~"x.+"', 'd=""', r'path=~"/data/\\w+"', '{e="1",f!="2"}']
    config = tmp_path / "alertmanager.yml"
    lines = "".join(f"        - '{text}'\n" for text in written)
    config.write_text(
        "route:\n  receiver: r\n  routes:\n    - receiver: r\n      matchers:\n" + lines + "receivers:\n  - name: r\n"
    )
    for text in written:
        assert matchers.parse(text)
    done = subprocess.run(["amtool", "check-config", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
