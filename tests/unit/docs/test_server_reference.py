"""The references of the server's metrics and of its events are complete, and name nothing that does not exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from trainmedic.wire import notice
from trainmedic_server import telemetry
from trainmedic_server.domain.event_kinds import EVENT_KINDS
from trainmedic_server.domain.run import Decision

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs" / "reference"
METRICS = (REFERENCE / "server-metrics.md").read_text()
EVENTS = (REFERENCE / "events.md").read_text()
SOURCE = ROOT / "app" / "trainmedic_server"
EVENT_MAKERS = {"Event": 0, "add_event": 0, "_event": 0, "_add_event": 1, "LifeChange": 1}
"""The calls that make an event, and which of their arguments is its kind."""


def test_the_reference_has_the_metrics_that_there_are() -> None:
    """Each with its type and its labels."""
    metrics = telemetry.Metrics()
    suffix = {"counter": "_total"}
    offered = {f"{family.name}{suffix.get(family.type, '')}": family.type for family in metrics.registry.collect()}
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", METRICS, re.MULTILINE)
    assert {name: kind for name, kind, _ in rows} == offered
    labels = {name: tuple(re.findall(r"`(\w+)`", cell)) for name, _, cell in rows}
    of_jobs = {f"trainmedic_job_{what}": ("job_name",) for what in ("gone", "failures_total", "restarts_total")}
    of_jobs["trainmedic_job_gpu"] = ("job_name", "gpu_node", "uuid")
    held = [each for each in vars(metrics).values() if hasattr(each, "_labelnames")]
    suffixed = {f"{each._name}{suffix.get(each._type, '')}": tuple(each._labelnames) for each in held}
    assert labels == {**suffixed, **of_jobs}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            if name in EVENT_MAKERS:
                yield name, node


def kinds_in_the_source() -> set[str]:
    """What is given as an event's kind: texts, names of texts in the same module or another, and the decisions."""
    texts: dict[str, str] = {}
    given: list[ast.expr] = []
    kinds: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Tuple)
                and isinstance(node.value, ast.Tuple)
            ):
                for target, value in zip(node.targets[0].elts, node.value.elts, strict=True):
                    if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                        texts[target.id] = str(value.value)
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Dict)
                and ast.unparse(node.targets[0]) == "_ORDERED"
            ):
                kinds |= {str(value.value) for value in node.value.values if isinstance(value, ast.Constant)}
        given += [call.args[at] for name, call in calls(tree) if len(call.args) > (at := EVENT_MAKERS[name])]
    for kind in given:
        if isinstance(kind, ast.Constant):
            kinds.add(str(kind.value))
        elif isinstance(kind, ast.Name) and kind.id in texts:
            kinds.add(texts[kind.id])
    return kinds | {str(decision) for decision in Decision} | notice.KINDS


def test_the_reference_has_the_kinds_of_events_that_there_are() -> None:
    """Each with its row, and each row its kind."""
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", EVENTS, re.MULTILINE)
    documented = {kind for row in rows for kind in re.findall(r"`(\w+)`", row)}
    assert documented == kinds_in_the_source() == EVENT_KINDS | {Decision.DUPLICATE}
