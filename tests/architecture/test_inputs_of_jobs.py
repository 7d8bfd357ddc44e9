"""The table of what jobs can write: each row names a module that reads it and a test that shows it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests/architecture/inputs_of_jobs.md"
PACKAGES = tuple(ROOT / folder for folder in ("app/trainmedic_server", "agent", "logs", "sdk/trainmedic"))


def rows() -> list[list[str]]:
    """The cells of each row, without the heading."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_every_row_names_an_existing_module() -> None:
    """Readers can verify each row in the code."""
    for row in rows():
        modules = re.findall(r"`([\w/]+\.py)`", row[2])
        assert modules, f"{row[0]}: no module"
        for module in modules:
            assert any((package / module).is_file() for package in PACKAGES), f"{row[0]}: {module}"


def test_every_row_names_an_existing_test() -> None:
    """Each promise is backed by a test."""
    for row in rows():
        assert len(row) == 6, f"{row[0]}: {len(row)} cells"
        (named,) = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[5])
        file, name = named
        assert re.search(rf"^(?:async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), row[5]


def test_every_module_that_opens_job_files_has_a_row() -> None:
    """This covers every package of the agent that opens logs, and the opener itself."""
    read = {module for row in rows() for module in re.findall(r"`([\w/]+\.py)`", row[2])}
    for package in ("log_reading", "log_search", "log_shipping", "log_opening", "disk"):
        assert any(module.startswith(f"trainmedic_agent/{package}/") for module in read), package


def test_logs_are_opened_only_through_the_port() -> None:
    """No log-reading module opens, lists or stats a path itself. The kernel log is a device."""
    direct = re.compile(
        r"\bos\.(?:open|stat|lstat|scandir|listdir|readlink)\(|\.read_(?:text|bytes)\(|\bPath\(.*\)\.(?:stat|open|iterdir|glob)"
    )
    allowed = {"kernel_log.py": "the kernel's log, and where journals lie", "store_access.py": "the store's token"}
    for package in ("log_reading", "log_search", "log_shipping"):
        for path in sorted((ROOT / "agent/trainmedic_agent" / package).glob("*.py")):
            found = direct.findall(path.read_text(encoding="utf-8"))
            assert not found or path.name in allowed, f"{path.name}: {found}"
