"""One run of a command of Slurm's: bounded in time and output, in a fixed environment."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import IO

from msgspec import Struct

from trainmedic_agent.errors import CommandFailed, CommandUnsupported
from trainmedic_agent.slurm.policy import SlurmPolicy

LARGEST_OUTPUT = 96 * 1024 * 1024
"""Bytes of some 9,000 jobs. The agent keeps a small part of each."""
_LONGEST_TEXT = 2000  # bytes


class Finished(Struct, frozen=True):
    code: int | None
    """Exit status, negative after a signal. None: it was ended, because it took too long."""
    output: bytes
    text: str
    """The beginning of stderr."""


class SlurmPrograms(Struct, frozen=True):
    policy: SlurmPolicy

    def run(self, arguments: Sequence[str], seconds: float) -> Finished:
        """Raises CommandUnsupported if the program cannot be run, CommandFailed for too much output."""
        environment = {"PATH": f"{self.policy.commands}:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
        if self.policy.conf is not None:
            environment["SLURM_CONF"] = self.policy.conf
        program = f"{self.policy.commands}/{arguments[0]}"
        try:
            process = subprocess.Popen(  # noqa: S603
                [program, *arguments[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise CommandUnsupported(
                f"cannot run {program}: {error.strerror}; name the directory of Slurm's commands in the policy, as "
                "slurm.commands"
            ) from error
        with process:
            try:
                return _collect(process, time.monotonic() + seconds)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def _collect(process: subprocess.Popen[bytes], deadline: float) -> Finished:
    assert process.stdout is not None
    assert process.stderr is not None
    outputs: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe, read in outputs.items():
            selector.register(pipe, selectors.EVENT_READ, read)
        while selector.get_map():
            for key, _ in selector.select(max(deadline - time.monotonic(), 0.0)):
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fileobj)
                key.data.extend(piece)
                if len(key.data) > LARGEST_OUTPUT:
                    raise CommandFailed(f"a command of Slurm wrote more than {LARGEST_OUTPUT >> 20} MiB")
            if time.monotonic() >= deadline:
                break
    output, error = (bytes(read) for read in outputs.values())
    try:
        code = process.wait(max(deadline - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        code = None
    return Finished(code, output, error[:_LONGEST_TEXT].decode(errors="replace").strip())
