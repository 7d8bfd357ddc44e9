"""The connection's URL, and what the log says of a Redis that is away."""

from __future__ import annotations

import logging

import pytest
import redis

from trainmedic.wire import connection as connecting
from trainmedic.wire.connection import NoRedisUrl, OutageLog, RedisConnection, open_client


@pytest.mark.parametrize(
    "url", ["redis://:pw@localhost:6379/0", "rediss://localhost/0?ssl_ca_certs=/ca.crt", "unix:///run/redis.sock?db=1"]
)
def test_each_kind_of_url_makes_a_client(url: str) -> None:
    """Sockets that are files have other options than those of a network."""
    client = open_client(url)
    client.connection_pool.make_connection()
    client.close()


@pytest.mark.parametrize("url", ["redis://localhost/0?socket_timeout=soon", "redis://localhost/0?speed=high"])
def test_an_option_that_does_not_exist_is_found_at_once(url: str) -> None:
    """Not by a thread, when training has begun."""
    with pytest.raises((ValueError, TypeError)):
        open_client(url)


def test_an_error_of_another_kind_is_not_called_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    """Nor hidden by one."""
    outage, reader, writer = OutageLog("llm-1"), object(), object()
    outage.begin(reader, redis.ConnectionError("refused"))
    for _ in range(2):
        outage.begin(writer, KeyError("id"))
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "an unexpected error in messages with Redis (KeyError)" in caplog.messages[1]
    assert caplog.records[1].exc_info


def test_an_outage_is_one_line_and_its_end_another(caplog: pytest.LogCaptureFixture) -> None:
    """Both threads find it, and it is over when it is for both."""
    caplog.set_level(logging.INFO, "trainmedic")
    outage, reader, writer = OutageLog("llm-1"), object(), object()
    for _ in range(3):
        outage.begin(reader, redis.ConnectionError("refused"))
        outage.begin(writer, redis.TimeoutError())
    outage.end(writer)
    outage.begin(reader, redis.ConnectionError("refused"))
    assert len(caplog.messages) == 1
    outage.end(reader)
    outage.end(reader)
    assert [message.rpartition(":")[2].split()[0] for message in caplog.messages] == ["no", "connected"]


def test_a_bug_is_not_called_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    """It is told with its place in the code, also while Redis is away; once, however often it recurs."""
    outage, reader, writer = OutageLog("llm-1"), object(), object()
    outage.begin(reader, redis.ConnectionError("away"))
    for _ in range(3):
        try:
            raise KeyError("a bug")
        except KeyError as error:
            outage.begin(writer, error)
    assert [record.exc_info is not None for record in caplog.records] == [False, True]
    assert (
        caplog.messages[1]
        == "llm-1: an unexpected error in messages with Redis (KeyError); training continues, trying again"
    )


def test_a_refusal_is_told_once_though_redis_answers_others(caplog: pytest.LogCaptureFixture) -> None:
    """By its first word: the rest may repeat what Redis was sent."""
    caplog.set_level(logging.INFO, "trainmedic")
    outage, reader, writer = OutageLog("llm-1"), object(), object()
    for _ in range(5):
        outage.begin(reader, redis.ResponseError("WRONGTYPE Operation against secret"))
        outage.end(writer)
    outage.begin(writer, redis.ResponseError("unknown command 'secret'"))
    assert [message.partition("(")[2].partition(")")[0] for message in caplog.messages] == [
        "ResponseError: WRONGTYPE",
        "ResponseError",
    ]


def test_a_missing_url_is_reported_in_words(caplog: pytest.LogCaptureFixture) -> None:
    """The server has not written one yet."""
    OutageLog("llm-1").begin(object(), NoRedisUrl("no URL is set"))
    assert "(no URL is set)" in caplog.text


def test_an_invalid_answer_is_reported_with_its_source(caplog: pytest.LogCaptureFixture) -> None:
    """It is reported once, although it is repeated with each try."""
    outage, reader = OutageLog("llm-1"), object()
    for _ in range(3):
        outage.begin(reader, TypeError("'int' object is not subscriptable"))
    (record,) = caplog.records
    assert record.exc_info is not None


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), True),
        (redis.exceptions.ExecAbortError("Transaction discarded because of previous errors."), True),
        (redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), True),
        (redis.ResponseError("Command # 1 (XADD s * a\nb) of pipeline caused error: WRONGTYPE Operation"), True),
        (redis.exceptions.ReadOnlyError("You can't write against a read only replica."), False),
        (redis.TimeoutError("Timeout reading from socket"), False),
    ],
)
def test_a_full_redis_keeps_its_connections(
    error: redis.RedisError, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis may refuse a command or a transaction; a new connection would not help."""
    monkeypatch.setattr(connecting, "_check_room", lambda client: None)
    connection = RedisConnection(lambda: "redis://127.0.0.1:1", OutageLog("the job"))
    with connection.turn() as first:
        pass
    with pytest.raises(type(error)), connection.turn():
        raise error
    with connection.turn() as second:
        assert (second is first) == is_kept
    connection.close()
