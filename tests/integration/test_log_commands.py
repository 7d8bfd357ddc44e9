"""``trainmedic logs explain``, as a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import PYTHON_PATH, inherited

RULES = Path(__file__).parents[2] / "logs/trainmedic_logs/logrules"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def logs(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run ``trainmedic logs``."""
    return subprocess.run(
        [sys.executable, "-m", "trainmedic_server", "logs", *arguments],
        env={**inherited(), "PYTHONPATH": PYTHON_PATH},
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )


def explained(stdin: bytes, *arguments: str) -> list[dict[str, Any]]:
    """What the shipped rules say of each line, as JSON."""
    done = logs("explain", "-", "--rules", str(RULES), "--output", "json", *arguments, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b"")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_physical_line_is_explained() -> None:
    """A block's first line has the rule; Windows line ends, NUL, bytes that are not text and a last line without
    an end change nothing."""
    log = (
        b"fine\r\n"
        + f"[rank3]: {OOM}\r\n".encode()
        + f"a\0b {OOM}\n".encode()
        + b"\xff\xfe\n"
        + b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: 1\n'
        + OOM.encode()
    )
    told = explained(log)
    assert [each["line"] for each in told] == list(range(1, 9))
    rules = [None, "cuda-oom", "cuda-oom", None, "python-exception", None, None, "cuda-oom"]
    assert [each["rule"] for each in told] == rules
    assert told[1] | {"near": [], "ends": []} == told[1]
    assert (told[1]["role"], told[1]["cause"], told[1]["fields"]) == ("root", "gpu_memory", {"wanted": "2.00 GiB"})


def test_each_line_has_its_level_time_and_metrics() -> None:
    """A time without a zone is dropped, and each line of a block has its own."""
    log = (
        b"2026-05-04T12:00:00+02:00 INFO Step 100: loss=1.234, lr=1e-4, time=0.5s\n"
        b'{"level":"warn","msg":"x","run":{"metrics":{"loss":"NaN","lr":1e-4}}}\n'
        b"2026/05/04 12:00:01,250 - ERROR - GPU 0: 22.1GB / 24.0GB\n"
        b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: 1\n'
        b"[default0]:just a line\n"
    )
    told = [(each["level"], each["time"], each["metrics"]) for each in explained(log)]
    assert told[0] == (
        "info",
        "2026-05-04T10:00:00.000000Z",
        {"step": 100, "loss": 1.234, "learning_rate": 0.0001, "step_s": 0.5},
    )
    assert told[1] == ("warning", None, {"loss": "nan", "learning_rate": 0.0001})
    assert told[2][:2] == ("error", "2026-05-04T12:00:01.250")
    assert told[2][2]["gpu_memory_ratio"] == 0.9208
    assert [level for level, _, _ in told[3:]] == ["error", "info", "error", "info"]
    shown = logs("explain", "-", "--rules", str(RULES), stdin=log).stdout.decode().splitlines()
    assert "2026-05-04T10:00:00.000000Z info  - step=100 loss=1.234" in shown[0]


def test_a_line_of_a_megabyte_is_truncated_and_the_next_one_is_read() -> None:
    """A rule sees its start."""
    log = f"{OOM} {'b' * (1 << 20)}\n{'a' * (1 << 20)} {OOM}\n{OOM}\n".encode()
    assert [each["rule"] for each in explained(log)] == ["cuda-oom", None, "cuda-oom"]


def test_an_empty_file_produces_no_output() -> None:
    """It is not an error."""
    assert explained(b"") == []


def test_a_source_without_rules_is_reported() -> None:
    """A custom name may be right; a mistyped one would silently find nothing."""
    done = logs("explain", "-", "--rules", str(RULES), "--source", "kernal", "--output", "json", stdin=OOM.encode())
    assert (done.returncode, done.stderr) == (0, b"No rule covers the source 'kernal'. Did you mean 'kernel'?\n")
    assert json.loads(done.stdout)["rule"] is None


@pytest.mark.parametrize("name", ["", "missing.log"])
def test_a_directory_and_a_missing_file_are_rejected(name: str, tmp_path: Path) -> None:
    """The exit status is that of wrong usage, without a traceback."""
    done = logs("explain", str(tmp_path / name))
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("text", ["", "- log_rule: in-a-list\n", "playbook: p\n"])
def test_a_file_without_a_rule_is_not_accepted(text: str, tmp_path: Path) -> None:
    """Its author expected it to contain a rule."""
    (tmp_path / "rule.yaml").write_text(text)
    done = logs("check", str(tmp_path / "rule.yaml"))
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"No log rule found in" in done.stderr
