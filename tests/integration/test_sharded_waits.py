"""What ranks that shard a model say of their waiting, beside a stopwatch in the collectives themselves."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import PYTHON_PATH, Program

PROGRAM = Path(__file__).with_name("sharded_training.py")
ENGINES = Path(sys.prefix) / "engines"
RANKS = 2


@pytest.mark.parametrize("kinds", [("fully_shard", "flat"), ("zero-2", "zero-3")], ids=lambda kinds: kinds[0])
def test_the_parts_of_a_step_match_a_stopwatch(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """They match within a tenth, while one rank waits for most of the step and the other hardly does."""
    path = os.pathsep.join((PYTHON_PATH, str(ENGINES))) if kinds[0].startswith("zero") else PYTHON_PATH
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
    log = tmp_path / "ranks.log"
    with Program([*launcher, PROGRAM, *kinds], log, {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}) as ranks:
        assert ranks.process.wait(480) == 0, log.read_text()
    waiting, slow = (json.loads((tmp_path / f"waits-{rank}.json").read_text()) for rank in range(RANKS))
    for kind in kinds:
        of_waiting: dict[str, Any] = waiting[kind]
        of_slow: dict[str, Any] = slow[kind]
        assert of_waiting["wait"] == pytest.approx(of_waiting["stopwatch"], rel=0.1), (kind, waiting, slow)
        assert abs(of_slow["wait"] - of_slow["stopwatch"]) <= 0.1 * of_slow["step"], (kind, waiting, slow)
        assert of_waiting["own"] < of_slow["own"]
