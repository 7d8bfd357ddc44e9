"""Which form of the history a client gets."""

from __future__ import annotations

import pytest

from trainmedic_server.http.negotiation import preferred

OFFERED = ("application/json", "application/x-ndjson", "text/csv")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "application/json"),
        ("", "application/json"),
        ("*/*", "application/json"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "application/json"),
        ("text/csv", "text/csv"),
        ("TEXT/CSV", "text/csv"),
        ("text/*", "text/csv"),
        ("application/json;q=0.5, application/x-ndjson", "application/x-ndjson"),
        ("application/x-ndjson; q=0.2, text/csv; header=present; q=0.9", "text/csv"),
        ("application/json;q=0, */*", "application/x-ndjson"),
        ("text/csv;q=odd", "application/json"),
        ("image/png", "application/json"),
        (",;q=,/,", "application/json"),
    ],
)
def test_the_most_wanted_form_is_given(accept: str | None, expected: str) -> None:
    """By quality, then in the order offered; JSON where nothing fits."""
    assert preferred(accept, OFFERED) == expected
