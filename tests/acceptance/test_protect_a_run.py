"""The second tutorial works in a directory of its own: its commands, up to the first loss that Prometheus has.

How the loss is then brought back is tested in `test_loss_spike`, on a faster clock.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support import doc_pages
from tests.support.programs import PYTHON_PATH, ROOT, eventually, free_port, inherited

PAGE = ROOT / "docs" / "tutorial" / "protect-a-training-run.md"


class Trainee(doc_pages.Reader):
    """A reader on a machine where the tutorial's ports are in use: each is replaced by a free one."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        (scratch / "bin").mkdir(parents=True)
        directory.mkdir()
        environment = {
            **inherited(),
            "VIRTUAL_ENV": str(ROOT / ".venv"),
            "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": PYTHON_PATH,
            "HOME": str(scratch),
            "OMP_NUM_THREADS": "1",
        }
        super().__init__(directory, scratch, environment)
        self.server = f"http://127.0.0.1:{self._port}"
        self.ports = {"8080": self._port} | {port: free_port() for port in ("9090", "9093", "9108")}
        self.directory = directory

    def _here(self, text: str) -> str:
        text = re.sub(r"(?<=127\.0\.0\.1:)(\d{4})\b", lambda port: str(self.ports.get(port[1], port[1])), text)
        for program, port in (("prometheus", "9090"), ("prometheus-alertmanager", "9093")):
            text = re.sub(rf"^{program} ", f"{program} --web.listen-address=127.0.0.1:{self.ports[port]} ", text)
        return text.replace("train_char_model.py --", f"train_char_model.py --metrics-port {self.ports['9108']} --")

    def change_ports_of_copies(self) -> None:
        for file in (self.directory / "monitoring").glob("*.yml"):
            file.write_text(self._here(file.read_text()))


def changed_files() -> str:
    return subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_second_tutorial_changes_nothing_in_the_checkout(tmp_path: Path) -> None:
    """All four programs start as documented, Prometheus scrapes the job, and the server reads its curve there."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    assert shutil.which("prometheus-alertmanager"), "Debian's Alertmanager is not installed"
    before = changed_files()
    with Trainee(tmp_path / "tutorial", tmp_path / "scratch") as reader:
        for block in doc_pages.blocks(PAGE.read_text()):
            if block.kind in ("sh", "console"):
                reader.follow(block)
            if block.kind == "sh":
                reader.change_ports_of_copies()

        def curve() -> bool:
            answer = httpx.get(f"{reader.server}/jobs/char-model/curves", timeout=30)
            return answer.is_success and answer.json()["source"] == "prometheus"

        eventually(curve, 90, "the job's curve from Prometheus", every=1)
        targets = httpx.get(f"http://127.0.0.1:{reader.ports['9090']}/api/v1/targets").json()["data"]["activeTargets"]
        assert {target["scrapePool"] for target in targets} == {"trainmedic", "alertmanager", "training"}
        assert {target["health"] for target in targets} <= {"up", "unknown"}, targets
    assert changed_files() == before
