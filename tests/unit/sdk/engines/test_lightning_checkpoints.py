"""Checkpoints of a Lightning Trainer that are damaged."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from trainmedic.lightning import checkpoints


@pytest.mark.parametrize("pickle", [b"", b"\x80\x02", b"\x80\x02}", b"\x80\x02X\xff\xff\xff\x7f"])
def test_a_truncated_file_does_not_hide_the_others(tmp_path: Path, pickle: bytes) -> None:
    """torch raises EOFError for it. The other checkpoints must still be found."""
    for step in (10, 20):
        with zipfile.ZipFile(tmp_path / f"step={step}.ckpt", "w") as file:
            for name, content in (("data.pkl", pickle), ("version", b"3\n"), ("byteorder", b"little")):
                file.writestr(f"archive/{name}", content)
    assert [each.step for each in checkpoints.in_directories([tmp_path])] == [10, 20]
