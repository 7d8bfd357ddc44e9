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


def test_imports_only_point_downwards() -> None:
    """import-linter's contracts in pyproject.toml hold for every module of the server and the SDK."""
    environment = {**os.environ, "PYTHONPATH": OWN_PATH}
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_agent_may_import_no_module_of_the_sdk() -> None:
    """The exceptions are the wire format and the base class of all errors."""
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


def test_no_sdk_module_overrides_another_modules_private_method() -> None:
    """Framework hooks are public, so the loop that calls them can be read without each of them."""
    assert TreeFigures(ROOT, ["sdk"]).overridden_private_methods("trainmedic") == []


def test_overridden_private_methods_are_detected(tmp_path: Path) -> None:
    """Also through an intermediate class and a generic base, but not within one module."""
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


def test_an_agent_loads_no_server_libraries() -> None:
    """An idle agent stays small because its process never imports them; its imports are a short list."""
    modules = loaded_by("trainmedic_agent.cli.agent")
    assert packages(modules) == _OF_AN_AGENT
    of_logs = {name for name in modules if name.startswith(("trainmedic_logs.lines", "trainmedic_core.expressions"))}
    assert of_logs == set(), "an agent that reads no logs loads nothing of what reading takes"


def test_a_log_reading_agent_loads_only_what_rules_need() -> None:
    """If the policy enables log reading, these are the expression sandbox and RE2."""
    assert packages(loaded_by("trainmedic_agent.wiring.agent_logs")) <= _OF_AN_AGENT | _TO_READ_LOGS
