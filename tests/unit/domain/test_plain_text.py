"""Text from outside, as it is shown."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest

from trainmedic_core.plain_text import csv_cell, json_bytes, json_text, visible

HIDDEN = [
    character
    for character in map(chr, range(sys.maxunicode + 1))
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
]


def test_no_hidden_character_is_shown_in_any_form() -> None:
    """Of all that Unicode has: escape sequences, C1, marks of direction, what has no width, halves of pairs."""
    assert {"\x1b", "\x7f", "\x9b", "\u202e", "\u2066", "\u200b", "\u2028", "\ud800", "\U000e0041"} <= set(HIDDEN)
    everything = "".join(HIDDEN)
    for shown in (visible(everything), json_text(everything), json_text({everything: [everything]}, indent=2)):
        assert not set(HIDDEN) - {"\n"} & set(shown)
        shown.encode()
    assert "\n" not in visible(everything)
    assert not set(HIDDEN) - {"\n", "\t"} & set(csv_cell(everything))
    assert all(32 <= byte < 127 for byte in json_bytes({everything: [everything]}))


def test_json_stays_the_same_data() -> None:
    """What a program reads of it is what the server sent."""
    whole = "".join(character for character in HIDDEN if not "\ud800" <= character <= "\udfff")
    value = {"text": whole, "words": "ärger 日本語 🔥", "half": "\ud83d", "nested": [{"\x9b": None}]}
    assert json.loads(json_text(value)) == json.loads(json_bytes(value)) == value
    assert "ärger 日本語 🔥" in json_text(value)


def test_ordinary_text_stays_as_it_is() -> None:
    """In every script."""
    for text in ("", "GPU 0 is hot: 91 °C", "ärger 日本語 🔥 עברית", 'a "b" \\ c', "100% = 1"):
        assert visible(text) == text
        assert csv_cell(text) == text


@pytest.mark.parametrize(
    "formula",
    ["=1+1", "+1", "-1", "@SUM(1)", " =1", "\t=1", "\r=1", "\n=1", "\u00a0=1", "＝1", "＋1", "－1", "＠a", "\t", "\nx"],
)
def test_a_cell_is_no_formula(formula: str) -> None:
    """Nor with white space before it, which some spreadsheets drop."""
    assert csv_cell(formula)[0] in ("'", "\\")
    assert csv_cell(formula).lstrip("'").startswith(formula[:1].replace("\r", "\\"))


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (None, ""),
        (True, "true"),
        (7, "7"),
        (-3, "-3"),
        (1.5, "1.5"),
        ({"b": "ü", "a": "\x1b"}, '{"a": "\\u001b", "b": "ü"}'),
    ],
)
def test_cells_of_other_kinds(value: object, cell: str) -> None:
    """Numbers stay numbers."""
    assert csv_cell(value) == cell
