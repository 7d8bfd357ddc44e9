"""Pictures of the console: what is drawn, what the table behind says, and that no text becomes markup."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from trainmedic_server.console import pictures
from trainmedic_server.console.pictures import Day, Mark

POINTS = [(1_769_860_800.0 + 60 * number, 2.5 - number / 100) for number in range(100)]


def parsed(text: str) -> ElementTree.Element:
    """The SVG of a figure, which has to be well-formed."""
    found = re.search(r"<svg.*?</svg>", text, re.S)
    assert found is not None
    return ElementTree.fromstring(found[0])


def test_a_curve_has_its_marks_its_limit_and_a_table() -> None:
    """All inside the picture; the table has the first and last value, and every mark."""
    marks = [Mark(POINTS[50][0], "job.scale_lr"), Mark(POINTS[0][0] - 1, "too early")]
    text = str(pictures.curve("loss", POINTS, "", marks, limit=2.0))
    svg = parsed(text)
    (line,) = svg.findall("polyline")
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert len(places) == 100
    assert all(0 <= x <= pictures.WIDE and 0 <= y <= pictures.TALL for x, y in places)
    assert [each.attrib["class"] for each in svg.findall("line")] == ["limit", "mark act"]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", text)
    assert (rows[0], rows[-1]) == (("12:00", "2.5", ""), ("12:50", "", "job.scale_lr"))
    assert ("13:39", "1.51", "") in rows
    assert len(rows) <= 27
    assert "too early" not in text
    assert "style=" not in text


def test_a_gap_stays_a_gap() -> None:
    """Nobody measured it, so no line is drawn over it."""
    holed = [(at, None if 40 <= number < 60 else value) for number, (at, value) in enumerate(POINTS)]
    assert len(parsed(str(pictures.curve("loss", holed))).findall("polyline")) == 2


def test_of_one_value_no_curve_is_drawn() -> None:
    """Also where all others are unknown."""
    assert pictures.curve("loss", [*POINTS[:1], (POINTS[1][0], None)]) == ""
    assert pictures.days("By day", [Day("2026-01-31", {"failures": 0})]) == ""
    assert pictures.spark([1.0], "x") == ""


def test_a_constant_and_a_huge_value_are_drawn() -> None:
    """Without a division by zero."""
    assert "→ 3e" not in pictures.curve("rate", [(0.0, 3.0), (60.0, 3.0)])
    assert "1.00e+09" in pictures.curve("rate", [(0.0, 1e9), (60.0, 1e9)])


def test_days_are_stacked_to_the_highest() -> None:
    """Each day's parts stand on one another and fit in."""
    text = str(pictures.days("By day", [Day("2026-01-30", {"a": 1, "b": 3}), Day("2026-01-31", {"a": 0, "b": 2})]))
    bars = parsed(text[text.index("</figcaption>") :]).findall("rect")
    assert [each.attrib["class"] for each in bars] == ["bar-0", "bar-1", "bar-1"]
    first = sum(float(each.attrib["height"]) for each in bars[:2])
    assert abs(first - 2 * float(bars[2].attrib["height"])) < 0.2
    assert "<tr><td>2026-01-31</td><td>0</td><td>2</td></tr>" in text


def test_names_from_outside_stay_text() -> None:
    """In labels, captions, titles and tables."""
    evil = '"><script>alert(1)</script>'
    drawn = [
        pictures.curve(evil, POINTS, evil, [Mark(POINTS[3][0], evil)]),
        pictures.days(evil, [Day(evil, {evil: 1})]),
        pictures.spark([1.0, 2.0], evil),
        pictures.gauge(1, 0, 2, evil, 1.5),
    ]
    assert not [text for text in drawn if "<script" in text]
