"""The server's part towards one training job, for tests of what the job makes of its commands.

Here: putting a command on the job's stream, and reading the replies to it. Not here: the real server, which is
in `tests.support.live`. Used by the integration tests of the SDK's framework integrations.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import redis

import trainmedic
from tests.support.programs import eventually
from trainmedic.wire import envelope


class Commander:
    """Commands the job ``name`` over the Redis at ``url``."""

    def __init__(self, url: str, name: str = "llm-1") -> None:
        self.url = url
        self.name = name
        self._client = redis.Redis.from_url(url)

    def connect(self, **options: Any) -> trainmedic.Medic:
        """The job's side."""
        return trainmedic.connect(job=self.name, redis_url=self.url, rank=0, world_size=1, **options)

    def send(self, action: str, seconds: float = 60.0, undo_of: str | None = None, **params: Any) -> str:
        """Put the command on the stream; its id."""
        now = datetime.now(UTC)
        sent = envelope.Command(
            id=envelope.new_id(),
            action=action,
            target={"kind": "job", "job": self.name},
            params=params,
            run_id="run-1",
            playbook="test",
            reason="Test",
            issued_at=now,
            expires_at=now + timedelta(seconds=seconds),
            undo_of=undo_of,
        )
        self._client.xadd(envelope.job_commands(self.name), {"command": sent.encode()})
        return sent.id

    def send_and_wait(self, medic: trainmedic.Medic, action: str, seconds: float = 60.0, **params: Any) -> str:
        """The same, and return once it waits for the job's next look, or is answered already."""
        sent = self.send(action, seconds, **params)
        eventually(
            lambda: any(one.id == sent for one in medic.unanswered()) or self.replies(sent),
            60,
            f"{action} arrived",
            every=0.002,
        )
        return sent

    def replies(self, sent: str) -> list[envelope.Reply]:
        """All replies to it so far."""
        entries: Any = self._client.xrange(envelope.REPLIES)
        replies = [envelope.Reply.of_entry(fields) for _, fields in entries if b"notice" not in fields]
        return [reply for reply in replies if reply.command_id == sent]

    def final(self, sent: str, within: float = 60.0) -> envelope.Reply:
        """The one final reply."""
        eventually(lambda: [one for one in self.replies(sent) if one.is_final], within, f"final reply to {sent}", 0.005)
        (reply,) = [one for one in self.replies(sent) if one.is_final]
        return reply

    def close(self) -> None:
        self._client.close()


class Sent:
    """Commands that are sent from within the training, at the end of a step; and what became of them."""

    def __init__(self, commander: Commander, medic: trainmedic.Medic) -> None:
        self.commander = commander
        self.medic = medic
        self.ids: list[str] = []

    def __call__(self, action: str, seconds: float = 60.0, **params: Any) -> Any:
        def act(*_: Any) -> None:
            self.ids.append(self.commander.send_and_wait(self.medic, action, seconds, **params))

        return act

    def undo(self, number: int, action: str, **params: Any) -> Any:
        """Takes back the command that was sent as number so and so."""
        return lambda *_: self(action, undo_of=self.ids[number], **params)()

    def replies(self) -> list[envelope.Reply]:
        return [self.commander.final(one) for one in self.ids]

    def reply(self) -> envelope.Reply:
        (reply,) = self.replies()
        return reply
