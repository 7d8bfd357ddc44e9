"""Protection against malformed and harmful answers of other servers."""

from __future__ import annotations

from http.cookiejar import CookieJar, DefaultCookiePolicy

UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Errors of reading a malformed answer: also numbers or times out of range (OverflowError) and arrays nested thousands
deep (RecursionError).
"""


def no_cookies() -> CookieJar:
    """Return a jar that stays empty: cookies would let an answer change later calls and fill the memory."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=[]))
