"""The documentation's examples do what they say: see `tests.support.doc_pages` for how a page is written."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import doc_pages
from tests.support.programs import PYTHON_PATH, ROOT, inherited, system_path

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# Followed elsewhere, because they need real programs beside the server, or check their blocks in a way of their own.
ELSEWHERE = {
    "docs/tutorial/protect-a-training-run.md": "tests/acceptance/test_protect_a_run.py",
    "docs/how-to/install.md": "tests/helm/test_documentation.py",
    "docs/how-to/upgrade.md": "tests/helm/test_documentation.py",
    "docs/how-to/check-a-release.md": "tests/integration/test_supply.py",
    "docs/how-to/write-a-playbook.md": "tests/unit/docs/test_playbook_examples.py",
    "docs/how-to/write-an-action.md": "tests/unit/docs/test_write_an_action.py",
    "docs/reference/actions.md": "tests/unit/docs/test_actions_reference.py",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def environment(scratch: Path) -> dict[str, str]:
    """A reader's, for whom ``trainmedic`` is this checkout's and the home directory is empty."""
    commands = scratch / "bin"
    commands.mkdir()
    command = commands / "trainmedic"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trainmedic_server "$@"\n')
    command.chmod(0o755)
    for name in ("redis-cli", "redis-server"):
        (commands / name).symlink_to(shutil.which(name, path=system_path()) or name)
    return {
        **inherited(),
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": PYTHON_PATH,
        "HOME": str(scratch),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",  # the models are tiny, and the machine may be busy
    }


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in ELSEWHERE], ids=name_of)
def test_the_examples_of_a_page_behave_as_shown(page: Path, tmp_path: Path) -> None:
    """Every example on the page is executed in order, and its result is as the page shows."""
    examples = doc_pages.blocks(page.read_text(encoding="utf-8"))
    in_checkout = any("./scripts/" in example.body for example in examples)
    if in_checkout and not (ROOT / ".venv" / ".installed-server").exists():
        pytest.fail("the page works in a checkout that scripts/setup has prepared")
    directory = ROOT if in_checkout else tmp_path / "work"
    if not in_checkout:
        directory.mkdir()
        for shipped in ("playbooks", "monitoring", "examples", "packaging"):
            (directory / shipped).symlink_to(ROOT / shipped)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with doc_pages.Reader(directory, scratch, environment(scratch)) as reader:
        for example in examples:
            try:
                reader.follow(example)
            except AssertionError as error:
                raise AssertionError(f"{name_of(page)}:{example.line}: {error}") from error


@pytest.mark.parametrize("page", ELSEWHERE)
def test_a_page_tested_elsewhere_is_still_tested_there(page: str) -> None:
    """Both the page and its test still exist."""
    assert (ROOT / page).is_file()
    assert (ROOT / ELSEWHERE[page]).is_file()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_within_the_documentation_are_valid(page: Path) -> None:
    """A relative link names a file of the repository."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text)
    dead = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not dead
