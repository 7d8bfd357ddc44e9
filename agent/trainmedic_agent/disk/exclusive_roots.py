"""Exclusive cleaning roots: two agents with one root could delete too much.

A path identifies a root: accessing it could hang.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from trainmedic.errors import ConfigurationError
from trainmedic_agent import privileges
from trainmedic_core.machine_locks import NameLock


@contextmanager
def exclusive_roots(roots: Iterable[str]) -> Iterator[None]:
    """Raises ConfigurationError if another agent holds one."""
    with ExitStack() as stack:
        for root in sorted({os.path.normpath(root) for root in roots}):
            lock = NameLock.take(f"root:{hashlib.sha256(os.fsencode(root)).hexdigest()[:32]}")
            if isinstance(lock, NameLock):
                stack.callback(lock.release)
            # Any user can take the lock: a holder that cannot clean must not block the agent.
            elif privileges.is_agent(lock, privileges.FILES_OF_OTHERS):
                raise ConfigurationError(
                    f"the policy's root {root} belongs to another agent of this machine, process {lock.pid}: stop one "
                    "of them, or take the root out of one's policy"
                )
        yield
