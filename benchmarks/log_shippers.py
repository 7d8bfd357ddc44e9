"""The agent's log shipping and Fluent Bit with ``examples/loki``, in one run: speed, cost, and result.

Both ship the same log directory into a counting store. ``--fluent-bit`` names the program. The directory has the files
of several ranks by torchrun, lines with secrets, a private key over several lines, and a link from a ``stdout.log`` to
another user's file. The agent's part runs without its opener and reader processes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.agent_idle import processor_seconds
from tests.support.programs import PYTHON_PATH, ROOT
from trainmedic.wire.log_layout import AttemptLogs

NODE, JOB, PRIVATE = "gpu-07", "llm/1", "root:$6$shadow"
SECRETS = {
    "a token by its form": ("fetching with hf_" + "Ab1" * 12, "hf_Ab1"),
    "a named secret": ("using api_key=Zx81kLmQ for the tracker", "Zx81kLmQ"),
    "a password in a URL": ("rendezvous at redis://u:Pa55w0rd@10.0.0.1/0", "Pa55w0rd"),
    "a header": ("sent Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    "a signed URL": ("got https://s3/a?x-amz-signature=0a1b2c3d4e5f", "0a1b2c3d4e5f"),
    "a tracker's bare key": ("wandb login " + "0123456789" * 4, "0123456789" * 4),
}
KEY = ["-----BEGIN PRIVATE KEY-----", "MIIEvQIBADANBgkqhkiG9w0B", "-----END PRIVATE KEY-----"]


class Store(BaseHTTPRequestHandler):
    """Receiver of Loki's pushes that counts lines, and keeps those that must not be there."""

    protocol_version = "HTTP/1.1"
    lines = 0
    with_rank = 0
    seen: set[str]
    signs: Sequence[str] = [sign for _, sign in SECRETS.values()] + [KEY[1], PRIVATE]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for stream in json.loads(body)["streams"]:
            Store.lines += len(stream["values"])
            Store.with_rank += sum(len(value) > 2 and "rank" in value[2] for value in stream["values"])
        text = body.decode()
        Store.seen |= {sign for sign in self.signs if sign in text}
        self.send_response(204)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def store() -> Iterator[int]:
    Store.lines, Store.with_rank, Store.seen = 0, 0, set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def write(logs: Path, ranks: int, lines: int, private: Path) -> int:
    """Write a job's lines, and return their number."""
    attempt = AttemptLogs.of(logs, JOB, 1)
    for rank in range(ranks):
        folder = attempt.ranks(NODE) / "none_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        sources = {"version": 1, "job": JOB, "attempt": 1, "rank": 100 + rank, "node": NODE, "local_rank": rank}
        (attempt.sources(NODE, rank)).write_text(json.dumps(sources | {"files": []}))
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        text = [f"{at} INFO step {step}: loss 2.{step:06d} grad_norm 0.42 tokens/s 78400" for step in range(lines)]
        text[1:1] = [line for line, _ in SECRETS.values()] + KEY
        (folder / "stdout.log").write_text("\n".join(text) + "\n")
    folder = attempt.ranks(NODE) / "none_x" / "attempt_0" / str(ranks)
    folder.mkdir(parents=True)
    (folder / "stdout.log").symlink_to(private)
    return ranks * (lines + len(SECRETS) + len(KEY))


def ours(state: Path, logs: Path, port: int) -> None:
    """Ship until killed."""
    from tests.unit.agent.log_reading.reading import policy_of
    from trainmedic_agent.counters import AgentCounters
    from trainmedic_agent.journal import Journal
    from trainmedic_agent.log_reading.discovery import Discovery
    from trainmedic_agent.log_reading.log_store import NodeBoot
    from trainmedic_agent.log_reading.reading_context import ReadingContext
    from trainmedic_agent.log_shipping.shipper import LogShipping
    from trainmedic_agent.log_shipping.store_push import StorePush

    policy = policy_of(ship={"url": f"http://127.0.0.1:{port}"}, roots=[str(logs)])
    assert policy.ship is not None
    context = ReadingContext(NODE, Journal(state), AgentCounters(), lambda: datetime.now(UTC))
    boot = NodeBoot(NODE, "boot", datetime.now(UTC))
    shipping = LogShipping(context, policy, policy.ship, boot, StorePush(policy.ship), kmsg="/nowhere")
    discovery = Discovery(policy, NODE, "/nowhere")
    shipping.start()
    while True:
        shipping.take_scan(discovery.scan(shipping.known_keys, lambda: False))
        time.sleep(1.0)


def measured(name: str, directory: Path, fluent_bit: str, ranks: int, lines: int) -> float:
    """Ship once and print the result. Return the lines per second of processor time."""
    logs, state, private = directory / "logs", directory / "state", directory / "shadow"
    logs.mkdir(parents=True)
    state.mkdir()
    private.write_text(PRIVATE + "\n" * 3)
    with store() as port:
        environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "TRAINMEDIC_LOG_DIR": str(logs), "LOKI_TENANT": ""}
        environment |= {"TRAINMEDIC_NODE": NODE, "FLUENT_BIT_STATE": str(state), "LOKI_HOST": "127.0.0.1"}
        environment |= {"LOKI_PORT": str(port), "LOKI_URI": "/loki/api/v1/push", "LOKI_TLS": "off"}
        argv = [sys.executable, "-m", "benchmarks.log_shippers", "--ours", str(state), str(logs), str(port)]
        if name != "agent":
            argv = [fluent_bit, "-c", str(ROOT / "examples" / "loki" / "fluent-bit.yaml")]
        with subprocess.Popen(argv, env=environment, cwd=ROOT) as program:
            time.sleep(5)
            used = processor_seconds(program.pid)
            expected, began = write(logs, ranks, lines, private), time.monotonic()
            while Store.lines < expected and time.monotonic() - began < 240:
                time.sleep(0.2)
            took, used = time.monotonic() - began, processor_seconds(program.pid) - used
            time.sleep(6)  # for what must not come
            status = Path(f"/proc/{program.pid}/status").read_text()
            peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024
            program.send_signal(signal.SIGKILL)
    leaked = [kind for kind, (_, sign) in SECRETS.items() if sign in Store.seen]
    leaked += ["a private key"] if KEY[1] in Store.seen else []
    print(
        f"{name}: {Store.lines} lines of {expected} in {took:.1f} s, {used:.2f} s of processor time,"
        f" {peak:.0f} MB at the peak, {Store.with_rank} with their rank; not masked: {', '.join(leaked) or 'nothing'};"
        f" the file behind the link: {'shipped' if PRIVATE in Store.seen else 'not shipped'}"
    )
    return Store.lines / used


def main() -> None:
    if sys.argv[1:2] == ["--ours"]:
        ours(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fluent-bit", required=True, help="the program")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--lines", type=int, default=10_000, help="of each rank")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rates = [
            measured(way, Path(name) / way, options.fluent_bit, options.ranks, options.lines)
            for way in ("agent", "Fluent Bit")
        ]
    print(f"Fluent Bit ships {rates[1] / rates[0]:.1f} times the lines of the agent in a second of processor time")


if __name__ == "__main__":
    main()
