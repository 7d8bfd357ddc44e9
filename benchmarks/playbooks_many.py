"""Cost of an alert with many playbooks on its alertname, one by one and by the index; and loading times.

    PYTHONPATH=.:app:sdk python benchmarks/playbooks_many.py [--playbooks 500]

Each playbook has 20 matchers, of which one names its rack and five are regular expressions; the alert is of one rack.
Printed are the processor's microseconds per alert for both ways, and their ratio; then the processor's seconds of the
first load, of a reload without change, and after one change.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from trainmedic_server.actions import registry
from trainmedic_server.catalog.library import Library
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import matching

PLAYBOOK = """\
playbook: playbook-{number:04}
on:
  alert: GPUTemperatureHigh
  matchers:
    - rack="rack-{number}"
    - '{equal}'
    - '{pattern}'
target: gpu
steps:
  - id: cap
    action: gpu.power_limit
    with: {{percent: {percent}}}
    undo: on_resolve
"""
EQUAL = ",".join(f'label_{n}="value"' for n in range(14))
PATTERN = ",".join(f'pattern_{n}=~"warning|critical|value.*"' for n in range(5))


def written(number: int, percent: int = 80) -> str:
    return PLAYBOOK.format(number=number, equal=EQUAL, pattern=PATTERN, percent=percent)


def heard() -> Alert:
    labels = {f"label_{n}": "value" for n in range(14)} | {f"pattern_{n}": "critical" for n in range(5)}
    labels |= {"alertname": "GPUTemperatureHigh", "rack": "rack-7", "gpu": "0", "node": "node-7"}
    return Alert("0" * 16, AlertStatus.FIRING, labels, {}, datetime.now(UTC))


def cost(work: Callable[[], object], rounds: int) -> float:
    work()
    began = time.process_time()
    for _ in range(rounds):
        work()
    return (time.process_time() - began) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--playbooks", type=int, default=500)
    count = parser.parse_args().playbooks
    with tempfile.TemporaryDirectory() as name:
        for number in range(count):
            Path(name, f"{number:04}.yaml").write_text(written(number))
        library = Library([Path(name)], registry.specs_only())
        began = time.process_time()
        library.reload()
        print(f"{len(library.all())} playbooks loaded in {time.process_time() - began:.2f} s, {library.problems[:1]}")
        print(f"reload of what has not changed: {cost(library.reload, 5):.3f} s")
        Path(name, "0007.yaml").write_text(written(7, percent=70))
        began = time.process_time()
        library.reload()
        print(f"reload of one changed file: {time.process_time() - began:.3f} s")
    alert, topology = heard(), Topology()
    plain = cost(lambda: matching.match(library.for_alert(alert.name), alert, topology), 100)
    indexed = cost(lambda: matching.match_shortlist(library.shortlist(alert), alert, topology), 1000)
    print(
        f"an alert, each asked: {plain * 1e6:.0f} us; by the index: {indexed * 1e6:.0f} us; {plain / indexed:.0f} times"
    )


if __name__ == "__main__":
    main()
