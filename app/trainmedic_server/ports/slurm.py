"""Slurm as actions see it: nodes and jobs, and the changes that every supported way into Slurm can make.

Every call raises ClusterUnavailable if Slurm cannot be reached or fails (a change may have been made or not),
ClusterRefused if Slurm refuses it, and ObjectMissing if there is no such node or job. Slurm has no conditional update:
a caller reads, decides, changes, and reads again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Protocol

from msgspec import Struct

HELD_PRIORITY = 0
"""Slurm's priority of a held job (scontrol(1), ``hold``)."""


ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
)
"""Base states of a job that is over (squeue(1), job state codes)."""


class SlurmNode(Struct, frozen=True):
    """A node as slurmctld reports it."""

    name: str
    """NodeName, by which Slurm's commands name it."""
    hostname: str
    """NodeHostName."""
    address: str
    """NodeAddr: a name or an IP address."""
    states: frozenset[str]
    """Base state and flags in upper case, such as IDLE and DRAIN."""
    reason: str
    """Why it is drained or down; empty without a reason. Release 24.11 keeps it when the node is available again."""
    reason_set_by: str = ""
    """Name of the user who set the reason."""
    resume_after: datetime | None = None
    """When Slurm resumes it by itself (aware UTC); None if it does not."""
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    reservation: str = ""
    topology: str = ""

    @property
    def is_out_of_service(self) -> bool:
        """Whether Slurm starts no new job on it, because it is drained, down or failing."""
        return not {"DRAIN", "DOWN", "FAIL"}.isdisjoint(self.states)

    @property
    def is_drained(self) -> bool:
        """Whether Slurm starts no new job on it because of a drain. Its running jobs may continue."""
        return "DRAIN" in self.states


class SlurmJob(Struct, frozen=True):
    """A job as slurmctld reports it. A job array has one for each task."""

    job_id: str
    name: str
    user: str
    states: frozenset[str]
    """Base state and flags in upper case, such as PENDING and COMPLETING."""
    nodes: str
    """Its nodes as a host list, such as ``n[1-3]``; empty while it has none."""
    is_held: bool
    """Whether it waits for a release, or would if it were requeued now."""
    may_requeue: bool
    """Whether Slurm restarts it after a failure of a node, and takes a requeue."""
    restarts: int
    """How often it has been requeued."""
    excluded_nodes: tuple[str, ...] = ()
    """Nodes that it must not get."""
    why_pending: str = ""
    """Slurm's word for why it waits, such as ``JobHeldAdmin``."""
    admin_comment: str = ""
    """A text that operators of Slurm can set and users can read."""

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more and will not run again."""
        return not ENDED.isdisjoint(self.states)


class SlurmRelease(Struct, frozen=True):
    """What answered, and which of the optional changes it can make."""

    version: str
    """Release of slurmctld, such as ``26.05.5``."""
    can_requeue: bool
    """Whether `Slurm.requeue` works: over REST from 26.05."""


class Slurm(Protocol):
    """One cluster's slurmctld. Every change may be made twice without harm."""

    async def release(self) -> SlurmRelease: ...

    async def node(self, name: str) -> SlurmNode: ...

    async def nodes(self) -> Sequence[SlurmNode]: ...

    async def job(self, job_id: str) -> SlurmJob: ...

    async def jobs(self) -> Sequence[SlurmJob]:
        """Return the jobs that slurmctld still knows, ended ones included (its ``MinJobAge``)."""
        ...

    async def drain(self, node: str, reason: str, resume_after: timedelta | None = None) -> None:
        """Start no new job on the node, for `reason`. With `resume_after` Slurm resumes it by itself after that time,
        counted from now; another call sets it again."""
        ...

    async def set_reason(self, node: str, reason: str) -> None:
        """Replace the reason of a drained node, and nothing else."""
        ...

    async def undrain(self, node: str) -> None:
        """End the drain. A node that is down stays down."""
        ...

    async def hold(self, job_id: str) -> None:
        """Keep the job from starting. A running job continues, and would wait after a requeue."""
        ...

    async def unhold(self, job_id: str) -> None:
        """End a hold."""
        ...

    async def requeue(self, job_id: str, hold: bool = False) -> None:
        """End the running job and queue it again; with `hold` it then waits for a release. Raises ClusterRefused for
        a job that is not running or may not be requeued."""
        ...

    async def signal(self, job_id: str, signal: str, with_batch: bool = False) -> None:
        """Send a signal, such as ``USR1``, to all steps of the job; `with_batch` includes the batch script's shell and
        its children, which a signal ends that the script does not trap."""
        ...

    async def cancel(self, job_id: str) -> None:
        """End the job. One that has ended already is fine."""
        ...

    async def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """Replace the nodes that the job must not get. Raises ClusterRefused unless the job is pending."""
        ...

    async def set_admin_comment(self, job_id: str, text: str) -> None:
        """Replace the job's admin comment, and nothing else."""
        ...
