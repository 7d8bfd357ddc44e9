"""Composition root of the log reader.

The first process receives the agent's greeting and forks. The parent keeps the rights to open files and reads no
content. The child drops all rights, serves the link and reads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainmedic.errors import ConfigurationError, TrainmedicError
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.database import AgentDatabase
from trainmedic_agent.log_link import link_socket, reader_directory, reader_process
from trainmedic_agent.log_link.frames import FrameFault, FrameStream, LinkClosed
from trainmedic_agent.log_link.messages import LARGEST_OF_AGENT, Welcome
from trainmedic_agent.log_link.reader_end import ReaderEnd
from trainmedic_agent.log_opening.node_files import NodeFiles
from trainmedic_agent.log_opening.opener import FileOpener
from trainmedic_agent.log_opening.opener_client import OpenerClient
from trainmedic_agent.log_opening.thread_rights import ThreadRights
from trainmedic_agent.log_reading import kernel_log
from trainmedic_agent.log_reading.reading_context import ReadingContext
from trainmedic_agent.settings.agent_reader import ReaderSettings
from trainmedic_agent.wiring.agent_files import node_files
from trainmedic_core import kill_as_user
from trainmedic_core.program_source import ProgramSource

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5  # between links or attempts to connect, and attempts to open the database
_OPEN_SECONDS = 20.0  # seconds that the previous process may need to release the database
_STOP_SECONDS = 2.5  # for reading to stop
_LOOK_SECONDS = 0.5  # between looks for the end
_HANG_SECONDS = 10.0  # from the link's end to the child's
_SIGNAL_STATUS = 128  # plus the number of the signal, as in shells
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(settings: ReaderSettings, *, once: bool) -> int:
    """Serve agents until SIGTERM; with `once`, until the first link ends.

    Returns the last reading process's exit status, from 128 after a signal. Raises ConfigurationError.
    """
    status = 0
    user, reason = reader_process.usable_user(settings.reader_user, [settings.state_dir], is_started=True)
    if reason is not None and not once:  # for a child of the agent, the agent has logged it
        log.warning("reading logs as the opener's own user", extra={"reason": reason, "user": user.uid})
    has_rights = reader_process.has_rights_to_read()
    parent = os.getppid() if once else None
    if has_rights:
        try:
            ThreadRights().keep_only_these(reader_process.CAP_SYSLOG)
        except OSError as error:
            raise ConfigurationError(f"the log reader cannot drop its rights: {error.strerror or error}") from error
    if parent is not None:
        reader_process.end_with(parent)
    stopping = _StopRequest()
    while not stopping.is_requested:
        try:
            stream = FrameStream(link_socket.connect(settings.state_dir), LARGEST_OF_AGENT)
        except OSError as error:
            if once:
                raise ConfigurationError(f"the agent cannot be reached: {error.strerror or error}") from error
            time.sleep(_RETRY_SECONDS)
            continue
        greeting = _greeting(stream)
        if greeting is not None:
            reading = _Reading(settings, user, *greeting)
            status = _serve_by_child(reading, stopping, has_rights=has_rights)
        stream.release()
        if once:
            break
        log.info("link to the agent ended; waiting for the next")
        time.sleep(_RETRY_SECONDS)
    return status


class _StopRequest:
    """SIGTERM or SIGINT, passed to the child by closing a pipe: signalling another user's process needs a right."""

    def __init__(self) -> None:
        self.is_requested = False
        self._pipe: int | None = None
        for number in _SIGNALS:
            signal.signal(number, self._handle_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # inherited from the agent, which blocks them

    def pass_to_child(self, pipe: int) -> None:
        self._pipe = pipe
        if self.is_requested:
            self._close()

    def child_ended(self) -> None:
        self._close()

    def _handle_signal(self, *_: object) -> None:
        self.is_requested = True
        self._close()

    def _close(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)


class _Reading:
    def __init__(
        self, settings: ReaderSettings, user: reader_process.ReaderUser, link: ReaderEnd, welcome: Welcome
    ) -> None:
        self._settings = settings
        self.user = user
        self._link = link
        self.welcome = welcome
        self.stream = link.stream

    def run(self, stop_pipe: int, files: NodeFiles, parent: int, *, takes_rights: bool) -> None:
        """Read until the link ends or the pipe `stop_pipe` is closed. Raises TrainmedicError."""
        # Import now: after confinement the program's files may be inaccessible. Only this process needs these modules.
        from trainmedic_agent.wiring.agent_logs import PROGRAMS, LogReading, load

        load(self.welcome.policy)
        own = os.getpid()
        # Another process, which can start parsers of dumps even after this one's confinement.
        programs = ProgramSource.forked(PROGRAMS, lambda: self._confine(own))
        self._confine(parent)
        stopping = threading.Event()
        threading.Thread(target=_wait_for_stop, args=(stop_pipe, stopping), daemon=True).start()
        link, welcome = self._link, self.welcome
        directory = self._settings.state_dir / reader_directory.NAME
        with contextlib.closing(_database(directory, stopping)) as database:
            context = ReadingContext(welcome.boot.node, database, AgentCounters())
            reading = LogReading(
                context,
                welcome.policy,
                welcome.boot,
                link,
                files,
                takes_rights=takes_rights,
                start_program=programs.start,
            )
            reading.start()
            link.serve(reading)
            log.info("reading logs", extra={"node": welcome.boot.node, "user": os.geteuid()})
            while not link.ended.wait(_LOOK_SECONDS) and not stopping.is_set() and not programs.has_ended:
                continue
            reading.stop(_STOP_SECONDS)
            link.close()
        if programs.has_ended:
            raise TrainmedicError("the process that starts the parsers has ended")

    def _confine(self, parent: int) -> None:
        reader_process.confine(self.user, self._settings.reader_memory)
        reader_process.end_with(parent)


def _greeting(stream: FrameStream) -> tuple[ReaderEnd, Welcome] | None:
    """Return None after a logged failure."""
    link = ReaderEnd(stream)
    try:
        return link, link.wait_for_welcome()
    except (LinkClosed, FrameFault) as error:
        log.warning("agent did not greet the log reader", extra={"reason": str(error)})
        return None


def _serve_by_child(reading: _Reading, stopping: _StopRequest, *, has_rights: bool) -> int:
    stop_pipe, stop_writer = os.pipe()
    opener_socket, client_socket = socket.socketpair()
    files = node_files(reading.welcome.policy)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(stop_writer)
        opener_socket.close()
        child_files: NodeFiles = OpenerClient(client_socket) if has_rights else files
        _run_as_child(lambda: reading.run(stop_pipe, child_files, parent, takes_rights=files.takes_rights), child_files)
    os.close(stop_pipe)
    client_socket.close()
    stopping.pass_to_child(stop_writer)
    child_ended = threading.Event()
    watch = threading.Thread(target=_end_if_child_hangs, args=(reading, child, child_ended))
    watch.start()
    if has_rights:
        FileOpener(files).serve(opener_socket)
    opener_socket.close()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    child_ended.set()
    reading.stream.close()
    watch.join()
    stopping.child_ended()
    return status if status >= 0 else _SIGNAL_STATUS - status


def _end_if_child_hangs(reading: _Reading, child: int, child_ended: threading.Event) -> None:
    reading.stream.wait_for_end()
    if not child_ended.wait(_HANG_SECONDS):
        log.error("log reader does not end; killing it")
        kill_as_user.kill(child, reading.user.uid)
        os._exit(1)


def _run_as_child(read: Callable[[], None], files: NodeFiles) -> None:
    status = 1
    try:
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)  # the parent receives them too, and passes them on
        kernel_log.open_kmsg = files.open
        read()
        status = 0
    except TrainmedicError as error:
        log.error("cannot read logs", extra={"reason": str(error)})
    except BaseException:  # process boundary: no code of the parent may run in the child
        log.exception("log reader failed unexpectedly")
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait_for_stop(stop_pipe: int, stopping: threading.Event) -> None:
    os.read(stop_pipe, 1)
    stopping.set()


def _database(directory: Path, stopping: threading.Event) -> AgentDatabase:
    until = time.monotonic() + _OPEN_SECONDS
    while True:
        try:
            return AgentDatabase(directory)
        except ConfigurationError:
            if time.monotonic() > until or stopping.wait(_RETRY_SECONDS):
                raise
