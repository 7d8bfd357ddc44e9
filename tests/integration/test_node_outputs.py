"""What an agent answers is what the reference says, and what the shipped playbooks look for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.driver.driver import SET_LIMIT, UNKNOWN, Driver
from tests.support.gpu_node import GpuNode
from tests.support.programs import ROOT
from trainmedic.wire import envelope
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.domain.destinations import DestinationOutcome, merged_output

REFERENCE = (ROOT / "docs" / "reference" / "actions.md").read_text()
CAPS = (ROOT / "docs" / "how-to" / "cap-gpu-power.md").read_text()
REFUSALS = re.findall(r"^\| `(NVML_ERROR_\w+)`.*? \| `(\w+)` \|", CAPS, re.MULTILINE)
PLAYBOOKS = ("gpu-temperature-high", "training-throughput-drop")
"""Those that decide by facts."""

OF_THE_MACHINE = re.compile(r"swap\..*|.*pressure_percent|.*inodes_percent|problems")
"""Not every machine that runs tests has these; a broken ``/proc`` least of all."""
FREE = {"disks": "<mount>", "unread": "<reading>"}
"""Mappings whose keys are no part of the contract."""
TYPES: Mapping[str, type | tuple[type, ...]] = {
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "`true`": bool,
    "mapping": dict,
    "list": list,
    "list of strings": list,
    "number, string": (int, str),
}


@pytest.fixture
def node(tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]) -> Iterator[GpuNode]:
    with GpuNode(tmp_path / "node", redis_url, make_driver(2)) as running:
        yield running


def documented(action: str) -> dict[str, str]:
    """The keys of an action's output, with their types, as the reference has them."""
    section = re.search(rf"^#### Output of `{action}`\n(.*?)(?=^##|\Z)", REFERENCE, re.MULTILINE | re.DOTALL)
    assert section is not None
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", section[1], re.MULTILINE)
    return {key: kind for keys, kind in rows for key in re.findall(r"`([^`]+)`", keys)}


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of an output by its path, as the reference writes it; what is below ``gpu`` is as below ``gpus``."""
    for name, member in value.items():
        path = f"{prefix}{name}"
        if isinstance(member, Mapping) and path not in ("gpu", "gpus"):
            if name in FREE:
                for one in member.values():
                    yield from flat({FREE[name]: one}, f"{path}.")
            else:
                yield from flat(member, f"{path}.")
            continue
        yield path, member
        if path in ("gpus", "checks") and isinstance(member, list):
            for one in member:
                yield from flat(one, f"{path}[].")


def compare(action: str, outputs: list[Mapping[str, Any]], may_lack: Callable[[str], Any]) -> None:
    """The outputs have every key that the reference has, of its type, and no other."""
    said = documented(action)
    told = {path: value for output in outputs for path, value in flat(output)}
    assert sorted(told.keys() - said.keys()) == []
    assert [path for path in said if path not in told and not may_lack(path)] == []
    for path, value in told.items():
        assert isinstance(value, TYPES[said[path]]), path
        assert isinstance(value, bool) == (TYPES[said[path]] is bool), path


def asked(node: GpuNode, gpu: str) -> Mapping[str, Any]:
    """The facts of a node whose alert is about a GPU."""
    command = node.command("node.facts")
    command.target.update({"kind": "gpu", "gpu": gpu})
    return node.final(node.send(command)).output


def test_the_reference_of_power_limits_lists_what_an_agent_answers(node: GpuNode) -> None:
    """It has every key of a cap, a clamped cap, undos and a failure; and none that does not exist."""
    low = node.send(node.cap("0", percent=20, lease_seconds=60))
    high = node.send(node.cap("0", percent=80, lease_seconds=60))
    outputs = [node.final(low).output, node.final(high).output]
    outputs += [node.final(node.send(node.cap("0", undo_of=low.id))).output for _ in range(2)]
    node.driver.lose(1)
    failed = node.final(node.send(node.cap("1", percent=80)))
    assert failed.status == envelope.FAILED
    compare("gpu.power_limit", [*outputs, failed.output], lambda path: False)


def test_the_reference_of_facts_lists_what_an_agent_answers(node: GpuNode) -> None:
    """It has every key of a healthy node and of an unhealthy one."""
    well = asked(node, "1")
    node.driver.xid(0, 79)
    node.driver.fail("nvmlDeviceGetPowerUsage", UNKNOWN, gpu=0)
    node.driver.lose(1)
    compare("node.facts", [well, asked(node, "1")], OF_THE_MACHINE.fullmatch)


def test_the_reference_of_health_lists_what_an_agent_answers(node: GpuNode) -> None:
    """It has every key."""
    node.driver.ecc(0, 0, 1)
    compare("node.health", [node.do("node.health")[1]], lambda path: False)


def test_a_cap_is_rejected_as_the_page_on_caps_states(node: GpuNode) -> None:
    """The reasons are driver errors and what the target names."""

    def answer(gpu: str) -> str:
        return node.final(node.send(node.cap(gpu, percent=80))).status

    assert len(REFUSALS) == 5
    for error, said in REFUSALS:
        node.driver.fail(SET_LIMIT, getattr(pynvml, error), gpu=0)
        assert answer("0") == said, error
        node.driver.heal()
    assert "MIG instance (`MIG-…`) | `unsupported`" in CAPS
    assert answer("MIG-5a3c") == envelope.UNSUPPORTED
    assert "no such GPU on the node | `rejected`" in CAPS
    assert answer("7") == envelope.REJECTED


@pytest.mark.parametrize("name", PLAYBOOKS)
def test_the_shipped_playbooks_find_real_facts(node: GpuNode, name: str) -> None:
    """Each condition and message that reads facts finds them: of a node, and of a job on two."""
    path = ROOT / "playbooks" / f"{name}.yaml"
    (book,) = loader.load_file(path, registry.specs_only()).playbooks
    told = asked(node, "0")
    of_job = merged_output([DestinationOutcome(Target(TargetKind.NODE, node=name), told) for name in ("n1", "n2")])
    (facts,) = (step.id for step in book.definition.steps if getattr(step, "action", None) == "node.facts")
    looked = 0
    for output in (told, of_job):
        for phase, index in book.steps:
            condition = book.steps[phase, index].when
            if condition is not None and f"steps.{facts}.output" in condition.text:
                # So far beyond any value that whatever stands in for what is not there would decide otherwise.
                high, low = (scope(book, facts, shifted(output, by), by / 2) for by in (10_000, -10_000))
                assert book.when(phase, index, high)
                assert not book.when(phase, index, low)
                looked += 1
            if phase not in ("steps", "on_failure"):
                continue
            step = book.definition.phase(phase)[index]
            if f"steps.{facts}.output" in str(getattr(step, "with_", "")):
                assert "?" not in str(book.params(phase, index, scope(book, facts, output)))
    assert looked


def shifted(value: Any, by: float) -> Any:
    """The same facts with every number so much higher."""
    if isinstance(value, Mapping):
        return {name: shifted(member, by) for name, member in value.items()}
    if isinstance(value, list):
        return [shifted(member, by) for member in value]
    return value + by if isinstance(value, int | float) and not isinstance(value, bool) else value


def scope(book: YamlPlaybook, facts: str, output: Mapping[str, Any], limit: float | None = None) -> dict[str, Any]:
    """What steps see once the step ``facts`` has this output and the alert fires on; every one of ``vars`` is
    `limit`, where there is one."""
    steps = {
        step.id: {"status": "timed_out", "output": {}, "error": None, "attempts": 1} for step in book.definition.steps
    }
    steps[facts] |= {"status": "succeeded", "output": output}
    return {
        "vars": dict(book.definition.vars) if limit is None else dict.fromkeys(book.definition.vars, limit),
        "steps": steps,
        "target": {"kind": "job", "node": None, "gpu": None, "job": "llm"},
        "labels": {"alertname": book.definition.on.alertnames[0]},
        "annotations": {"summary": "slow"},
    }
