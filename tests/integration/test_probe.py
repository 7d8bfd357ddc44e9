"""``trainmedic-probe`` as it is run: real ranks over gloo on this machine, some of them on nodes by other names."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import PYTHON_PATH, free_port, inherited

PROBE = (sys.executable, "-m", "trainmedic.probe")
SMALL = ("--sizes", "0.1,1", "--barriers", "5", "--output", "json", "--backend", "gloo")


def environment(**more: str) -> dict[str, str]:
    return {**inherited(), "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", **more}


def alone(*options: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The probe without a launcher."""
    return subprocess.run(
        [*PROBE, *options], env=environment(**more), capture_output=True, text=True, timeout=120, check=False
    )


def on_nodes(nodes: Sequence[str], *options: str) -> list[subprocess.Popen[str]]:
    """A rank for each of these nodes, as torchrun would start them."""
    port = str(free_port())
    placed = {"WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [*PROBE, *SMALL, *options],
            env=environment(**placed, RANK=str(rank), LOCAL_RANK="0", TRAINMEDIC_NODE=node),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]


def outcome(ranks: Sequence[subprocess.Popen[str]]) -> tuple[list[int], str, str]:
    """The exit codes, what rank 0 printed, and what all of them complained of."""
    ended = [rank.communicate(timeout=120) for rank in ranks]
    return [rank.returncode for rank in ranks], ended[0][0], "".join(errors for _, errors in ended)


def test_ranks_are_started_and_measured_without_a_launcher() -> None:
    """Times and bandwidths are consistent, and sums are right."""
    done = alone(*SMALL, "--ranks", "3")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["backend"], document["judgement"]) == ("gloo", "new")
    (count,) = document["nodes"].values()
    assert count == 3
    (within,) = document["pairs"]
    for measured in (document["all"], within):
        barrier = measured["barrier"]
        assert (measured["ranks"], barrier["count"]) == (3, 5)
        assert 0 < barrier["median"] <= barrier["max"]
        assert [each["bytes"] for each in measured["all_reduce"]] == [100_000, 1_000_000]
        for each in measured["all_reduce"]:
            assert each["is_right"] is True
            assert each["bytes_per_s"] == pytest.approx(each["bytes"] / each["seconds"])
            assert each["bus_bytes_per_s"] == pytest.approx(each["bytes_per_s"] * 4 / 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_is_tested_on_each_rank(ranks: int) -> None:
    """A single rank has no peer to communicate with, and reports nothing about it."""
    done = alone(*SMALL, "--ranks", str(ranks), "--memory", "50")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(each["rank"], each["bytes"], each["is_right"]) for each in document["memory"]] == [
        (rank, 256_000_000, True) for rank in range(ranks)
    ]
    assert document["judgement"] == ("new" if ranks > 1 else "ok")
    assert [len(document["all"]["all_reduce"]), len(document["pairs"])] == ([2, 1] if ranks > 1 else [0, 0])


def test_pairs_of_nodes_are_compared_with_earlier_results(tmp_path: Path) -> None:
    """The second run has results to compare with. If they were far better, the pair is slow, the exit
    code says so, and what is slow does not become the measure."""
    file = tmp_path / "probe.json"
    nodes = ("node-a", "node-a", "node-b", "node-c")
    codes, printed, errors = outcome(on_nodes(nodes, "--baselines", str(file)))
    assert codes == [0, 0, 0, 0], errors
    first = json.loads(printed)
    assert first["nodes"] == {"node-a": 2, "node-b": 1, "node-c": 1}
    names = [pair["nodes"] for pair in first["pairs"]]
    assert names == [["node-a", "node-a"], ["node-a", "node-b"], ["node-a", "node-c"], ["node-b", "node-c"]]
    assert {pair["judgement"] for pair in first["pairs"]} == {"new"}
    assert [pair["ranks"] for pair in first["pairs"]] == [2, 3, 3, 2]

    kept = json.loads(file.read_text())
    (key,) = [key for key in kept["pairs"] if "node-b/1 node-c/1" in key]
    kept["pairs"] = {key: [{"barrier_seconds": 1.0, "bytes_per_s": {"1000000": 1e15}}]}
    file.write_text(json.dumps(kept))
    codes, printed, _ = outcome(on_nodes(nodes, "--baselines", str(file)))
    assert codes[0] == 1
    second = {tuple(pair["nodes"]): pair for pair in json.loads(printed)["pairs"]}
    slow = second["node-b", "node-c"]
    assert slow["judgement"] == "slow"
    assert slow["reasons"][0].startswith("all-reduce of 1 MB: ")
    assert slow["baseline"]["measurements"] == 1
    assert json.loads(file.read_text())["pairs"][key] == kept["pairs"][key]


@pytest.fixture
def server() -> Iterator[str]:
    """Trainmedic's server, as far as the probe asks it."""

    class Jobs(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"items": [{"name": "llm-1", "nodes": ["node-b"]}, {"name": "new"}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    listening = HTTPServer(("127.0.0.1", 0), Jobs)
    serving = threading.Thread(daemon=True, target=listening.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    serving.join()
    listening.server_close()


def test_nodes_in_training_are_left_alone_by_default(server: str) -> None:
    """Every rank ends with the code for that; a server that cannot be asked gives no permission."""
    codes, printed, errors = outcome(on_nodes(("node-a", "node-b"), "--server", server))
    assert (codes, printed) == ([4, 4], "")
    assert "the job llm-1 is on node-b" in errors
    assert "new" not in errors.split("node-b", 1)[0]
    codes, _, errors = outcome(on_nodes(("node-a", "node-c"), "--server", f"http://127.0.0.1:{free_port()}"))
    assert codes == [4, 4]
    assert "not measured: cannot list the server's jobs" in errors
    assert "a training runs" not in errors
    codes, printed, _ = outcome(on_nodes(("node-a", "node-b"), "--server", server, "--even-if-training"))
    assert codes == [0, 0]
    assert json.loads(printed)["pairs"][0]["nodes"] == ["node-a", "node-b"]


def test_a_rank_that_never_arrives_ends_the_probe() -> None:
    """It ends within the set time, with the code for what could not be measured."""
    began = time.monotonic()
    missing, *there = on_nodes(("node-b", "node-a", "node-c"), "--timeout", "5")[::-1]
    missing.kill()
    missing.communicate()
    codes, _, errors = outcome(there)
    assert codes == [3, 3]
    assert "cannot measure" in errors
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (("--ranks", "1"), 2, "--ranks must be from 2 to 64"),
        (("--ranks", "0", "--memory", "50"), 2, "--ranks must be from 1 to 64"),
        (("--memory", "91"), 2, "--memory must be above 0, and at most 90 percent"),
        (("--sizes", "0"), 2, "sizes are in megabytes"),
        (("--sizes", "many"), 2, "--sizes"),
        (("--backend", "nccl", "--ranks", "2"), 3, "no GPU is visible here"),
    ],
)
def test_impossible_options_are_rejected(options: tuple[str, ...], code: int, told: str) -> None:
    """This happens before anything is started. Without CUDA, as here, NCCL is impossible."""
    done = alone(*options, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (code, "")
    assert told in done.stderr


def test_the_server_command_line_has_it_too() -> None:
    """It has the same options and exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "trainmedic_server", "probe", *SMALL, "--ranks", "2", "--least-bandwidth", "100000"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "at least 1e+05 GB/s is required" in json.loads(done.stdout)["pairs"][0]["reasons"][0]
