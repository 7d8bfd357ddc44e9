"""What can be wrong with an answer of another server: its form, and documents that are made to do harm.

Who calls it: the adapters that read JSON of other servers.
"""

from __future__ import annotations

from http.cookiejar import CookieJar, DefaultCookiePolicy

UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What reading an answer of another form raises. OverflowError: a number or time beyond what Python can hold.
RecursionError: arrays nested thousands deep."""


def no_cookies() -> CookieJar:
    """Return a jar that stays empty.

    An HTTP client keeps cookies by itself. Then an answer changes the later calls, also those of others, and a server
    that always sets another cookie fills the memory.
    """
    return CookieJar(DefaultCookiePolicy(allowed_domains=[]))
