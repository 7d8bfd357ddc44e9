"""Which URLs lead anywhere."""

from __future__ import annotations

import pytest

from trainmedic_core.http_url import check_http_url, without_user

GOOD = [
    *(
        "http://h",
        "https://h:4318/v1?x=1",
        "HTTP://H/",
        "http://10.1.2.3:1",
        "http://[::1]:65535",
        "http://[fe80::1%25e]",
    ),
    *("http://u:p%40@a_b.example.", "http://büro.example", "http://h:/"),
    *("http://h:8443/t/@team", "http://h:80/?q=a@b.c", "http://h/@x", "http://u:p@h/a@b", "http://[::1]:80/x@y"),
]
ESCAPED = "@ is written %40"
HOST, SCHEME, PORT, ONE, PLAIN = (
    "must name a host",
    "begins with http://",
    "from 1 to 65535",
    "one host",
    "without spaces",
)
WRONG = [
    *((url, ESCAPED) for url in ("http://u:hunter@2@h", "https://@hunter2@@h:1/x", "http://u:hunter2/x@h:80")),
    *((url, ESCAPED) for url in ("http://u:hunter2#x@h", "http://u:hunter2?x=1@h", "http://u:17/hunter2@h.example/x")),
    *((url, HOST) for url in ("http://", "https:///path", "http://:9090", "http://u:hunter2@", "http://?x")),
    *((url, SCHEME) for url in ("", "h:9090", "ftp://h", "http:/h", "//h", "http:h", " http://h")),
    *((url, PORT) for url in ("http://h:99999", "http://h:0", "http://h:-1", "http://h:x", "http://u:hunter2@h:9_9")),
    *((url, ONE) for url in ("http://a,b:9093", "http://a..b", "http://[::1", "http://[x]", "http://[hunter2@h")),
    *((url, ONE) for url in ("http://" + "a" * 64, "http://a@b%20c")),
    *((url, PLAIN) for url in ("http://a b", "http://h\t", "http://h\n", "http://h\\x")),
]


@pytest.mark.parametrize("url", GOOD)
def test_a_url_of_a_host_can_be_called(url: str) -> None:
    """By name or address, with a port or without."""
    assert check_http_url(url).hostname


@pytest.mark.parametrize(("url", "why"), WRONG)
def test_what_leads_nowhere_is_refused(url: str, why: str) -> None:
    """With what is wrong, and never the URL, which may hold a password."""
    with pytest.raises(ValueError, match=why) as refused:
        check_http_url(url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h:1/x", "http://h:1/x"),
        ("http://u:hunter2@h:1/x", "http://h:1/x"),
        ("http://u:hun@ter/2@h", "http://h"),
        ("u:hunter2@h", "h"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_user(url: str, shown: str) -> None:
    """Also one that is not escaped."""
    assert without_user(url) == shown
