"""The reader's composition root: gives up its rights, waits for the agent, and reads what the agent's policy names.

A process serves one link. When the link ends, the process ends too, or starts anew to wait for the next agent.

Who calls it: ``cli.agent_reader``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from trainmedic_server.agent.counters import AgentCounters
from trainmedic_server.agent.database import AgentDatabase
from trainmedic_server.agent.log_link import link_socket, reader_directory, reader_process
from trainmedic_server.agent.log_link.agent_session import AgentSession
from trainmedic_server.agent.log_link.frames import FrameFault, FrameStream, LinkClosed
from trainmedic_server.agent.log_link.messages import LARGEST_OF_AGENT
from trainmedic_server.agent.log_reading.reading_context import ReadingContext
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.settings.agent_reader import ReaderSettings
from trainmedic_server.wiring.agent_logs import LogReading

log = logging.getLogger(__name__)

_CONNECT_EVERY = 0.5
_OPEN_SECONDS = 20.0
"""Time for which the process before may still have the database."""
_STOP_SECONDS = 2.5
_LOOK_SECONDS = 0.5


def run(settings: ReaderSettings, stopping: threading.Event, *, once: bool) -> None:
    """Serve an agent until its link ends or `stopping` is set. Raises ConfigurationError, JournalUnavailable.

    Without `once` the process then starts anew, and waits for the next agent.
    """
    user = reader_process.reader_user(settings.reader_user)
    if not reader_process.may_become(user):
        user = reader_process.ReaderUser(os.geteuid(), os.getegid())
    reader_process.confine(user, settings.reader_memory, parent=os.getppid() if once else None)
    while (stream := _connected(settings.state_dir)) is None:
        if once or stopping.wait(_CONNECT_EVERY):
            return
    _serve(AgentSession(stream), settings.state_dir, stopping)
    if not once and not stopping.is_set():
        log.info("the agent has ended; waiting for the next one")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        os.execv(sys.executable, [sys.executable, "-m", "trainmedic_server", *sys.argv[1:]])  # noqa: S606


def _connected(directory: Path) -> FrameStream | None:
    try:
        return FrameStream(link_socket.connected(directory), LARGEST_OF_AGENT)
    except OSError:
        return None


def _serve(session: AgentSession, directory: Path, stopping: threading.Event) -> None:
    try:
        welcome = session.greeted()
    except (LinkClosed, FrameFault) as error:
        log.warning("the agent has not greeted the reader of logs", extra={"reason": str(error)})
        return
    with contextlib.closing(_database(directory / reader_directory.NAME, stopping)) as database:
        context = ReadingContext(welcome.boot.node, database, AgentCounters())
        reading = LogReading(context, welcome.policy, welcome.boot, session)
        reading.start()
        session.serve(reading)
        log.info("reading logs", extra={"node": welcome.boot.node})
        while not session.ended.wait(_LOOK_SECONDS) and not stopping.is_set():
            continue
        reading.stop(_STOP_SECONDS)
        session.close()


def _database(directory: Path, stopping: threading.Event) -> AgentDatabase:
    """Open the reader's database. Raises ConfigurationError, JournalUnavailable."""
    until = time.monotonic() + _OPEN_SECONDS
    while True:
        try:
            return AgentDatabase(directory)
        except ConfigurationError:
            if time.monotonic() > until or stopping.wait(_CONNECT_EVERY):
                raise
