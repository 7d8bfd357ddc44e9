"""The interfaces to external systems: clock, command bus (agents and jobs), notifications, HTTP, Alertmanager."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

from msgspec import Struct, field

from trainmedic.wire.envelope import Command, Reply
from trainmedic.wire.steady_time import ClockStep
from trainmedic_server.domain.alert import Identity
from trainmedic_server.domain.message import Severity


class Clock(Protocol):
    """The time of day, and waiting for a time."""

    def now(self) -> datetime:
        """Return the time of day, aware and in UTC."""
        ...

    async def sleep_until(self, when: datetime) -> None:
        """Return at that time, or at once where it has passed; no later because the clock was set back meanwhile."""
        ...


UNSIGNED = "no signing key is set: whoever can write to Redis can command agents and jobs, and answer in their name"


class ClockWatch(Protocol):
    """What has been noticed about the machine's clock."""

    @property
    def ahead(self) -> float:
        """By how many seconds the machine's clock is ahead of the time that is kept; 0 while it is followed."""
        ...

    def take_steps(self) -> Sequence[ClockStep]:
        """Return what has been noticed since this was last asked."""
        ...


class NoClockWatch:
    """Of a clock that nobody sets."""

    ahead = 0.0

    def take_steps(self) -> Sequence[ClockStep]:
        return ()


class Presence(Struct, frozen=True):
    """A job or an agent that is connected, or that somebody says is."""

    name: str
    last_seen: datetime
    """When it last reported its presence (aware UTC)."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What it reported about itself, such as ``ranks`` and ``placement``, as far as that is believed."""
    doubt: str | None = None
    """Why what stands there now is not believed; None where it is. ``details`` are then of shortly before, or empty."""
    claims: Mapping[str, Any] = field(default_factory=dict)
    """What stands there and is not believed: to be shown, and for nothing else."""
    uses_previous_key: bool = False
    """Whether it is signed with a key that is only accepted still."""


class CommandBus(Protocol):
    """Carries commands out and replies in, each at least once."""

    @property
    def is_signed(self) -> bool:
        """Whether a signing key is in use; `UNSIGNED` says what it means if none is."""
        ...

    async def request(
        self, command: Command, unheard: Callable[[], Awaitable[bool]] | None = None
    ) -> tuple[Reply, ...]:
        """Send `command` and wait for the final reply of everyone who must answer.

        The stream follows from ``command.target``: a job's, else its node's. Who must answer is
        what the receiver's presence says (``ranks``), else one reply is enough. Returns what came
        by ``command.expires_at`` plus a second of grace, possibly nothing. While the bus is unavailable it
        keeps trying until then; it never raises BusUnavailable. Sending a command id again is safe.

        ``unheard`` is called once if some seconds after the command was sent there is no reply, and no receiver of that
        name is connected: True ends the wait.
        """
        ...

    def tell(self, command: Command) -> None:
        """Send a message to which no reply is expected, unless it expires first. It may arrive twice."""
        ...

    def acknowledge(self, command_id: str) -> None:
        """Tell the bus that the outcome is durable, so its replies need not be delivered again after a restart."""
        ...

    async def agents(self) -> list[Presence]:
        """Return everybody who says that he is an agent. Raises BusUnavailable."""
        ...

    async def jobs(self) -> list[Presence]:
        """Return everybody who says that he is a job. Raises BusUnavailable."""
        ...

    async def launchers(self) -> list[Presence]:
        """Return everybody who says that he launches a job, by the job's name. Raises BusUnavailable."""
        ...

    async def check(self) -> None:
        """Return if the bus answers; else raise BusUnavailable."""
        ...


class Notifier(Protocol):
    """Sends messages to people."""

    async def notify(
        self, title: str, message: str, to: str | Sequence[str] | None, severity: Severity = Severity.INFO
    ) -> None:
        """Send to the channel or channels named `to`, or to all, in the look that the severity has there.

        It ends within about a minute, whatever the services do. Raises TemporaryFailure where nobody has it, so that
        another try does no harm, else PermanentFailure: also where a service may have it.
        """
        ...


class HttpReply(Struct, frozen=True):
    """What an HTTP server answered."""

    status: int
    headers: Mapping[str, str]
    """By their names in lower case."""
    body: str
    """As text, cut where it is too long."""


class HttpCaller(Protocol):
    """Makes single HTTP calls. It follows no redirect, and cuts the reply's body at 64 KiB."""

    async def call(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: timedelta,
        bearer: str | None = None,
    ) -> HttpReply:
        """Make the call. Raises TemporaryFailure where nothing was sent, OutcomeUnknown where a reply is missing.

        `bearer` is the name of the secret to send as a bearer token; PermanentFailure where there is
        none of that name. Header names in the reply are in lower case, and a secret that the reply
        repeats is blotted out.
        """
        ...


class AlertSource(Protocol):
    """Asks the Alertmanager's own API, where its URL is configured."""

    async def is_firing(self, identity: Identity) -> bool:
        """Return whether the alert fires. Raises TemporaryFailure where it cannot tell."""
        ...

    async def silence(self, matchers: Mapping[str, str], ends_at: datetime, comment: str) -> str:
        """Create a silence, or find the one with exactly this comment; return its id."""
        ...

    async def find_silence(self, comment: str) -> str | None:
        """Return the id of the silence with exactly this comment that has not ended."""
        ...

    async def expire_silence(self, silence_id: str) -> None:
        """End the silence. One that has ended already is fine."""
        ...
