"""Cost of users' rights: a scan of many jobs' logs, by each way to open files, over the direct one.

``python -m benchmarks.log_opening`` needs root's capabilities for the line with rights.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_agent.log_opening.guarded_files import GuardedFiles
from trainmedic_agent.log_opening.node_files import NodeFiles
from trainmedic_agent.log_opening.opener import FileOpener
from trainmedic_agent.log_opening.opener_client import OpenerClient
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_opening.thread_rights import ThreadRights
from trainmedic_agent.log_reading.discovery import Discovery
from trainmedic_agent.log_reading.log_policy import LogsPolicy

JOBS, RANKS, ROUNDS = 100, 8, 5


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        _fill(root)
        direct = _seconds(root, OwnFiles())
        print(f"direct: {1000 * direct:.1f} ms for {JOBS} jobs of {RANKS} ranks")
        print(f"by modes: {_seconds(root, GuardedFiles([directory], own_uid=4_000_000)) / direct:.1f} times")
        rights = ThreadRights()
        if rights.may_be_used():
            files = GuardedFiles([directory], switch=rights, own_uid=4_000_000)
            print(f"by rights: {_seconds(root, files) / direct:.1f} times")
            with _served(files) as client:
                print(f"by rights, through an opener: {_seconds(root, client) / direct:.1f} times")


def _fill(root: Path) -> None:
    for number in range(JOBS):
        attempt = AttemptLogs.of(root, f"job-{number}", 1)
        attempt.path.mkdir(parents=True)
        for rank in range(RANKS):
            said = {"job": f"job-{number}", "attempt": 1, "rank": rank, "local_rank": rank, "node": "n1"}
            attempt.sources("n1", rank).write_text(json.dumps(said))
            attempt.records(rank).write_text("{}\n")


def _seconds(root: Path, files: NodeFiles) -> float:
    discovery = Discovery(LogsPolicy(roots=(str(root),)), "n1", files=files)
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        found = discovery.scan((), lambda: False)
        best = min(best, time.perf_counter() - began)
        assert len(found.files) == JOBS * RANKS
    return best


@contextmanager
def _served(files: NodeFiles) -> Iterator[OpenerClient]:
    own, far = socket.socketpair()
    thread = threading.Thread(target=FileOpener(files).serve, args=(far,))
    thread.start()
    client = OpenerClient(own)
    try:
        yield client
    finally:
        client.close()
        thread.join()


if __name__ == "__main__":
    main()
