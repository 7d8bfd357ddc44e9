"""Check every pinned package against a database of known vulnerabilities, with pip-audit.

    python packaging/audit.py [LOCK...]        such as requirements/server.txt; by default all of them

Exit status: 0 if every package was checked and no vulnerability is known, 1 if one is known, 3 if packages could not be
checked. pip-audit alone would pass then: if a mirror of PyPI has no advisories, it skips every package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SERVICES = ("osv", "pypi")
"""The first that knows every package decides."""
OK, VULNERABLE, NOT_CHECKED = 0, 1, 3


@dataclass(frozen=True)
class Audit:
    """One database's result for one lock."""

    checked: int
    vulnerable: tuple[str, ...]
    """A line for each vulnerability."""
    not_checked: str
    """Reason why packages were not checked; empty if all were."""

    @property
    def status(self) -> int:
        if self.vulnerable:
            return VULNERABLE
        return NOT_CHECKED if self.not_checked else OK


def main(locks: Sequence[Path]) -> int:
    statuses = []
    for lock in locks:
        name = lock.name
        service, audit = _first_that_knows(lock)
        for line in audit.vulnerable:
            print(f"audit: {name}: {line}")
        if audit.not_checked:
            print(f"audit: {name}: NOT CHECKED: {audit.not_checked}")
        else:
            print(f"audit: {name}: {audit.checked} packages checked by {service}, {len(audit.vulnerable)} findings")
        statuses.append(audit.status)
    return VULNERABLE if VULNERABLE in statuses else max(statuses, default=OK)


def _first_that_knows(lock: Path) -> tuple[str, Audit]:
    audits = []
    for service in SERVICES:
        audit = _audit(lock, service)
        if audit.status != NOT_CHECKED:
            return service, audit
        audits.append(audit)
    return "", Audit(0, (), "; ".join(audit.not_checked for audit in audits))


def _audit(lock: Path, service: str) -> Audit:
    options = ("--disable-pip", "--require-hashes", "--progress-spinner", "off", "--format", "json", "--timeout", "30")
    command = [sys.executable, "-m", "pip_audit", *options, "--vulnerability-service", service]
    done = subprocess.run([*command, "--requirement", str(lock)], check=False, capture_output=True, text=True)
    try:
        dependencies: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        lines = done.stderr.strip().splitlines() or [f"pip-audit ended with {done.returncode}"]
        return Audit(0, (), f"{service} could not be asked ({lines[-1].partition(': ')[0]})")
    return reading(dependencies, service)


def reading(dependencies: Sequence[dict[str, Any]], service: str) -> Audit:
    checked = [each for each in dependencies if "skip_reason" not in each]
    vulnerable = tuple(
        f"{each['name']} {each['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'no release'}"
        for each in checked
        for found in each["vulns"]
    )
    skipped = len(dependencies) - len(checked)
    reason = f"{service} does not know {skipped} of {len(dependencies)} packages" if skipped or not dependencies else ""
    return Audit(len(checked), vulnerable, reason)


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]] or sorted((ROOT / "requirements").glob("*.txt"))))
