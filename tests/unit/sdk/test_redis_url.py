"""URLs of a Redis behind Sentinels."""

from __future__ import annotations

import pytest

from trainmedic.wire.connection import open_client
from trainmedic.wire.redis_url import behind_sentinels


def test_a_url_names_sentinels_and_the_master() -> None:
    """Everything else in it is the master's, and what is called so the Sentinels'."""
    found = behind_sentinels("redis+sentinel://u:p%40w@a,b:1,[::1]:2/my/3?sentinel_password=x&socket_timeout=2")
    assert found is not None
    assert (found.sentinels, found.master) == ((("a", 26379), ("b", 1), ("::1", 2)), "my")
    assert found.options == {"username": "u", "password": "p@w", "db": 3, "socket_timeout": 2.0}
    assert found.sentinel_options == {"password": "x"}


def test_tls_is_for_both() -> None:
    """With the same authority."""
    found = behind_sentinels("rediss+sentinel://a/my?ssl_ca_certs=/ca.crt")
    assert found is not None
    assert found.options == found.sentinel_options == {"ssl": True, "ssl_ca_certs": "/ca.crt"}


@pytest.mark.parametrize("url", ["redis://a:1/0", "rediss://a", "unix:///redis.sock"])
def test_other_urls_are_left_to_redis_py(url: str) -> None:
    """They name a Redis."""
    assert behind_sentinels(url) is None


@pytest.mark.parametrize(
    "end", ["", "a", "a/", "/my", "a,,b/my", "a:x/my", "a:99999/my", "a/my?socket_timeout=no", "a/my?no_option=1"]
)
def test_what_cannot_be_read_is_refused_before_anything_is_asked(end: str) -> None:
    """As with every other URL."""
    with pytest.raises((ValueError, TypeError)):
        open_client(f"redis+sentinel://{end}")
