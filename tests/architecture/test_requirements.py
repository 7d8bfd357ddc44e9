"""What is installed is what the project says it needs, pinned."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import trainmedic_agent
import trainmedic_core
import trainmedic_logs
from trainmedic_server import __version__

ROOT = Path(__file__).parents[2]
LOCKS = (
    "server.txt",
    "sdk.txt",
    "logs.txt",
    "agent.txt",
    "test.txt",
    "training.txt",
    "supply.txt",
    "engines.txt",
    "trl.txt",
)
PINNED = re.compile(r"(?P<name>[a-z0-9-]+)==[\w.+!]+( ; .+)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+")


def declared(path: Path) -> set[str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {line for line in lines if line and not line.startswith(("#", "-"))}


def project(name: str) -> dict[str, Any]:
    """The table of a distribution's project; the server's is at the top."""
    table: dict[str, Any] = tomllib.loads((ROOT / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def others(dependencies: Iterable[str]) -> set[str]:
    """Those that are not our own distributions."""
    return {each for each in dependencies if not each.startswith("trainmedic")}


def pins(name: str) -> dict[str, str]:
    """The pinned version of each package."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def test_the_lock_is_generated_from_the_packages_dependencies() -> None:
    """requirements/server.in holds the dependencies of server, extras and agent, with the same bounds; sdk.in, logs.in
    and agent.in those of a part, which are among them."""
    server = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {*server["dependencies"], *itertools.chain(*server["optional-dependencies"].values())}
    agent = project("agent")["dependencies"]
    assert declared(ROOT / "requirements" / "server.in") == others({*wanted, *agent})
    for name in ("agent", "logs", "sdk"):
        assert declared(ROOT / "requirements" / f"{name}.in") == others(project(name)["dependencies"])
        assert pins(f"{name}.txt").items() <= pins("server.txt").items()


def test_the_distributions_share_one_version_and_require_it() -> None:
    """Their packages import each other, so mixed versions would break."""
    assert {__version__, trainmedic_core.__version__, trainmedic_logs.__version__, trainmedic_agent.__version__} == {
        project(name)["version"] for name in ("agent", "logs", "sdk")
    }
    for name in ("", "agent", "logs"):
        own = [each for each in project(name)["dependencies"] if each.startswith("trainmedic")]
        assert own
        assert [each for each in own if not each.endswith(f"=={__version__}")] == []


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_is_pinned_with_hashes_and_nothing_else(name: str) -> None:
    """The locks contain only names, versions and hashes: no URL, index or option."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    rest = "".join(line for line in PINNED.sub("", text).splitlines() if not line.startswith("#"))
    assert rest == ""


def test_the_locks_agree() -> None:
    """A package in several locks has one version; otherwise installing one lock would undo another."""
    for one, other in itertools.combinations(LOCKS, 2):
        mine, theirs = pins(one), pins(other)
        assert {name: mine[name] for name in mine.keys() & theirs.keys()} == {
            name: theirs[name] for name in mine.keys() & theirs.keys()
        }


def test_torch_is_not_pinned() -> None:
    """The right build depends on the machine, so neither torch nor its GPU libraries are pinned."""
    assert not [name for name in pins("training.txt") if re.match(r"(torch|triton|nvidia-.*|cuda-.*)$", name)]
