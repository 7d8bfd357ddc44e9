"""The tree keeps to the layers that its documentation draws."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.programs import PYTHON_PATH

ROOT = Path(__file__).parents[2]


def test_imports_point_downwards_only() -> None:
    """import-linter's contracts in pyproject.toml hold for every module of the server and the SDK."""
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_agent_loads_none_of_the_servers_libraries() -> None:
    """An idle agent stays small because its process never imports them; what it does import is a short list."""
    program = "import sys, trainmedic_server.cli.agent; print(*{name.partition('.')[0] for name in sys.modules})"
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name not in sys.stdlib_module_names}
    # What redis-py imports by itself where it is installed is not ours to choose.
    by_redis = {"opentelemetry", "cryptography", "hiredis", "jwt", "typing_extensions"}
    by_sdk = {"prometheus_client"}
    ours = {"trainmedic_server", "trainmedic", "click", "redis", "ruamel", "pynvml"}
    assert {name for name in loaded - by_redis - by_sdk - ours if not name.startswith("_")} == set()
