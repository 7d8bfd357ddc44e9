"""Matchers mean what they mean in Alertmanager."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trainmedic_server.catalog import matchers, regexes

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
def test_a_matcher_holds_as_in_alertmanager(text: str, holds: bool) -> None:
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
        ('a=~"("', "regular expression"),
        ('a=~"[a"', "not closed"),
        ('a=~"(?=x)"', "not in RE2"),
        ('a=~"(a+)+"', "for ever"),
        ('a=~"(a|b*)*"', "for ever"),
        ('a=~"x{1001}"', "1000"),
        ('a=~"x**"', "repetition of a repetition"),
        (r'a=~"\\p{L}"', "escape"),
        ('a=~"b(?i)c"', "beginning"),
        ('a=~"' + "x" * 1001 + '"', "1000 characters"),
    ],
)
def test_what_is_no_matcher_is_refused_with_the_reason(text: str, told: str) -> None:
    """So it is found when the playbook is loaded."""
    with pytest.raises(ValueError) as caught:
        matchers.parse(text)
    assert told in str(caught.value)


def test_a_value_that_is_too_long_is_not_tried() -> None:
    """A label of a megabyte cannot keep the server busy; equality still works on it."""
    long = {"a": "x" * (regexes.LONGEST_VALUE + 1)}
    with pytest.raises(matchers.ValueTooLong):
        matchers.parse('a=~"x*y"')[0].matches(long)
    assert matchers.parse("a!=b")[0].matches(long)


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
    """The forms that Python writes differently, too."""
    assert regexes.translate(pattern).fullmatch(value)


def test_amtool_accepts_what_is_accepted_here(tmp_path: Path) -> None:
    """What loads here can be copied into an Alertmanager's route."""
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
