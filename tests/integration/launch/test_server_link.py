"""What ``trainmedic-run`` tells the server, by a real Redis, signed with the job's own key."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import redis

from tests.integration.launch.launched import Launched
from tests.support.messages import KEY
from tests.support.programs import eventually
from trainmedic.wire import envelope
from trainmedic.wire.notice import FIELD, Notice, launcher_presence
from trainmedic.wire.reading import read_object
from trainmedic.wire.signing import Signer, identity_key, job_identity, signatures_of, unseal

Launch = Callable[..., Launched]
JOB_KEY = identity_key(KEY.encode(), job_identity("llm-1"))


def test_the_server_is_notified_of_each_attempt(launch: Launch, redis_server: Any) -> None:
    """The notices are in order and signed with the job's own key; they say why there is no further attempt."""
    job = _launch(launch, redis_server, "import sys; sys.exit(7)", "--retries=1")
    assert job.wait() == 7
    with redis.Redis.from_url(redis_server.url) as client:
        entries: Any = client.xrange(envelope.REPLIES)
        assert not client.exists(launcher_presence("llm-1/node-1"))
    signer = Signer.of(KEY.encode())
    for _, fields in entries:
        signer.verify(fields[FIELD], signatures_of(fields), job_identity("llm-1"))
    notices = [Notice.decode(fields[FIELD]) for _, fields in entries]
    assert [(notice.kind, notice.attempt, notice.number) for notice in notices] == [
        ("job_failed", 1, 1),
        ("job_restarted", 2, 2),
        ("job_failed", 2, 3),
        ("job_gone", 2, 4),
    ]
    assert notices[0].reason == "the job ended with exit code 7"
    assert "--retries is 1" in notices[3].reason


def test_the_launcher_reports_a_job_that_ends_well(launch: Launch, redis_server: Any) -> None:
    """Also one that does not use the SDK."""
    assert _launch(launch, redis_server, "").wait() == 0
    with redis.Redis.from_url(redis_server.url) as client:
        [(_, fields)] = client.xrange(envelope.REPLIES)
    assert Notice.decode(fields[FIELD]).kind == "job_ended"


LOSES_PEER = r"""
import sys
sys.stdout = sys.stderr
print("[default1]:RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4471")
print("Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 42)")
raise SystemExit(1)
"""
"""It prints what a torchrun does whose ranks lost one of another node."""


def test_ranks_that_lost_one_on_another_node_are_not_reported_as_the_first(launch: Launch, redis_server: Any) -> None:
    """The launcher that started rank 0 speaks for the job, wherever the first process failed."""
    assert _launch(launch, redis_server, LOSES_PEER, "--retries=0").wait() == 1
    with redis.Redis.from_url(redis_server.url) as client:
        [(_, fields), _] = client.xrange(envelope.REPLIES)
    failed = Notice.decode(fields[FIELD])
    assert failed.reason == "rank 1 lost another rank (RuntimeError)"
    assert (failed.status, failed.rank, failed.pid, failed.error) == (None, None, None, "RuntimeError")


def test_the_launcher_has_a_presence_while_it_waits_for_the_next_attempt(launch: Launch, redis_server: Any) -> None:
    """This way the job is not gone, and users see its state."""
    job = _launch(launch, redis_server, "raise ValueError", "--delay=1h")
    key = launcher_presence("llm-1/node-1")
    with redis.Redis.from_url(redis_server.url) as client:

        def presence() -> Any:
            value: Any = client.get(key)
            return value if value and b"waiting" in value else None

        sealed = unseal(eventually(presence, 60, "the presence"))
    Signer.of(JOB_KEY).verify_sealed(sealed, key)
    said = read_object(sealed.raw)
    assert (said["job"], said["node"], said["state"], said["attempt"]) == ("llm-1", "node-1", "waiting", 1)
    job.process.terminate()
    assert job.wait() != 0


def _launch(launch: Launch, server: Any, program: str, *options: str) -> Launched:
    variables = {
        "TRAINMEDIC_REDIS_URL": server.url,
        "TRAINMEDIC_SIGNING_KEY": JOB_KEY.decode(),
        "TRAINMEDIC_NODE": "node-1",
        "TRAINMEDIC_JOB": "llm-1",
    }
    return launch([sys.executable, "-c", program], "--delay=0s", *options, **variables)
