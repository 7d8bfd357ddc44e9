"""Defences against foreign answers."""

from __future__ import annotations

from http.cookiejar import CookieJar, DefaultCookiePolicy

UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Errors of reading a malformed answer, also for numbers out of range (OverflowError) and deep arrays (RecursionError).
"""


def no_cookies() -> CookieJar:
    """Return a jar that stays empty: cookies would let an answer change later calls."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=[]))
