"""Slurm's nodes and jobs for actions, and the changes that every supported access to Slurm can make.

Calls raise ClusterUnavailable if Slurm cannot be reached or fails (a change may have been made), ClusterRefused, and
ObjectMissing. Slurm has no conditional update: a caller reads, decides, changes, and reads again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from msgspec import Struct, field

HELD_PRIORITY = 0
"""Slurm's priority of a held job (scontrol(1), ``hold``)."""


ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
)
"""Base states of a job that is over (squeue(1), job state codes)."""


_UNAVAILABLE = frozenset(
    {"BLOCKED", "DOWN", "DRAIN", "FAIL", "INVALID_REG", "MAINTENANCE", "NOT_RESPONDING", "REBOOT_ISSUED"}
    | {"REBOOT_REQUESTED", "RESERVED", "UNKNOWN"}
)
"""States and flags of nodes (sinfo(1)). Powered-down nodes are available: a job starts them."""
_SERVING = frozenset({"ALLOCATED", "IDLE", "MIXED"})
"""Base states in which nodes take jobs."""
FUTURE = "FUTURE"
"""State of a configured node that does not exist yet."""


class SlurmNode(Struct, frozen=True):
    name: str  # NodeName, used by Slurm's commands
    hostname: str
    address: str  # NodeAddr: a name or an IP address
    states: frozenset[str]
    """Base state and flags in upper case, such as IDLE and DRAIN. Those of jobs have the same form."""
    reason: str  # why it is drained or down; may be empty. Release 24.11 keeps it when the node is available again
    reason_set_by: str = ""
    resume_after: datetime | None = None  # when Slurm resumes it by itself (aware UTC); None if it does not
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    reservation: str = ""
    topology: str = ""

    @property
    def why_unavailable(self) -> str:
        """States and reservation that keep jobs off it; empty if none do."""
        states = sorted(self.states & _UNAVAILABLE)
        if not states and self.states.isdisjoint(_SERVING):
            states = sorted(self.states) or ["no state"]
        reserved = [f"reservation {self.reservation}"] if self.reservation and "RESERVED" not in states else []
        return "+".join(states + reserved)

    @property
    def is_out_of_service(self) -> bool:
        """Slurm starts no new job on it: drained, down or failing."""
        return not {"DRAIN", "DOWN", "FAIL"}.isdisjoint(self.states)

    @property
    def is_drained(self) -> bool:
        return "DRAIN" in self.states


class SlurmJob(Struct, frozen=True):
    """A job; each task of an array is one.

    The leader of a heterogeneous job stands for the whole job: its nodes are those of all components, and it is held if
    one is. Other values are those of its own component.
    """

    job_id: str
    name: str
    user: str
    states: frozenset[str]
    nodes: str  # host list, such as ``n[1-3]``; empty while it has none
    is_held: bool  # true if it waits for a release, or would after a requeue
    may_requeue: bool  # true if Slurm restarts it after a node's failure and accepts a requeue
    restarts: int
    excluded_nodes: tuple[str, ...] = ()
    why_pending: str = ""
    admin_comment: str = ""
    """Operators of Slurm can set it, users read it."""
    priority: int | None = None  # None if Slurm shows none
    time_limit: timedelta | None = None  # None without a limit
    components: tuple[str, ...] = ()  # for the leader of a heterogeneous job: all components' ids
    other_ids: tuple[str, ...] = ()  # ``ARRAY_TASK`` of an array's task, ``LEADER+OFFSET`` of a component
    leader: str = ""
    """Heterogeneous job that it is a component of."""
    gpus_by_node: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, ...]:
        """Ids to hold, release or update one by one: Slurm changes only the component that a call names."""
        return self.components or (self.job_id,)

    @property
    def is_running(self) -> bool:
        return "RUNNING" in self.states

    @property
    def has_ended(self) -> bool:
        """It does not run, and will not again."""
        return not ENDED.isdisjoint(self.states)


class SlurmRelease(Struct, frozen=True):
    version: str
    can_requeue: bool  # through an agent, and over REST from 26.05
    can_reserve: bool = True  # through an agent, and over REST from 25.05
    can_reboot: bool = False  # through an agent


class SlurmReservation(Struct, frozen=True):
    name: str
    nodes: str
    users: tuple[str, ...]
    starts_at: datetime | None = None
    ends_at: datetime | None = None


UNLIMITED = timedelta.max
"""No time limit of a job, or no automatic end of a drain."""


class JobChange(Struct, frozen=True):
    """New values of a job. None leaves a value as it is."""

    excluded_nodes: tuple[str, ...] | None = None
    priority: int | None = None
    time_limit: timedelta | None = None  # whole minutes, or `UNLIMITED`


class Slurm(Protocol):
    """One cluster's slurmctld. Every change can safely be repeated."""

    async def release(self) -> SlurmRelease: ...

    async def node(self, name: str) -> SlurmNode: ...

    async def nodes(self) -> Sequence[SlurmNode]: ...

    async def job(self, job_id: str) -> SlurmJob:
        """Return a job by its id, a task by ``ARRAY_TASK``, or a component by ``LEADER+OFFSET`` or its own id."""
        ...

    async def jobs(self) -> Sequence[SlurmJob]:
        """Return jobs that slurmctld still knows, ended ones included (its ``MinJobAge``)."""
        ...

    async def drain(self, node: str, reason: str, resume_after: timedelta | None = None) -> None:
        """Start no new job on the node.

        With `resume_after` from now, Slurm resumes it by itself; another call sets it again. `UNLIMITED` removes such
        an end, None leaves it.
        """
        ...

    async def set_reason(self, node: str, reason: str) -> None:
        """Replace the reason of a drained node."""
        ...

    async def undrain(self, node: str) -> None: ...

    async def reboot(self, node: str, reason: str) -> None:
        """Reboot the node as soon as no job runs on it; until then no new job starts. It then stays down.

        Raises ClusterRefused over REST, which cannot do it.
        """
        ...

    async def return_to_service(self, node: str) -> None:
        """Let jobs start on a node that is drained or down."""
        ...

    async def reservations(self) -> Sequence[SlurmReservation]: ...

    async def reserve(self, name: str, node: str, users: Sequence[str], lasting: timedelta) -> None:
        """Reserve the node for these users from now, for whole minutes. Running jobs and other reservations stay.
        Raises ClusterRefused if the name is taken.
        """
        ...

    async def end_reservation(self, name: str) -> None:
        """Raises ObjectMissing."""
        ...

    async def hold(self, job_id: str) -> None:
        """Prevent the job from starting. A running job continues, and would wait after a requeue."""
        ...

    async def unhold(self, job_id: str) -> None: ...

    async def requeue(self, job_id: str, hold: bool = False) -> None:
        """End the running job with all components, and queue it again; with `hold` it waits for a release.

        Raises ClusterRefused for a component, or a job that is not running or may not be requeued.
        """
        ...

    async def end_delay(self, job_id: str) -> None:
        """Let a pending job start from now on. Slurm delays a requeued one by two minutes."""
        ...

    async def signal(self, job_id: str, signal: str, with_batch: bool = False) -> None:
        """Send a signal, such as ``USR1``, to all steps; `with_batch` also to the batch script, which must trap it."""
        ...

    async def cancel(self, job_id: str) -> None: ...

    async def update(self, job_id: str, change: JobChange) -> None:
        """Raises ClusterRefused for excluded nodes unless the job is pending. An empty change proves that the server
        may change the job.
        """
        ...

    async def set_admin_comment(self, job_id: str, text: str) -> None: ...
