"""The distributions, installed in each combination, upgraded from the one server package of before, and removed.

Each environment has nothing but pip, our wheels and the packages of their locks. These are linked from the tests' own
environment, so that nothing is downloaded: what is not modelled is pip's own choice of versions.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import releases

ROOT = Path(__file__).parents[2]
FOLDERS = {"sdk": "sdk", "logs": "logs", "agent": "agent", "server": "."}
SOURCES = ("app", "agent", "logs", "sdk", "pyproject.toml", "LICENSE", "README.md")
NEEDS = {"logs": ("sdk", "logs"), "agent": ("sdk", "logs", "agent"), "server": ("sdk", "logs", "server")}
OF = {"logs": {"diagnose", "logs"}, "agent": {"agent", "agent-reader"}, "server": {"serve", "history", "playbook"}}
EVERY = {name for names in OF.values() for name in names}


def build(source: Path, folder: str, target: Path) -> Path:
    """The wheel of one folder of a copy of the sources."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(target), str(source / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Those of this checkout, built from a copy because a build leaves files beside its sources."""
    work = tmp_path_factory.mktemp("wheels")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, work / "source" / name, ignore=ignored)
        else:
            (work / "source").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, work / "source" / name)
    return {name: build(work / "source", folder, work / name) for name, folder in FOLDERS.items()}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """The wheels of the last commit in which one package held server, agent and logs."""
    moved = releases.commit_of("--diff-filter=ADR", "--", "logs/trainmedic_core/command.py")
    work = tmp_path_factory.mktemp("before")
    (work / "source").mkdir()
    content = releases.git("archive", f"{moved}^", "app", "sdk", "pyproject.toml", "LICENSE", "README.md")
    subprocess.run(["tar", "-x", "-C", str(work / "source")], input=content, check=True)
    return [build(work / "source", folder, work / f"wheel{number}") for number, folder in enumerate(("sdk", "."))]


class Environment:
    """A virtual environment with the packages that the locks of some distributions list."""

    def __init__(self, directory: Path, locks: Sequence[str]) -> None:
        venv.create(directory, symlinks=True)
        self._bin = directory / "bin"
        (packages,) = directory.glob("lib/python3*/site-packages")
        _link("pip", packages)  # an installation of its own would be most of the time
        for lock in locks:
            text = (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
            for name in re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE):
                _link(name, packages)

    def pip(self, *words: str | Path) -> None:
        command = [self._bin / "python", "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def install(self, wheels: Sequence[Path], *options: str) -> None:
        # Python compiles what the commands import; pip would compile all.
        self.pip("install", "--quiet", "--no-index", "--no-deps", "--no-compile", *options, *wheels)

    @property
    def has_script(self) -> bool:
        return (self._bin / "trainmedic").exists()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [self._bin / "trainmedic", *words]
        return subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)

    def commands(self) -> set[str]:
        """Those of `EVERY` that can be run."""
        return {name for name in EVERY if self.run(name, "--help").returncode == 0}


def _link(name: str, packages: Path) -> None:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return  # a lock lists what an older Python needs, too
    for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
        if not (packages / top).exists():
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))


@pytest.mark.parametrize("parts", [("logs",), ("agent",), ("server",), ("agent", "server")])
def test_each_combination_has_its_commands_and_loads_with_its_own_lock(
    parts: Sequence[str], wheels: dict[str, Path], tmp_path: Path
) -> None:
    """A missing command names its distribution and ends with 2."""
    environment = Environment(tmp_path / "env", parts)
    wanted = list(dict.fromkeys(part for name in parts for part in NEEDS[name]))
    environment.install([wheels[part] for part in wanted])
    environment.pip("check")
    own = OF["logs"].union(*(OF[part] for part in parts))
    assert environment.commands() == own
    for name in EVERY - own:
        ran = environment.run(name)
        (home,) = (f"trainmedic-{part}" for part, names in OF.items() if name in names)
        assert (ran.returncode, home in ran.stderr) == (2, True), ran.stderr
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    ran = environment.run("diagnose", "--dir", str(tmp_path / "logs"))
    assert ran.returncode == 0, ran.stderr
    assert "gpu_memory" in ran.stdout


def test_log_rules_are_tested_without_a_server(wheels: dict[str, Path], tmp_path: Path) -> None:
    """The test covers findings, alerts and verdicts; playbook reactions are reported as untested."""
    environment = Environment(tmp_path / "env", ("logs",))
    environment.install([wheels[part] for part in NEEDS["logs"]])
    rules = tmp_path / "rules"
    rules.mkdir()
    rule = "log_rule: oom\nsource: training\ncontains: [out of memory]\nmatch: [out of memory]\nrole: root\n"
    (rules / "oom.yaml").write_text(f"{rule}cause: gpu_memory\nalert: {{name: OutOfMemory}}\n")
    line = "{source: training, rank: 0, text: out of memory}"
    expect = "{findings: [{rule: oom}], alerts: [{name: OutOfMemory}], runs: []}"
    tests = f"tests: [{{name: one line, lines: [{line}], expect: {expect}}}]\n"
    (rules / "oom_test.yaml").write_text(tests)
    ran = environment.run("logs", "test", str(rules))
    assert (ran.returncode, "1 tests, 0 failed" in ran.stdout) == (0, True), ran.stdout + ran.stderr
    assert "runs: not tested here; trainmedic-server tests it" in ran.stderr
    (rules / "oom_test.yaml").write_text(tests.replace("OutOfMemory", "Other"))
    ran = environment.run("logs", "test", str(rules))
    assert (ran.returncode, "expected Other, got OutOfMemory" in ran.stdout) == (1, True), ran.stdout + ran.stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    ran = environment.run("logs", "test", str(empty))
    assert ran.returncode == 2, ran.stdout + ran.stderr


def test_a_folder_of_wheels_is_enough_for_pip(wheels: dict[str, Path], tmp_path: Path) -> None:
    """As the installation page shows, pip finds the parts that the server needs, and installs no agent."""
    environment = Environment(tmp_path / "env", ("server",))
    folder = tmp_path / "dist"
    folder.mkdir()
    for wheel in wheels.values():
        shutil.copy(wheel, folder)
    environment.pip("install", "--quiet", "--no-index", "--find-links", folder, "trainmedic-server==0.1.0")
    assert environment.commands() == OF["server"] | OF["logs"]


def test_an_earlier_server_is_upgraded_in_place(
    before: Sequence[Path], wheels: dict[str, Path], tmp_path: Path
) -> None:
    """The script stays, and with the agent's distribution next to it all commands work."""
    environment = Environment(tmp_path / "env", ("server",))
    environment.install(before)
    assert environment.commands() == EVERY
    environment.install([wheels["sdk"], wheels["logs"], wheels["server"]], "--upgrade", "--force-reinstall")
    assert environment.commands() == EVERY - OF["agent"]
    environment.install([wheels["agent"]])
    environment.pip("check")
    assert environment.commands() == EVERY


def test_removal_takes_its_commands_and_the_rest_can_be_repaired(wheels: dict[str, Path], tmp_path: Path) -> None:
    """pip removes the script that three distributions share; the installation page says how to restore it."""
    environment = Environment(tmp_path / "env", ("server",))
    environment.install([wheels[part] for part in ("sdk", "logs", "agent", "server")])
    environment.pip("uninstall", "--yes", "--quiet", "trainmedic-server")
    assert not environment.has_script
    environment.install([wheels["agent"]], "--force-reinstall")
    assert environment.commands() == OF["agent"] | OF["logs"]
    environment.pip("uninstall", "--yes", "--quiet", "trainmedic-agent", "trainmedic-logs", "trainmedic")
    assert not environment.has_script
