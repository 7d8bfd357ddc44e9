"""Program that imports PyTorch in advance, then runs torchrun and the ranks as its forks.

``trainmedic-run --warm`` runs ``warm.py <order socket> <threads>`` by its path in torchrun's interpreter. The order is
JSON: ``argv``, ``environment`` and torchrun's arguments, ``torchrun``; the answer is `READ`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Callable, NoReturn

READ = b"1"
_LONGEST_MESSAGE = 1 << 20  # bytes
# Bytes that sockets with default buffers accept as one message. A rank with a longer request starts without a fork.
_LONGEST_REQUEST = 1 << 16
_POLL_SECONDS = 0.05
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_THREADS = "OMP_NUM_THREADS"
# torch._dynamo, which the first optimizer imports, takes as long as PyTorch.
_OTHER_IMPORTS = ("numpy", "torch._dynamo", "trainmedic.torch", "trainmedic.distributed")


def main(orders: int, threads: str) -> NoReturn:
    """Import slow modules, wait for the order, and execute it. `threads`: torchrun's OMP_NUM_THREADS."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)  # the directory of this file
    os.set_inheritable(orders, False)
    gc.disable()
    reason = _import_torch(threads)
    # Imports stay to the end. A garbage collection in a fork would copy all of their pages.
    gc.freeze()
    gc.enable()
    order = _read_order(orders)
    if order is None:
        os._exit(0)  # the launcher ended
    os.environ.clear()
    os.environ.update(order["environment"])
    if not reason and threading.active_count() > 1:
        reason = "an import started a thread"
    if reason:
        sys.stderr.write(f"trainmedic-run: --warm has no effect: {reason}\n")
        sys.stderr.flush()
        _execute(order["argv"])
    _serve(order)


def _import_torch(threads: str) -> str:
    """Return why forks cannot use PyTorch, or ""."""
    before = os.environ.copy()
    if threads:
        os.environ[_THREADS] = threads
    try:
        import torch
        import torch.distributed.run
        import torch.nn.parallel
        import torch.utils.data
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        for name in _OTHER_IMPORTS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return "the import of PyTorch initialised a device"
        if not hasattr(subprocess_handler.SubprocessHandler, "_popen"):
            return "this version of torchrun starts its ranks in another way"
    except Exception as error:  # the job then starts without it
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(before)
    return ""


def _read_order(orders: int) -> dict[str, Any] | None:
    received = b""
    while chunk := os.read(orders, 1 << 16):
        received += chunk
    if received:
        with contextlib.suppress(OSError):
            os.write(orders, READ)
    os.close(orders)
    return json.loads(received) if received else None


def _execute(argv: list[str]) -> NoReturn:
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - the user's own command
    except OSError as error:
        sys.stderr.write(f"{argv[0]} cannot be started: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


def _serve(order: dict[str, Any]) -> NoReturn:
    """Fork torchrun, then each rank that it requests; end as torchrun ends."""
    own, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    torchrun = os.fork()
    if torchrun == 0:
        own.close()
        run = functools.partial(_run_torchrun, order["torchrun"], order["environment"], its_end)
        _end_quickly(lambda: _run(run), skips_teardown=True)
    its_end.close()

    def pass_on(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(torchrun, number)

    for stopping in _STOPPING:
        signal.signal(stopping, pass_on)
    ranks: set[int] = set()
    while True:
        if select.select([own], [], [], _POLL_SECONDS)[0] and (pid := _fork_rank(own)):
            ranks.add(pid)
        for pid in sorted(ranks):
            code = _status_if_ended(pid)
            if code is not None:
                ranks.discard(pid)
                with contextlib.suppress(OSError):
                    own.send(json.dumps({"ended": pid, "status": code}).encode())
        code = _status_if_ended(torchrun)
        if code is not None:
            _end_as(code)


def _status_if_ended(pid: int) -> int | None:
    # WNOWAIT: the process ID is not reused while torchrun may signal it.
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _end_as(code: int) -> NoReturn:
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _fork_rank(own: socket.socket) -> int:
    """Fork a requested rank and send its process ID; 0 at the end of the requests."""
    try:
        message, streams, _, _ = socket.recv_fds(own, _LONGEST_MESSAGE, 2)
    except ConnectionResetError:  # torchrun was killed before it read all messages
        return 0
    if not message:
        return 0
    request = json.loads(message)
    group_led, group_led_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        for stopping in _STOPPING:
            signal.signal(stopping, signal.default_int_handler if stopping == signal.SIGINT else signal.SIG_DFL)
        os.setsid()
        own.close()
        os.close(group_led)
        os.close(group_led_end)  # torchrun may signal the process group from now on
        for place, stream in enumerate(streams, 1):
            os.dup2(stream, place)
            os.close(stream)
        for name in request["removed"]:
            os.environ.pop(name, None)
        os.environ.update(request["changed"])
        _end_quickly(lambda: _run(lambda: _run_rank(request["argv"])), skips_teardown=False)
    os.close(group_led_end)
    os.read(group_led, 1)  # until the rank leads its process group
    os.close(group_led)
    for stream in streams:
        os.close(stream)
    own.send(json.dumps({"pid": pid}).encode())
    return pid


def _run(work: Callable[[], None]) -> NoReturn:
    """Do a process's work; raise errors as Python's main program would."""
    try:
        work()
    except SystemExit:
        raise
    except BaseException as error:  # the process ends as Python would end it
        error.__traceback__ = _without_own_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None  # it has been called
            raise  # Python ends by SIGINT
        raise SystemExit(1) from None
    raise SystemExit(0)


def _end_quickly(work: Callable[[], NoReturn], *, skips_teardown: bool) -> NoReturn:
    """Do a process's work.

    After a failure, or with `skips_teardown`, skip Python's teardown, which would copy pages.
    """
    try:
        work()
    except SystemExit as end:
        if not end.code and not skips_teardown:
            raise
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    try:
        threading._shutdown()  # type: ignore[attr-defined] # what Python calls first at its end
        atexit._run_exitfuncs()
        for one in gc.get_objects():  # without objects from before the fork
            if issubclass(type(one), io.IOBase):
                _flush(one)
        _flush(sys.stdout)
        _flush(sys.stderr)
    finally:  # else an error would continue in the code of the forking process
        os._exit(code & 0xFF)


def _flush(stream: Any) -> None:
    with contextlib.suppress(Exception):  # classes of the program may raise anything
        stream.flush()


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _run_torchrun(arguments: list[str], environment: dict[str, str], link: socket.socket) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.run import main as torchrun

    ranks = _Ranks(link, environment)
    cold = subprocess_handler.SubprocessHandler._popen

    def start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if args[0] != sys.executable or not _program_arguments(list(args)):
            return cold(handler, args, env)
        request = ranks.request(list(args), env)
        if len(request) > _LONGEST_REQUEST:
            return cold(handler, args, env)
        return ranks.start(list(args), request, [handler._stdout, handler._stderr])

    subprocess_handler.SubprocessHandler._popen = start  # type: ignore[assignment]
    sys.argv = ["torchrun", *arguments]
    torchrun(arguments)


def _program_arguments(argv: list[str]) -> list[str]:
    """Return the program and its arguments; empty for forms that a fork cannot run."""
    rest = argv[2:] if argv[1:2] == ["-u"] else argv[1:]
    if rest[:1] == ["-m"]:
        return rest if len(rest) > 1 else []
    if not rest or rest[0].startswith("-") or rest[0].endswith(".pyc") or not Path(rest[0]).is_file():
        return []
    return [] if zipfile.is_zipfile(rest[0]) else rest


def _run_rank(argv: list[str]) -> None:
    _set_threads()
    _seed()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    program, sys.orig_argv = _program_arguments(argv), argv
    # The new main module stays until the process ends: exit functions and threads pickle its classes.
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = vars(main_module)
    names["__builtins__"] = sys.modules["builtins"]
    is_safe = getattr(sys.flags, "safe_path", False)
    if program[0] == "-m":
        sys.argv = program[1:]
        if not is_safe:
            sys.path.insert(0, str(Path.cwd()))
        runpy._run_module_as_main(program[1])  # type: ignore[attr-defined] # what ``python -m`` calls
        return
    sys.argv = program
    if not is_safe:
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
    path = str(Path(program[0]).absolute())
    loader = SourceFileLoader("__main__", path)
    names.update(__file__=path, __loader__=loader, __cached__=None)
    exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), names)  # noqa: S102 - the user's own program


def _set_threads() -> None:
    import torch

    threads = os.environ.get(_THREADS, "")
    if not threads and torch.get_num_threads() == 1 and "MKL_NUM_THREADS" not in os.environ:
        # The import got 1 thread, but torchrun set no number: it has started only one rank.
        threads = str(len(os.sched_getaffinity(0)))
    if threads.isdigit() and int(threads) and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))


def _seed() -> None:
    """Reseed, because forks would draw the same numbers."""
    import torch

    torch.default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


class _Ranks:
    """torchrun's connection to the process that forks the ranks."""

    def __init__(self, link: socket.socket, environment: dict[str, str]) -> None:
        self._link = link
        self._environment = environment
        self._status_by_pid: dict[int, int] = {}
        self._lock = threading.Lock()

    def request(self, argv: list[str], environment: dict[str, str]) -> bytes:
        before = self._environment
        changed = {name: value for name, value in environment.items() if before.get(name) != value}
        removed = [name for name in before if name not in environment]
        return json.dumps({"argv": argv, "changed": changed, "removed": removed}).encode()

    def start(self, argv: list[str], request: bytes, streams: list[Any]) -> _Rank:
        fds = [stream.fileno() if stream is not None else place for place, stream in enumerate(streams, 1)]
        with self._lock:
            socket.send_fds(self._link, [request], fds)
            while True:
                answer = json.loads(self._link.recv(_LONGEST_MESSAGE) or b'{"pid": 0}')
                if "pid" in answer:
                    break
                self._status_by_pid[answer["ended"]] = answer["status"]
        if not answer["pid"]:
            raise OSError("the process that forks the ranks has ended")
        return _Rank(answer["pid"], argv, self)

    def status(self, pid: int, timeout: float | None) -> int | None:
        """Return a rank's exit code, negative for a signal; None after `timeout` seconds."""
        with self._lock:
            while pid not in self._status_by_pid and select.select([self._link], [], [], timeout)[0]:
                message = self._link.recv(_LONGEST_MESSAGE)
                if not message:
                    return -signal.SIGKILL
                message_of_end = json.loads(message)
                self._status_by_pid[message_of_end["ended"]] = message_of_end["status"]
            return self._status_by_pid.get(pid)


class _Rank:
    """Rank with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, args: list[str], ranks: _Ranks) -> None:
        self.pid = pid
        self.args = args
        self.returncode: int | None = None
        self._ranks = ranks

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._ranks.status(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        import subprocess
        import time

        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            self.returncode = self._ranks.status(self.pid, _POLL_SECONDS)
            if self.returncode is None and end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2])
    except Exception:  # no process may continue as a copy of another
        traceback.print_exc()
        os._exit(1)
