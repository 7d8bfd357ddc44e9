"""Answers of a container engine that are broken, too large or late, from a stand-in at the other end of the socket.

The stand-in models no engine: it writes the bytes that a test gives it. What Docker itself answers is tested with
Docker, in ``tests/integration/agent``.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainmedic_agent.containers.engine_api import ContainerEngine, EngineAnswer
from trainmedic_agent.errors import CommandFailed, CommandUnsupported


@contextmanager
def answering(path: Path, answer: bytes, *, stays_open: bool = False) -> Iterator[ContainerEngine]:
    """An engine that gives one answer, and then closes the connection or leaves it open."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        over = threading.Event()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                try:
                    connection.sendall(answer)
                except OSError:
                    return  # the client has read enough
                if stays_open:
                    over.wait(10)

        server = threading.Thread(target=serve)
        server.start()
        try:
            yield ContainerEngine(str(path))
        finally:
            over.set()
            server.join()


def said(status: str, body: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status.encode(), length or len(body)) + body


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"", "gave no answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "gave no answer"),
        (said("200 OK", b"{"), "gave no answer"),
        (said("200 OK", b"\xff\xfe"), "gave no answer"),
        (said("200 OK", b"[]", 100), "gave no answer"),
        (said("200 OK", b"{}"), "is no list of objects"),
        (said("200 OK", b"[1]"), "is no list of objects"),
        (said("200 OK", b""), "is no list of objects"),
        (said("200 OK", b"[" + b" " * (64 * 2**20) + b"]"), "larger than 64 MiB"),
    ],
)
def test_a_broken_answer_is_reported_as_a_failure(tmp_path: Path, answer: bytes, told: str) -> None:
    """Nothing is removed because of an answer that was not understood."""
    with answering(tmp_path / "s", answer) as engine, pytest.raises(CommandFailed, match=told):
        engine.containers(5)


def test_an_unresponsive_engine_is_awaited_no_longer_than_requested(tmp_path: Path) -> None:
    """The reply must reach the server before the command expires."""
    with (
        answering(tmp_path / "s", b"", stays_open=True) as engine,
        pytest.raises(CommandFailed, match="did not answer"),
    ):
        engine.containers(0.2)


def test_a_refusal_contains_the_engines_own_sentence_on_one_line(tmp_path: Path) -> None:
    """The sentence tells the reader what to do; text that is not JSON is quoted unchanged."""
    body = b'{"message": "conflict:\\n unable to delete"}'
    with answering(tmp_path / "s", said("409 Conflict", body)) as engine, pytest.raises(EngineAnswer) as refused:
        engine.remove_image("a:1", 5)
    assert (refused.value.status, str(refused.value)) == (409, "conflict: unable to delete")
    with answering(tmp_path / "t", said("500 No", b"<html>")) as engine, pytest.raises(EngineAnswer, match="<html>"):
        engine.info(5)


def test_an_inaccessible_or_missing_socket_is_reported(tmp_path: Path) -> None:
    """Both messages state the remedy."""
    with pytest.raises(CommandUnsupported, match="name its socket in the policy"):
        ContainerEngine(str(tmp_path / "none")).info(1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandFailed, match="gave no answer"):
        ContainerEngine(str(tmp_path / "file")).info(1)
