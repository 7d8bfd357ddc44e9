"""The pages that explain the code name modules and classes that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = ["docs/explanation/glossary.md", "docs/explanation/architecture.md", "CONTRIBUTING.md"]
PACKAGES = tuple(
    ROOT / folder
    for folder in (
        "app/trainmedic_server",
        "agent/trainmedic_agent",
        "logs/trainmedic_logs",
        "logs/trainmedic_core",
        "sdk/trainmedic",
    )
)
PLACES = (*PACKAGES, *(package.parent for package in PACKAGES), ROOT)
DEFINING = (*PACKAGES, ROOT / "tests" / "support")
SOURCES = "\n".join(path.read_text() for folder in DEFINING for path in folder.rglob("*.py"))


def is_there(name: str) -> bool:
    """A file or folder, by its path or by how it is imported, with a class or function that it defines behind it; or
    the name of a command between server, agent and job."""
    if f'"{name}"' in SOURCES:
        return True
    path = name.replace(".", "/") if "/" not in name else name
    if any((package / form).exists() for package in PLACES for form in (name, path, f"{path}.py")):
        return True
    home, dot, member = name.rpartition(".")
    if dot and is_there(home) and re.search(rf"^ *(class|def|async def) {member}\b", SOURCES, re.MULTILINE):
        return True
    # A module of a package that the page has named before, such as ``sql_store/election``.
    return any(next(package.rglob(f"{path}.py"), None) for package in PACKAGES)


@pytest.mark.parametrize("page", PAGES)
def test_everything_that_a_page_names_exists(page: str) -> None:
    """A page names modules as ``engine/plan`` or ``engine.plan``, then classes; renames must change it too."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    names = {
        name
        for name in re.findall(r"`([a-z_]+(?:[./][A-Za-z_]+)+)`", text)
        if not name.startswith("trainmedic.actions")
    }
    assert names
    assert {name for name in names if not is_there(name)} == set()


def test_each_promise_of_the_security_page_has_its_test() -> None:
    """The page names its file, or its name in it; where a test is renamed, the page is changed as well."""
    text = (ROOT / "docs/explanation/security.md").read_text()
    shown_by = set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", text))
    assert len(shown_by) > 20
    for name in shown_by:
        file, _, test = name.partition("::")
        assert (ROOT / file).exists(), name
        assert not test or re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), name
