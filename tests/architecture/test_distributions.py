"""Which modules belong to which later distribution, and that none imports what is above it or beside it.

They lie in one package still. A module that no pattern names is the server's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "app" / "trainmedic_server"
PATTERNS = {
    "core": """core_errors command expressions expressions.* catalog.yaml_text catalog.yaml_files catalog.model_errors
        catalog.allowance domain.target domain.duration domain.fields domain.problems domain.plain_text
        domain.gpu_names domain.http_url domain.once machine_locks settings.sources cli.exits cli.table
        cli.setting_flags cli.output cli.completion presentation.words confined_process confined_child kill_as_user
        program_source""",
    "logs": """log_errors logs logs.* diagnosis diagnosis.* domain.finding domain.finding_codec domain.known_finding
        domain.log_search domain.log_sources domain.log_pages domain.log_cuts domain.file_times domain.pod_fault
        domain.xids domain.known_verdict catalog.log_rule_* adapters.dump_reader adapters.dump_child adapters.log_folder
        adapters.reading_limits wiring.folder_diagnosis simulation.log_lines simulation.log_test_format
        simulation.log_check simulation.log_fixtures cli.log_rules cli.folder_diagnosis cli.log_commands""",
    "agent": """agent_errors agent agent.* ports.gpus adapters.nvml_* adapters.time_limited_gpus wiring.agent
        wiring.agent_* wiring.node_gpus wiring.gpu_health settings.agent settings.agent_reader cli.agent
        cli.agent_reader cli.agent_commands domain.size""",
}
BELOW = {"core": {"core"}, "logs": {"core", "logs"}, "agent": {"core", "logs", "agent"}}


def distribution(module: str) -> str:
    for name, patterns in PATTERNS.items():
        if any(fnmatch(module, pattern) for pattern in patterns.split()):
            return name
    return "server"


def modules() -> dict[str, Path]:
    """The files by their dotted names below the package."""
    dotted = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix("__init__").rstrip("."): path for path, name in dotted.items()}


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
            home = (node.module or "").partition(".")[2]
            for alias in node.names:
                inner = f"{home}.{alias.name}".lstrip(".")
                yield inner if inner in known else home
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.startswith(PACKAGE.name))


def test_no_distribution_imports_one_above_or_beside_it() -> None:
    """So that core, logs and agent can be installed without the server, and the server without the agent."""
    known = modules()
    wrong = []
    for module, path in known.items():
        own = distribution(module)
        allowed = BELOW.get(own, {"core", "logs", "server"})
        wrong += [
            f"{own}: {module} imports {other} of {distribution(other)}"
            for other in imported(path, known)
            if other and distribution(other) not in allowed
        ]
        if own in ("core", "logs") and module != "command":
            wrong += [f"{module} imports the server's package" for other in imported(path, known) if not other]
    assert wrong == []


def test_each_pattern_names_a_module() -> None:
    """A module that was renamed does not fall to the server unseen."""
    known = modules()
    for patterns in PATTERNS.values():
        for pattern in patterns.split():
            assert any(fnmatch(module, pattern) for module in known), pattern
