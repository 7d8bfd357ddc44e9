"""A group's members hear of the parent's end and orders."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from trainmedic_server import errors
from trainmedic_server.engine.group_follower import GroupFollower
from trainmedic_server.engine.plan_values import OutsideState


async def test_members_are_woken_again_after_a_failed_read() -> None:
    """Only what they have reloaded counts as passed on."""
    woken: list[str] = []
    answers: list[Any] = [errors.StoreUnavailable("restarting"), {"member"}, {"never asked"}]

    async def transact(_: object) -> Iterable[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    services: Any = SimpleNamespace(recorder=SimpleNamespace(transact=transact), touch=woken.extend)
    parent: Any = SimpleNamespace(id="parent", is_open=False)
    follower = GroupFollower(services, parent)
    with pytest.raises(errors.StoreUnavailable):
        await follower.wake_members(OutsideState(()))
    for _ in range(2):
        await follower.wake_members(OutsideState(()))
    assert woken == ["member"]
