"""Searching looks closely only at lines in which a pattern can be found, and finds what it would find without that."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trainmedic_agent.log_search import file_lines, wanted_lines
from trainmedic_agent.log_search.file_lines import FileLines
from trainmedic_agent.log_search.line_filter import LikelyLines, LineFilter
from trainmedic_agent.log_search.wanted_lines import ReadBudget
from trainmedic_core.expressions.regexes import ByteSearch, SearchPattern
from trainmedic_core.expressions.required_text import required_patterns
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_search import FoundLine, LogQuery

BEGAN = datetime(2026, 1, 31, 12, tzinfo=UTC)
KEY = ("-----BEGIN RSA PRIVATE KEY-----", "needle" * 8, "-----END RSA PRIVATE KEY-----")


def test_the_longest_text_required_by_a_pattern_is_known() -> None:
    """The length is found for each alternative; optional parts and character classes do not count."""
    assert required_patterns("CUDA error|ou?t of mem.*ory") == [rb"CUDA\ error", rb"t\ of\ mem"]
    assert required_patterns(r"^step \d+ loss=nan\.$") == [rb"\ loss\=nan"]
    assert required_patterns("(?i)killed|größe") == [b"(?i:illed)", b"(?i:gr)"]
    for unknown in ("", "a|.*", "(a|b)c", "[ab]c", "a{0}bc", r"\x41", r"\Qa*\E", "a|", "x*", "(?i)ks", "\ufffd"):
        assert required_patterns(unknown) is None, unknown


def test_a_text_that_matches_a_pattern_contains_what_the_pattern_requires() -> None:
    """This holds for every pattern."""
    chance = random.Random(7)
    known = found = 0
    for _ in range(20_000):
        pieces = [
            "a",
            "b",
            "k",
            "ä",
            "\u212a",
            ".",
            "*",
            "+",
            "?",
            "|",
            "^",
            "$",
            r"\.",
            r"\w",
            r"\\",
            r"\|",
            "(",
            ")",
            "*?",
        ]
        expression = chance.choice(["", "(?i)"]) + "".join(chance.choices(pieces, k=chance.randint(1, 6)))
        try:
            pattern = SearchPattern(expression)
        except ValueError:
            continue
        if (needed := required_patterns(expression)) is None:
            continue
        known += 1
        text = "".join(chance.choices("abkABKäÄ\u212a.*|\\", k=chance.randint(0, 8))).encode()
        if pattern.search(text) is not None:
            found += 1
            assert ByteSearch(needed).next(text, 0) is not None, (expression, text, needed)
    assert known > 2000
    assert found > 300


def hostile_lines(chance: random.Random) -> list[str]:
    """A log with what can stand between a line and the text that is searched."""
    lines: list[str] = []
    as_docker = json.JSONEncoder(separators=(",", ":")).encode
    for number in range(6000):
        at = (BEGAN + timedelta(seconds=number)).isoformat()
        word = chance.choice([*["straw"] * 20, "needle", "nee\x1b[1mdle", "NEEDLE", "n\u00e9edle"])
        docker = {"log": f'"{word}" <{number}>\n', "stream": "stdout", "time": at.replace("+00:00", "Z")}
        form = chance.randrange(40)
        if number % 500 == 499:
            lines += KEY
        elif number % 500 == 250:
            lines.append(as_docker({**docker, "log": f"needle {number}\n"}).replace("needle", r"n\u0065edle"))
        elif form == 1:
            lines.append(as_docker(docker))
        elif form == 2:
            lines.append(f" 10%|# | 1/10 2.0it/s\r 20%|## | 2/10 2.0it/s {word}\r")
        elif form == 3:
            lines.append(f"password={word}{number} of {word}")
        elif form < 20:
            lines.append(f"{word} without a time {number}")
        else:
            lines.append(f"{chance.choice(['', '[rank3]: ', '[default1]:'])}{at} {word} {number}")
    return lines


@pytest.mark.parametrize("skips_ranks", [False, True])
@pytest.mark.parametrize(
    "grep", ["needle", "^needle", "(?i)needle .*7$", r"n\wedle|\*\*\*", "dle without", "<59", "none"]
)
def test_the_filter_finds_the_same_as_a_check_of_every_line(
    grep: str, skips_ranks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the same times, also if the line before states none or is skipped."""
    monkeypatch.setattr(file_lines, "PIECE", 8 * 1024)
    log = tmp_path / "log"
    lines = hostile_lines(random.Random(11))
    log.write_text("\n".join(["needle before any time", *lines, ""]), newline="\n")

    def found() -> list[FoundLine]:
        query = LogQuery("llm-1", BEGAN - timedelta(days=1), grep=grep)
        answer = []
        with log.open("rb") as opened:
            origin, budget = Origin("launcher", "n1"), ReadBudget(1 << 30, 60.0)
            file = FileLines(opened.fileno(), origin, LineFilter.of(query), budget)
            file.skips_ranks = skips_ranks
            file.begin({})
            while (line := file.next()) is not None:
                answer.append(line)
        return answer

    closely = found()
    monkeypatch.setattr(LikelyLines, "of", lambda _: None)
    assert closely == found()
    assert bool(closely) == (grep != "none")


def test_lines_without_the_required_text_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a piece of the file, all of them are skipped except the last that states a time."""
    looked_at: list[bytes] = []
    parse = wanted_lines.parse

    def counted(raw: bytes, *more: object) -> object:
        looked_at.append(raw)
        return parse(raw, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(wanted_lines, "parse", counted)
    log = tmp_path / "log"
    log.write_text(
        "".join(f"{(BEGAN + timedelta(seconds=n)).isoformat()} straw {n}\n" for n in range(5000)) + "needle\n"
    )
    query = LogQuery("llm-1", BEGAN - timedelta(days=1), grep="needle")
    with log.open("rb") as opened:
        origin, budget = Origin("launcher", "n1"), ReadBudget(1 << 30, 60.0)
        file = FileLines(opened.fileno(), origin, LineFilter.of(query), budget)
        file.begin({})
        line = file.next()
    assert line is not None
    assert (line.text, line.at, line.is_sure) == ("needle", BEGAN + timedelta(seconds=4999), False)
    assert len(looked_at) < 5
