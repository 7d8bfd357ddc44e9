"""Clock, command bus, notifier, HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

from msgspec import Struct, field

from trainmedic.wire.envelope import Command, Reply, new_id
from trainmedic.wire.steady_time import ClockStep
from trainmedic_core.target import Target
from trainmedic_server.domain.alert import Identity
from trainmedic_server.domain.message import Severity


class Clock(Protocol):
    def now(self) -> datetime:
        """Return the time (aware UTC)."""
        ...

    async def sleep_until(self, when: datetime) -> None:
        """Return at that time, at once if it has passed. Setting the clock back does not delay it."""
        ...


UNSIGNED = "no signing key is set: anyone who can write to Redis can command agents and jobs, and answer in their name"


class ClockWatch(Protocol):
    @property
    def ahead(self) -> float:
        """Seconds by which the machine's clock is ahead of the time in use, negative if behind."""
        ...

    def take_steps(self) -> Sequence[ClockStep]:
        """Return the clock's steps since the last call."""
        ...


class NoClockWatch:
    ahead = 0.0

    def take_steps(self) -> Sequence[ClockStep]:
        return ()


class Presence(Struct, frozen=True):
    """A connected job or agent, or an untrusted claim to be one."""

    name: str
    last_seen: datetime
    details: Mapping[str, Any] = field(default_factory=dict)
    doubt: str | None = None
    """Why the current data is untrusted, or None. ``details`` are then slightly older, or empty."""
    claims: Mapping[str, Any] = field(default_factory=dict)
    """Untrusted data; empty if trusted."""
    uses_previous_key: bool = False
    """True if signed with the key before the last rotation."""


class CommandBus(Protocol):
    """Delivers commands and replies, each at least once.

    Presences include untrusted ones; reading them raises BusUnavailable.
    """

    @property
    def is_signed(self) -> bool: ...

    async def request(
        self, command: Command, unheard: Callable[[], Awaitable[bool]] | None = None
    ) -> tuple[Reply, ...]:
        """Send `command` to its target and wait for the final replies of all expected receivers.

        The receiver's presence states how many must reply (``ranks``); otherwise one reply suffices.

        Returns the replies by ``command.expires_at`` plus 1 s, possibly none. Retries while the bus is unavailable.
        Repeating a command ID is safe.

        ``unheard`` is called once if no reply came within some seconds and no such receiver is connected. If it returns
        True, the wait ends.
        """
        ...

    def tell(self, command: Command) -> None:
        """Send a command without a reply. It may arrive twice, or expire unsent."""
        ...

    def acknowledge(self, command_id: str) -> None:
        """Mark the command's outcome as durable: its replies need no redelivery after a restart."""
        ...

    async def agents(self) -> list[Presence]: ...

    async def jobs(self) -> list[Presence]: ...

    async def launchers(self) -> list[Presence]:
        """Return presences, each named by its job."""
        ...

    async def check(self) -> None:
        """Raises BusUnavailable."""
        ...


def own_command(
    action: str,
    target: Target,
    params: Mapping[str, Any],
    reason: str,
    issued_at: datetime,
    expires_at: datetime,
    run_id: str = "",
) -> Command:
    """Return a command of the server itself."""
    return Command(
        id=new_id(int(issued_at.timestamp() * 1000)),
        action=action,
        target={"kind": str(target.kind), **{name: value for name, value in target.parts.items() if value is not None}},
        params=params,
        run_id=run_id,
        playbook="",
        reason=reason,
        issued_at=issued_at,
        expires_at=expires_at,
    )


async def final_replies(bus: CommandBus, command: Command) -> list[Reply]:
    """Send a command whose outcome needs no redelivery, only to a connected receiver."""

    async def stop_waiting() -> bool:
        return True

    replies = await bus.request(command, stop_waiting)
    bus.acknowledge(command.id)
    return [reply for reply in replies if reply.is_final]


class Notifier(Protocol):
    async def notify(
        self, title: str, message: str, to: str | Sequence[str] | None, severity: Severity = Severity.INFO
    ) -> None:
        """Send to the channels `to`, to all if None. Ends within about a minute.

        Raises TemporaryFailure if no service received it, so that a retry is safe; PermanentFailure if some may have,
        or for an unknown channel.
        """
        ...


class HttpReply(Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    body: str
    is_cut: bool = False  # by the size limit, the deadline, a lost connection, or compression


class HttpAccess(Struct, frozen=True):
    """Secrets and files of a call, each by the server's variable that has it."""

    headers: Mapping[str, str] = {}
    user: str | None = None
    password: str | None = None
    certificate: str | None = None
    """PEM file with a client certificate and its key."""
    ca: str | None = None
    """PEM file with the only certificates to trust."""
    socket: str | None = None
    """UNIX socket to connect to."""
    largest_reply: int | None = None
    """Bytes after which the reply is truncated. None: the caller's limit."""


NO_ACCESS = HttpAccess()


class HttpCaller(Protocol):
    """Makes single HTTP calls without redirects, and truncates long or late replies."""

    async def call(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: timedelta,
        bearer: str | None = None,
        access: HttpAccess = NO_ACCESS,
    ) -> HttpReply:
        """Make the call. `bearer` names the secret to send as a bearer token. Secrets in the reply are redacted.

        Raises TemporaryFailure if nothing was sent, OutcomeUnknown if the reply is missing, PermanentFailure for an
        invalid URL or secret.
        """
        ...


class AlertSource(Protocol):
    async def is_firing(self, identity: Identity) -> bool:
        """Raises TemporaryFailure if the source does not answer, or has just started and may not know."""
        ...

    async def silence(self, matchers: Mapping[str, str], ends_at: datetime, comment: str) -> str:
        """Return the ID of the silence with this exact comment, created if missing."""
        ...

    async def find_silence(self, comment: str) -> str | None:
        """Return the ID of the unexpired silence with this exact comment."""
        ...

    async def expire_silence(self, silence_id: str) -> None: ...
