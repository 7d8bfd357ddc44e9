"""Both ends of a link within one process: the agent's, and a reader that a test plays."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Self, TypeVar

from tests.support.programs import eventually
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.log_link import link_socket
from trainmedic_agent.log_link.agent_end import AgentEnd
from trainmedic_agent.log_link.frames import FrameStream
from trainmedic_agent.log_link.link_socket import LinkSocket
from trainmedic_agent.log_link.messages import (
    LARGEST_OF_AGENT,
    AgentMessage,
    FindingBatch,
    GpusNow,
    ReaderMessage,
    agent_message,
    encoded,
)

Message = TypeVar("Message", bound=AgentMessage)
LONG = 60.0
"""Seconds within which something must happen, however busy the machine is."""


class OneBatch:
    """A place for findings that takes one batch, as `FindingRelay` does."""

    def __init__(self) -> None:
        self.batch: FindingBatch | None = None

    def offer(self, batch: FindingBatch, generation: int) -> bool:
        if self.batch is not None:
            return False
        self.batch = batch
        return True


class LinkedAgent:
    """A `AgentEnd` at a socket in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.counters = AgentCounters()
        self.findings = OneBatch()
        self.now = 0.0
        self._readers: list[PlayedReader] = []
        socket = LinkSocket(directory, os.geteuid(), os.getegid())
        self.link = AgentEnd(socket, self.counters, lambda: self.now)
        self.link.offer = self.findings.offer

    def __enter__(self) -> Self:
        self.link.start()
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.socket.close()
        self.link.stop()

    def reader(self) -> PlayedReader:
        """Connect a reader, and greet it."""
        reader = self.connect()
        self.link.greet([GpusNow({})], self.link.generation)
        reader.gets(GpusNow)
        return reader

    def connect(self) -> PlayedReader:
        before = self.link.generation
        reader = PlayedReader(link_socket.connect(self.directory))
        self._readers.append(reader)
        eventually(lambda: self.link.generation > before and self.link.is_connected, LONG, "the link", every=0.01)
        return reader

    def lost_it(self) -> None:
        """Wait until the link is closed."""
        eventually(lambda: not self.link.is_connected, LONG, "the end of the link", every=0.01)


class PlayedReader:
    """The reader's end of a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.stream = FrameStream(connection, LARGEST_OF_AGENT)

    def send(self, message: ReaderMessage) -> None:
        self.stream.send(encoded(message))

    def gets(self, kind: type[Message]) -> Message:
        """The next message, which is of this kind."""
        message = agent_message(self.stream.receive())
        assert isinstance(message, kind)
        return message
