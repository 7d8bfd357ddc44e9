"""The names of sources: a misspelt one is told, one's own is let be."""

from __future__ import annotations

import pytest

from trainmedic_logs.domain.log_sources import SOURCES, fault_of_source


@pytest.mark.parametrize(
    "name", [*SOURCES, "training-eval", "my-slurm", "slurmd", "pretraining", "trainer", "nginx", "x1"]
)
def test_a_known_name_and_ones_own_are_good(name: str) -> None:
    """Also one that is a known name with a part before or behind it."""
    assert fault_of_source(name) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trainng", "training"),
        ("train", "training"),
        ("Launcher", "launcher"),
        ("kernal", "kernel"),
        ("fabricmanager", "fabric-manager"),
        ("fabric_manager", "fabric-manager"),
    ],
)
def test_what_was_meant_is_said(name: str, meant: str) -> None:
    """No line would ever be of such a source."""
    assert fault_of_source(name) == f"there is no {name!r}; did you mean {meant!r}?"


@pytest.mark.parametrize("name", ["", "My Log", "-x", "x" * 64])
def test_no_other_characters(name: str) -> None:
    """It is a label in stores of logs, and a part of keys."""
    assert "is not a valid source" in str(fault_of_source(name))
