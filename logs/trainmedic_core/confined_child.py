# Rights that a parser gives up in its own process before it reads untrusted input. Log reader and probes use parts.
from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Sequence
from pathlib import Path

PARSER_IDS = (2_100_000_018, 60_998)
"""User and group IDs of parsers started by root: the first mapped here, with no account."""
_PYTHON_BASELINE = 64 * 1024**2  # bytes of the interpreter's address space that a memory limit includes
_SELF = Path("/proc/self")
_CAP_VERSION = 0x20080522
_MOST_CAPABILITIES = 64
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _CLEAR_ALL = 24, 38, 47, 4
# Architecture numbers in seccomp filters (linux/audit.h).
_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7
# Numbers of kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal and ptrace.
_SIGNAL_CALLS = {
    "x86_64": (_X86_64, (62, 200, 234, 129, 297, 424, 101)),
    "aarch64": (_AARCH64, (129, 130, 131, 138, 240, 424, 117)),
}
# First system call of the x32 ABI on x86_64.
_X32 = 0x40000000
_PR_SET_SECCOMP, _FILTER = 22, 2
# Instructions of a seccomp filter, the offset of the architecture in its data, and its answers.
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN, _ARCHITECTURE_AT = 0x20, 0x15, 0x35, 0x06, 4
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


def give_up_everything(most_memory: int) -> None:
    """Give up others' files, writing, opening, starting processes, signals, and memory above `most_memory` bytes.

    Raises OSError.
    """
    most_memory += max(_address_space() - _PYTHON_BASELINE, 0)
    # If memory runs out anyway, the kernel should kill this process, not its parent.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    drop_bounding_set()
    if os.geteuid() == 0 and (own := first_mapped(PARSER_IDS)) is not None:
        # Some containers may not change the user; the limits below must suffice there.
        with contextlib.suppress(PermissionError):
            os.setgroups([])
            os.setresgid(own, own, own)
            os.setresuid(own, own, own)
    drop_capabilities()
    refuse_signals()
    for kind, limit in (
        (resource.RLIMIT_AS, most_memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def _address_space() -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((_SELF / "statm").read_text().split()[0]) * resource.getpagesize()
    return 0


def refuse_signals() -> None:
    """Have the kernel refuse signals and tracing, after `drop_capabilities`.

    Does nothing without seccomp or on other architectures.
    """
    if (calls := _SIGNAL_CALLS.get(platform.machine())) is None:
        return
    architecture, numbers = calls
    checks = [(_JUMP_IF_EQUAL, number) for number in numbers]
    if architecture == _X86_64:
        checks.append((_JUMP_IF_AT_LEAST, _X32))
    deny = len(checks) + 1
    program = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_JUMP_IF_EQUAL, 0, deny + 1, architecture), (_LOAD, 0, 0, 0)]
    program += [(code, deny - place - 1, 0, number) for place, (code, number) in enumerate(checks)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    raw = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(raw)))
    # Permitted because `drop_capabilities` has set no_new_privs.
    ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, _FILTER, ctypes.c_void_p(ctypes.addressof(header)), 0, 0)


def first_mapped(ids: Sequence[int]) -> int | None:
    """Return the first mapped user and group number, or None."""
    ranges = [_mapped_ranges(_SELF / f"{name}_map") for name in ("uid", "gid")]
    return next((number for number in ids if all(any(number in each for each in part) for part in ranges)), None)


def _mapped_ranges(path: Path) -> list[range]:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return []
    return [range(int(first), int(first) + int(count)) for first, _, count in lines]


def drop_bounding_set() -> None:
    """Deny capabilities to executed programs, if permitted."""
    library = ctypes.CDLL(None, use_errno=True)
    for capability in range(_MOST_CAPABILITIES):
        library.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def drop_capabilities() -> None:
    """Give up all capabilities permanently. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    header, nothing = struct.pack("Ii", _CAP_VERSION, 0), struct.pack("6I", *([0] * 6))
    if library.capset(header, nothing) != 0 or library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
