"""What a job meets that its author did not think of: it trains on, and the log says what was wrong, once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

import trainmedic
from tests.support.command_sender import Commander
from tests.support.programs import eventually
from trainmedic.wire import envelope


def looking(medic: trainmedic.Medic, step: Any, until: Callable[[], Any], what: str) -> Any:
    """Go on looking for commands at that step, as a loop does."""

    def look() -> Any:
        medic.report(step=step, loss=1.0)
        medic.commands(step)
        return until()

    return eventually(look, 60, what, every=0.005)


def final(commander: Commander, medic: trainmedic.Medic, sent: str, step: Any = 7) -> envelope.Reply:
    return looking(medic, step, lambda: [one for one in commander.replies(sent) if one.is_final], "the answer")[0]


def test_redis_behind_a_unix_socket_works(own_redis: Any, tmp_path: Path) -> None:
    """With ``unix://`` commands arrive and answers are sent."""
    server = own_redis(tmp_path, "--unixsocket", str(tmp_path / "redis.sock"))
    server.start()
    password = f":{server.password}@" if server.password else ""
    commander = Commander(f"unix://{password}{tmp_path / 'redis.sock'}?db=0")
    with commander.connect() as medic:
        medic.on("job.scale_lr")(lambda command: {"after": 0.5})
        assert final(commander, medic, commander.send("job.scale_lr", factor=0.5)).output["after"] == 0.5
    commander.close()


@pytest.mark.parametrize("step", [torch.tensor(7), 7.0, "7"])
def test_steps_may_be_counted_in_any_type(commander: Commander, step: Any) -> None:
    """JSON has only plain numbers: the answer and the presence contain one."""
    with commander.connect() as medic:
        medic.on("job.scale_lr")(lambda command: {"after": 0.5})
        assert final(commander, medic, commander.send("job.scale_lr", factor=0.5), step).output["step"] == 7
        assert medic._describe()["step"] == 7


class Unspeakable(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no")


def test_a_handler_may_fail_in_any_way(commander: Commander, caplog: pytest.LogCaptureFixture) -> None:
    """It fails by an exception or its return value: each is answered, and nothing reaches the loop."""
    acts: list[Any] = [Unspeakable(), StopIteration(), RecursionError(), {"a": Unspeakable()}, {"a": 10**5000}, {1: 2}]
    with commander.connect() as medic:

        @medic.on("job.scale_lr")
        def act(_: trainmedic.JobCommand) -> Any:
            done = acts.pop(0)
            if isinstance(done, Exception):
                raise done
            return done

        sent = [commander.send("job.scale_lr", factor=0.5) for _ in range(len(acts))]
        statuses = [final(commander, medic, one).status for one in sent]
    assert statuses == ["failed"] * 3 + ["applied"] * 3


def test_a_missing_permission_is_reported_once(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Redis accepts the job's presence but denies reading: one line, however many attempts."""
    with redis.Redis.from_url(redis_url) as client:
        client.acl_setuser("half", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-xreadgroup"])
        try:
            url = f"redis://half:pw@{redis_url.rpartition('@')[2].removeprefix('redis://')}"
            with caplog.at_level(logging.INFO, "trainmedic"), trainmedic.connect(job="llm-1", redis_url=url) as medic:
                backoff = medic._server.receiver._connection._backoff  # type: ignore[union-attr]
                eventually(lambda: backoff._next > 2, 60, "some tries", every=0.02)  # 0.1 s, doubled five times
                assert client.exists("trainmedic:job:llm-1")
        finally:
            client.acl_deluser("half")
    assert caplog.text.count("does not permit its user the command XREADGROUP") == 1
    assert "connected to Redis again" not in caplog.text


def test_two_jobs_of_one_name_are_warned_of_each_other(commander: Commander, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise commands would reach either of them for no visible reason."""
    with commander.connect() as one, commander.connect() as other:
        for medic in (one, other):
            writer = medic._server.writer  # type: ignore[union-attr]
            writer._presence = replace(writer._presence, every=0.05)
            writer.announce()
        eventually(lambda: caplog.text.count("another process has this job's name") == 2, 60, "both told", every=0.02)
