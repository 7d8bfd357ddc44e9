"""Redis URLs that do not say what they seem to say."""

from __future__ import annotations

import socket

import pytest
from redis import exceptions

import trainmedic
from trainmedic.job.connect_options import check_url
from trainmedic.launch.membership import NodeExclusions
from trainmedic.launch.server_link import open_link
from trainmedic.settings import resolve
from trainmedic.wire.connection import open_client
from trainmedic.wire.redis_url_check import check_redis_url
from trainmedic_agent.settings import agent
from trainmedic_server.adapters import redis_connection
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.settings import server

GOOD = [
    *("redis://", "redis://:6379/0", "redis://h", "redis://h/", "redis://h:/2/", "redis://:p%2Fw@[::1]:1/15?db=3"),
    *("rediss://u:p@h?ssl_ca_certs=/ca.crt", "unix:///run/r.sock?db=1", "unix://u:p@/r.sock", "redis://:a,b c@h/0"),
    *("redis+sentinel://a,b:1,c/m", "redis+sentinel://u:p%40@a:26379/m-1.x_/3", "rediss+sentinel://a_b/m/"),
]
SENTINEL = "redis+sentinel://:hunter2@"
WRONG = [
    (SENTINEL + "h:26379//0", "the master's name after the Sentinels"),
    (SENTINEL + "h:26379", "the master's name after the Sentinels"),
    (SENTINEL + "h/m/0/1", "number of a database"),
    (SENTINEL + "h/m/x", "number of a database"),
    (SENTINEL + "h/m/-1", "number of a database"),
    (SENTINEL + "h/a b", "a master's name of letters"),
    (SENTINEL + "h:0/m", "port from 1 to 65535"),
    (SENTINEL + "h:abc/m", "port from 1 to 65535"),
    (SENTINEL + "a,b:99999/m/0", "port from 1 to 65535"),
    (SENTINEL + "h /m/0", "a name or an address as the host of each Sentinel"),
    (SENTINEL + "::1/m", "host of each Sentinel"),
    (SENTINEL + "a,,b/m", "must name the host of each Sentinel"),
    (SENTINEL + "/m", "must name the host of each Sentinel"),
    (SENTINEL + "h/m?bogus=1", "an unknown option after [?]: bogus"),
    (SENTINEL + "h/m?socket_timeout=no", "with an invalid value: socket_timeout"),
    (SENTINEL + "h/m?service_name=x", "an unknown option after [?], or"),
    ("redis://:hunter2@h/x", "number of a database"),
    ("redis://:hunter2@h/0/1", "number of a database"),
    ("redis://:hunter2@h/-1", "number of a database"),
    ("redis://:hunter2@h?db=-1", "number of a database, from 0, as its option db"),
    ("redis://:hunter2@h?db=foo", "number of a database, from 0, as its option db"),
    ("redis://:hunter2@h:0", "port from 1 to 65535"),
    ("redis://:hunter2@h:abc", "port from 1 to 65535"),
    ("redis://:hunter2@a,b", "host of Redis"),
    ("redis://:hunter2@[x]", "host of Redis|must be a valid URL"),
    ("redis://:hunter2[x]@h", "must be a valid URL"),
    ("redis://:hunter2@h?bogus=1", "unknown option after [?]: bogus"),
    ("redis://:hunter2@h\n", "control characters"),
    ("rediss://:hunter2@h?ssl_cert_reqs=foo", "option after [?]"),
    ("unix://run/redis.sock", "three slashes"),
    ("unix://", "must name the socket"),
    ("http://:hunter2@h", "begins with redis://"),
    # What is special in a password was not written %XX: a part of it seems to be something else.
    ("redis://:hunter2/x@h:6379/0", "%XX"),
    ("redis://:hunter2?x@h:6379/0", "%XX"),
    ("redis://:1#hunter2@h:6379/0", "%XX"),
    ("redis://:1?hunter2=@h:6379/0", "an unknown option after [?], or"),
]


@pytest.mark.parametrize("url", GOOD)
def test_a_url_that_says_what_it_means_is_taken(url: str) -> None:
    """By the settings of the server, of agents and of jobs, and by their clients."""
    check_redis_url(url)
    open_client(url).close()
    redis_connection.open_client(url)
    assert server.load({"redis": url}, {}).redis
    assert agent.load({}, {"TRAINMEDIC_REDIS_URL": url}).redis == url
    check_url(resolve("llm", url, None, 0, 1, {}))


@pytest.mark.parametrize(("url", "why"), WRONG)
def test_a_mistake_is_refused_with_the_setting_and_the_part_that_is_wrong(url: str, why: str) -> None:
    """Nothing is dropped, or taken for something else; and nothing of the URL is shown, which may hold a password."""
    for origin, refuse in {
        "--redis": lambda: server.load({"redis": url}, {}),
        "TRAINMEDIC_REDIS_URL": lambda: server.load({}, {"TRAINMEDIC_REDIS_URL": url}),
    }.items():
        refused_by(refuse, origin, why)
    refused_by(lambda: agent.load({"redis": url}, {}), "--redis", why)
    refused_by(lambda: agent.load({}, {"TRAINMEDIC_REDIS_URL": url}), "TRAINMEDIC_REDIS_URL", why)
    refused_by(lambda: redis_connection.open_client(url), "the Redis URL (--redis, TRAINMEDIC_REDIS_URL)", why)


@pytest.mark.parametrize(("url", "why"), WRONG)
def test_so_it_is_of_a_job(url: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is connected."""
    refused_by(lambda: trainmedic.connect(job="llm", redis_url=url, rank=0, world_size=1), "redis_url", why)
    monkeypatch.setenv("TRAINMEDIC_REDIS_URL", url)
    refused_by(lambda: trainmedic.connect(job="llm", rank=0, world_size=1), "TRAINMEDIC_REDIS_URL", why)


def test_a_launcher_says_so_and_launches(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A job is launched whatever is wrong with its settings."""
    monkeypatch.setenv("TRAINMEDIC_REDIS_URL", "redis://:hunter2@h/x")
    assert open_link("llm", NodeExclusions("n1", starts_all_nodes=False), {}) is None
    (message,) = caplog.messages
    assert message.startswith("cannot report to the server: TRAINMEDIC_REDIS_URL: must have the number of a database")


def refused_by(read: object, origin: str, why: str) -> None:
    """`read` raises what names its `origin`, and why; neither it nor what it came of has the password."""
    assert callable(read)
    with pytest.raises(ConfigurationError, match=why) as refused:
        read()
    assert str(refused.value).startswith(origin)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "cause",
    [ConnectionRefusedError(), socket.gaierror(), FileNotFoundError(), exceptions.AuthenticationError("invalid")],
)
def test_the_reason_of_an_outage_names_redis(cause: Exception) -> None:
    """``GET /jobs`` said that nothing listens at the host and port of the URL, and not of which."""
    error = exceptions.ConnectionError("connecting")
    error.__cause__ = cause
    assert "Redis" in str(redis_connection.unavailable(error, "rediss://h"))
