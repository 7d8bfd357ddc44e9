"""What the server says of the Python that it runs on."""

from __future__ import annotations

import gc
import math
import sys
import sysconfig
from typing import Any

import pytest
import structlog

from trainmedic_server.wiring import interpreter


@pytest.mark.parametrize(
    ("is_free_threaded", "gil", "is_warned_of"), [(False, True, False), (True, True, True), (True, False, False)]
)
def test_a_lock_that_this_python_could_do_without_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, is_free_threaded: bool, gil: bool, is_warned_of: bool
) -> None:
    """An extension module may have turned it on; then the server is no faster than on any other Python."""

    def config(name: str) -> Any:
        assert name == "Py_GIL_DISABLED"
        return int(is_free_threaded)

    monkeypatch.setattr(sysconfig, "get_config_var", config)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: gil, raising=False)
    assert interpreter.described() == {"python": sys.version.split()[0], "gil": gil}
    with structlog.testing.capture_logs() as lines:
        interpreter.warn_of_gil()
    assert ["PYTHON_GIL=0" in line["event"] for line in lines] == [True] * is_warned_of


def test_a_python_that_knows_no_other_way_has_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 3.11 and 3.12."""
    monkeypatch.delattr(sys, "_is_gil_enabled", raising=False)
    assert interpreter.described()["gil"] is True


def test_collections_are_short_and_full_ones_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """In allocations."""
    thresholds: list[int] = []
    monkeypatch.setattr(gc, "set_threshold", lambda *values: thresholds.extend(values))
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    interpreter.tune()
    assert math.prod(thresholds[:2]) <= 200_000
    assert math.prod(thresholds) >= 49_000_000
