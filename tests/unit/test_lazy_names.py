"""Packages that load what they offer when it is asked for still offer all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.programs import PYTHON_PATH, inherited


@pytest.mark.parametrize("package", ["trainmedic"])
def test_every_name_is_there(package: str) -> None:
    """In a process that has loaded nothing else; and a name that is not there is an AttributeError."""
    program = f"""
import {package} as package
assert all(getattr(package, name) is not None for name in package.__all__)
from {package} import *
assert not hasattr(package, "no_such_name")
"""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**inherited(), "PYTHONPATH": PYTHON_PATH},
        check=True,
    )
