"""Directories for one agent alone: a second agent of the machine that is to clean one of them does not start.

Each would delete until its own rule is met, and neither knows what the other has deleted. A root is known by its path:
looking at it could hang, on a network file system that is away, and the agent must start all the same. Who calls it:
``trainmedic_agent.wiring.agent``.
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
    """Hold the roots of a policy while the block lasts. Raises ConfigurationError where another agent has one."""
    with ExitStack() as stack:
        for root in sorted({os.path.normpath(root) for root in roots}):
            lock = NameLock.take(f"root:{hashlib.sha256(os.fsencode(root)).hexdigest()[:32]}")
            if isinstance(lock, NameLock):
                stack.callback(lock.release)
            elif privileges.is_agent(lock, privileges.FILES_OF_OTHERS):
                raise ConfigurationError(
                    f"the policy's root {root} belongs to another agent of this machine, process {lock.pid}: stop one "
                    "of them, or take the root out of one's policy"
                )
        yield
