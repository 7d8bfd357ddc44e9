"""Texts of errors: the type always, and a cause where the error itself has no words."""

from __future__ import annotations

import pytest

from trainmedic.errors import NotAgreed, described, is_explained


class Mute(Exception):
    """An error of the user's code without usable text."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (raised(OSError(), ConnectionResetError(104, "reset")), "OSError: ConnectionResetError: [Errno 104] reset"),
        (raised(OSError("  "), EOFError()), "OSError: EOFError"),
        (Mute(), "Mute"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_is_described_by_type_and_cause(error: Exception, text: str) -> None:
    """No text ends in a colon."""
    assert described(error) == text


def test_a_chain_of_errors_without_texts_ends() -> None:
    """This holds even if the chain is circular."""
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    assert described(one).startswith("ValueError: KeyError")


def test_only_an_error_without_an_unexpected_cause_needs_no_traceback() -> None:
    """Of several ranks' errors, each rank raises its own kind, from the one that it had."""
    failed, refused = NotAgreed("rank 0: KeyError: 'w'"), NotAgreed("rank 0: the disk is full")
    failed.__cause__, refused.__cause__ = KeyError("w"), OSError(28, "No space left")
    assert [is_explained(error) for error in (failed, refused, refused.__cause__)] == [False, True, True]
    assert not is_explained(KeyError("w"))
