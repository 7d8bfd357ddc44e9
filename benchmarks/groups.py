"""An alert of a power feed over 500 nodes and 4,000 GPUs: cap and uncap each, in virtual time.

    PYTHONPATH=.:app:sdk:logs python benchmarks/groups.py [--nodes 500] [--serial 100%]

The real engine runs on an in-memory store with scripted actions and ``examples/playbooks/cap-rack.yaml``. Printed are
the real seconds, those per member, the memory before and at most, and the calls. It exits with 1 if a GPU was not
capped and uncapped once.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from pathlib import Path

from trainmedic_core import yaml_text
from trainmedic_server import telemetry
from trainmedic_server.actions import registry
from trainmedic_server.catalog import compiler
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.simulation import suite
from trainmedic_server.simulation.suite_format import TestEntry

PLAYBOOK = Path(__file__).parents[1] / "examples" / "playbooks" / "cap-rack.yaml"


def _mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _playbook(serial: str) -> YamlPlaybook:
    text = PLAYBOOK.read_text(encoding="utf-8").replace("serial: 100%", f"serial: {serial}")
    (document,), _ = yaml_text.read(text, str(PLAYBOOK))
    made = compiler.compile_document(document, registry.specs_only())
    assert isinstance(made, YamlPlaybook), made
    return made


def _test(nodes: int) -> TestEntry:
    alert = {"labels": {"alertname": "PDUOverload", "rack": "r1"}}
    return TestEntry.model_validate(
        {
            "name": "a power feed is overloaded",
            "inventory": {f"attributes:n[1-{nodes}]": "rack=r1", f"gpus:n[1-{nodes}]": "8"},
            "alerts": [{"alert": alert}, {"at": "30m", "alert": alert, "status": "resolved"}],
            "orders": [{"at": "1m", "do": "approve"}],
            "replies": {"cap": {"applied": {}, "after": "2s"}},
            "expect": {},
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--serial", default="100%", help="size of the batches")
    options = parser.parse_args()
    telemetry.configure_logging("CRITICAL")
    playbook, test, before, began = _playbook(options.serial), _test(options.nodes), _mebibytes(), time.perf_counter()
    seen = suite.played(test, [playbook], registry.specs_only())
    seconds, members = time.perf_counter() - began, 8 * options.nodes
    calls = Counter((call.target, call.undo) for call in seen.calls if call.action == "gpu.power_limit")
    (record,) = seen.runs
    events = Counter(event.kind for event in record.events)
    print(f"{members} members on {options.nodes} nodes, serial {options.serial}: {record.run.status}")
    print(f"{seconds:.1f} s, {seconds / members * 1000:.1f} ms a member")
    print(f"memory: {before:.0f} MiB before, {_mebibytes():.0f} MiB at most")
    print(f"{sum(calls.values())} calls; the parent's story has {len(record.events)} events: {dict(events)}")
    once = len(calls) == 2 * members and set(calls.values()) == {1}
    print(f"each GPU was capped once and given back once: {'yes' if once else 'NO'}")
    return 0 if once else 1


if __name__ == "__main__":
    sys.exit(main())
