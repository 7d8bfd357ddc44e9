"""File access rights of another user for the calling thread, by system calls: the C library changes all threads.

Only file system user and groups change. So the tenant's processes cannot signal this one, and the tenant's FUSE file
system, which could hang, stays closed to it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainmedic_agent.log_opening.rights import NOBODY_ID, Rights

log = logging.getLogger(__name__)

_SETGROUPS = {"x86_64": 116, "aarch64": 159}
_READ_SEARCH_BIT, _SETGID_BIT, _SETUID_BIT = 2, 6, 7
_MOST_CAPABILITIES = 64
_WORD_BITS = 32
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_NEEDED = 1 << _SETGID_BIT | 1 << _SETUID_BIT
_HEADER = struct.pack("Ii", 0x20080522, 0)  # version 3 of capget(2), this thread
_SETS = struct.Struct("6I")
_NO_ID = 0xFFFFFFFF
_EXIT_CODE = 70  # EX_SOFTWARE


class ThreadRights:
    def __init__(self) -> None:
        """Raises OSError on an unknown machine type."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        number = _SETGROUPS.get(platform.machine())
        if number is None:
            raise OSError(f"users cannot be changed on {platform.machine()}")
        self._setgroups_number = number

    def may_be_used(self) -> bool:
        """Return whether this thread has the capabilities, and the user nobody is mapped."""
        try:
            effective = self._capabilities()[0]
            if effective & _NEEDED != _NEEDED:
                return False
            with self.using(Rights(None, NOBODY_ID)):
                return True
        except OSError:
            return False

    def keep_only_these(self, *further: int) -> None:
        """Permanently drop all capabilities except CAP_SETUID, CAP_SETGID, CAP_DAC_READ_SEARCH and the given ones.

        Call it before threads start. Raises OSError.
        """
        values = self._capabilities()
        wanted = _NEEDED | 1 << _READ_SEARCH_BIT | sum(1 << number for number in further)
        kept = wanted & (values[1] | values[4] << _WORD_BITS)
        for number in range(_MOST_CAPABILITIES):
            if not kept >> number & 1:
                self._libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # fails without CAP_SETPCAP
        if self._libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "the process cannot renounce new privileges")
        low, high = kept & (1 << _WORD_BITS) - 1, kept >> _WORD_BITS
        self._set_capabilities([low, low, 0, high, high, 0])

    @contextmanager
    def using(self, rights: Rights) -> Iterator[None]:
        """Access files as this user in this thread. Raises OSError."""
        before = (self._capabilities(), os.getgroups(), self._libc.setfsgid(_NO_ID), self._libc.setfsuid(_NO_ID))
        try:
            self._take_rights(rights, before[0])
            yield
        finally:
            self._restore(*before)

    def _take_rights(self, rights: Rights, before: Sequence[int]) -> None:
        uid = NOBODY_ID if rights.uid is None else rights.uid
        self._set_groups(rights.groups)
        self._libc.setfsgid(ctypes.c_uint(rights.gid))
        self._libc.setfsuid(ctypes.c_uint(uid))
        taken = ctypes.c_uint(self._libc.setfsuid(_NO_ID)).value, ctypes.c_uint(self._libc.setfsgid(_NO_ID)).value
        if taken != (uid, rights.gid):
            raise PermissionError(f"the kernel does not let this process act as user {uid}, group {rights.gid}")
        self._set_capabilities([before[0] & _NEEDED, *before[1:3], 0, *before[4:]])

    def _restore(self, capabilities: Sequence[int], groups: Sequence[int], gid: int, uid: int) -> None:
        try:
            self._set_capabilities(capabilities)
            self._libc.setfsuid(ctypes.c_uint(uid))
            self._libc.setfsgid(ctypes.c_uint(gid))
            if os.getgroups() != groups:
                self._set_groups(groups)
            self._set_capabilities(capabilities)  # changing the user can drop some
            if (self._libc.setfsuid(_NO_ID), self._libc.setfsgid(_NO_ID)) != (uid, gid):
                raise PermissionError("the kernel does not give the rights back")
        except OSError:
            # A thread must not continue with a user's rights as if they were its own.
            log.critical("cannot restore process rights; exiting")
            os._exit(_EXIT_CODE)

    def _set_groups(self, groups: Sequence[int]) -> None:
        array = (ctypes.c_uint32 * len(groups))(*groups)
        number, count = ctypes.c_long(self._setgroups_number), ctypes.c_size_t(len(groups))
        if self._libc.syscall(number, count, array) != 0:
            raise OSError(ctypes.get_errno(), "the groups of this thread cannot be changed")

    def _capabilities(self) -> list[int]:
        """Return effective, permitted and inheritable capabilities 0 to 31, then 32 to 63."""
        header, data = ctypes.create_string_buffer(_HEADER), ctypes.create_string_buffer(_SETS.size)
        if self._libc.capget(header, data) != 0:
            raise OSError(ctypes.get_errno(), "the capabilities of this thread cannot be read")
        return list(_SETS.unpack(data.raw))

    def _set_capabilities(self, values: Sequence[int]) -> None:
        if self._libc.capset(_HEADER, _SETS.pack(*values)) != 0:
            raise OSError(ctypes.get_errno(), "the capabilities of this thread cannot be changed")
