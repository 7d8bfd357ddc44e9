"""The launcher's commands, without Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from tests.support.messages import make_command
from trainmedic.launch.membership import EXCLUDE, NodeExclusions
from trainmedic.launch.server_link import ServerLink
from trainmedic.settings import resolve
from trainmedic.wire.receiver import ReceivedCommand


@pytest.fixture
def link() -> Iterator[ServerLink]:
    settings = resolve("llm", "redis://127.0.0.1:9", None, rank=0, world_size=1, environment={})
    made = ServerLink(settings, NodeExclusions("n1", starts_all_nodes=False), {})
    yield made
    made.close()


def test_what_an_earlier_launcher_left_is_answered_without_another_command(link: ServerLink) -> None:
    """It could wait for the next command, or for its own expiry."""
    sent = make_command(EXCLUDE, params={"node": "n1"})
    link.queue.interrupted[sent.id] = ReceivedCommand(sent, b"1-1", cast(Any, None), "commands")
    link.carry_out()
    record = link.queue._memory.recall(sent.id)
    assert record is not None
    assert record.status == "failed"
    assert not link.queue.interrupted
