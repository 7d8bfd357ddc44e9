"""Reading JSON that anybody may have written."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmedic.wire.reading import DEEPEST, read_json, read_object, without_nul

SIMPLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Half a surrogate pair is no text.
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda children: (
        st.lists(children)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), children)
    ),
    max_leaves=20,
)


@given(SIMPLE, st.booleans())
def test_what_is_well_is_read_as_it_is(value: Any, ascii_only: bool) -> None:
    """However it is written."""
    assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize("depth", [DEEPEST + 1, 260, 1000, 5000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"]":', "}]")])
def test_what_is_deep_is_cut_and_the_rest_is_read(depth: int, opening: str, closing: str) -> None:
    """A reply whose output is deep says all the same what became of its command."""
    raw = f'{{"status":"applied","output":{opening * depth}1{closing * depth},"at":"now"}}'.encode()
    fields = read_object(raw)
    assert (fields["status"], fields["at"]) == ("applied", "now")
    assert "nested too deeply" in json.dumps(fields["output"])


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        rb'{"a": "\ud800"}',
        rb'{"\udc00\ud800": "\u0000"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\xff\xfe"}',
    ],
)
def test_what_no_database_takes_is_made_so_that_it_does(raw: bytes) -> None:
    """It can be written as strict JSON in UTF-8, and where that is asked for, without NUL."""
    value = read_object(raw)
    assert json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    assert "\\u0000" not in json.dumps(without_nul(value))


@pytest.mark.parametrize("digits", [301, 4300, 4301, 5000])
def test_integers_fit_floating_point(digits: int) -> None:
    """With any number of digits, also of those that Python would read: a reader may convert them."""
    longest = "9" * 300
    raw = f'{{"fits": {longest}, "long": {"9" * digits}, "negative": -{"9" * digits}}}'.encode()
    fields = read_object(raw)
    assert float(fields["fits"]) == 1e300
    assert fields["long"] == f"a whole number of {digits} digits"
    assert fields["negative"] == f"a whole number of {digits} digits"


@pytest.mark.parametrize("raw", [b"", b"[1]", b"nothing", b'{"a"', b'"text"', b"[" * 100_000, b'"' + b'\\"' * 100_000])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    """With ValueError, whatever it is."""
    with pytest.raises(ValueError):
        read_object(raw)


@given(st.binary(max_size=300))
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    """With no other error."""
    with contextlib.suppress(ValueError):
        read_object(raw)
