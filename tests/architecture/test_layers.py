"""The tree keeps to the layers that its documentation draws."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.architecture.tree_figures import TreeFigures
from tests.support.programs import OWN_PATH

ROOT = Path(__file__).parents[2]


def test_imports_point_downwards_only() -> None:
    """import-linter's contracts in pyproject.toml hold for every module of the server and the SDK."""
    environment = {**os.environ, "PYTHONPATH": OWN_PATH}
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_module_of_the_sdk_is_forbidden_to_the_agent() -> None:
    """Except the wire format and the base of all errors."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    forbidden = {
        module
        for each in contracts
        if each["type"] == "forbidden" and each["source_modules"] == ["trainmedic_agent"]
        for module in each["forbidden_modules"]
    }
    entries = {path.stem for path in (ROOT / "sdk/trainmedic").iterdir() if not path.name.startswith(("_", "py."))}
    assert forbidden == {f"trainmedic.{name}" for name in entries - {"wire", "errors"}}, (
        "edit pyproject.toml: forbidden_modules of trainmedic_agent"
    )


def test_no_module_of_the_sdk_overrides_a_private_method_of_another() -> None:
    """What a framework has to offer is public, so that the loop that calls it can be read without each of them."""
    assert TreeFigures(ROOT, ["sdk"]).overridden_private_methods("trainmedic") == []


def test_an_overridden_private_method_is_found(tmp_path: Path) -> None:
    """Also through a class in between, and of a generic base; not within one module."""
    package = tmp_path / "sdk/parts"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text("class Base:\n    def _save(self): ...\n    def load(self): ...\n")
    (package / "near.py").write_text("class Near(base.Base[int]):\n    def load(self): ...\n")
    (package / "far.py").write_text(
        "class Far(Near):\n    def _save(self): ...\n    def __init__(self): ...\n"
        "class Same(Far):\n    def __init__(self): ...\n"
    )
    assert TreeFigures(tmp_path).overridden_private_methods("parts") == ["parts.far.Far._save of parts.base.Base"]


# What redis-py imports by itself where it is installed is not ours to choose.
_BY_OTHERS = {"opentelemetry", "cryptography", "hiredis", "jwt", "typing_extensions", "prometheus_client"}
_OF_AN_AGENT = {
    "trainmedic_agent",
    "trainmedic_core",
    "trainmedic_logs",
    "trainmedic",
    "click",
    "redis",
    "yaml",
    "cython_runtime",
    "pynvml",
    "msgspec",
}
_TO_READ_LOGS = {"jinja2", "markupsafe", "re2"}


def loaded_by(module: str) -> set[str]:
    """What a process has loaded that has imported a module, without Python's own."""
    program = f"import sys, {module}; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": OWN_PATH}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def packages(modules: set[str]) -> set[str]:
    names = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - _BY_OTHERS
    return {name for name in names if not name.startswith("_")}


def test_an_agent_loads_none_of_the_servers_libraries() -> None:
    """An idle agent stays small because its process never imports them; what it does import is a short list."""
    modules = loaded_by("trainmedic_agent.cli.agent")
    assert packages(modules) == _OF_AN_AGENT
    of_logs = {name for name in modules if name.startswith(("trainmedic_logs.lines", "trainmedic_core.expressions"))}
    assert of_logs == set(), "an agent that reads no logs loads nothing of what reading takes"


def test_an_agent_that_reads_logs_loads_what_rules_take_and_no_more() -> None:
    """Where the policy says that logs are read: the sandbox of expressions, and RE2."""
    assert packages(loaded_by("trainmedic_agent.wiring.agent_logs")) <= _OF_AN_AGENT | _TO_READ_LOGS
