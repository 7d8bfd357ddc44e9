"""A node whose agent reads logs, for tests and benchmarks: the rules that a server hands out, and what comes back.

Here: the real agent as a process (``gpu_node``), the server's part over Redis. Not here: what the server does with
findings.
"""

from __future__ import annotations

import contextlib
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis
import yaml

from tests.driver.driver import Driver, cards
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.programs import eventually
from trainmedic.wire.findings import FIELD, FINDINGS, RULES, RulesNotice, notice_of_rules
from trainmedic.wire.signing import Signer, signatures_of
from trainmedic_core import program_source
from trainmedic_core.target import TargetKind
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.lines.rule import LinePattern, LogRule, RuleAlert, RuleSet

RULE_SET = RuleSet(
    (
        LogRule(
            "marked",
            ("training", "launcher", "slurm", "kernel"),
            Role.ROOT,
            CauseClass.CODE,
            contains=("MARK",),
            match=(LinePattern(r"MARK (?P<n>\d+)"),),
            alert=RuleAlert("Marked", labels={"n": "{{ fields.n }}"}),
        ),
        LogRule(
            "gpu-xid",
            ("kernel",),
            Role.ROOT,
            CauseClass.GPU,
            target=TargetKind.GPU,
            contains=("NVRM: Xid (",),
            match=(LinePattern(r"NVRM: Xid \(PCI:(?P<pci>[0-9a-fA-F:.]{7,16})\): (?P<xid>\d{1,3})"),),
            gpu="{{ fields.pci }}",
            until="boot",
            alert=RuleAlert("GPUXidLogged", labels={"xid": "{{ fields.xid }}"}),
        ),
    )
)
"""A finding for each marked line by its number, and one for each GPU and XID."""


class LogNode(GpuNode):
    """Its policy has the parts of `logs`; rules come when `hand_out` is called."""

    def __init__(
        self, directory: Path, url: str, gpus: int = 2, has_logs: bool = True, name: str = "n1", **logs: Any
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        driver = Driver(directory / "gpus", cards(gpus))
        policy = {"allow": [], "logs": logs} if has_logs else {"allow": []}
        super().__init__(directory, url, driver, yaml.safe_dump(policy), name)
        self._signer = Signer.of(KEY.encode())

    def hand_out(self, rule_set: RuleSet = RULE_SET, at: datetime | None = None, signer: Signer | None = None) -> None:
        """Do what a server does that has these rules since `at`."""
        raw = rule_set.encode()
        notice = RulesNotice.of(raw, at or datetime.now(UTC)).encode(self.name, signer or self._signer)
        with redis.Redis.from_url(self.url) as client:
            client.set(RULES, raw)
            client.set(notice_of_rules(self.name), notice)

    def has_rules(self, rule_set: RuleSet = RULE_SET) -> None:
        """Wait until the agent applies them."""
        shown = f'trainmedic_agent_log_rules_info{{version="{rule_set.version}"}}'
        eventually(lambda: shown in self.metrics(), 90, "the rules", 0.1)

    def reader_pids(self) -> list[int]:
        """The processes that read logs for the agent: the opener, then the reader that it has started."""
        return [pid for pid, name in self._reading() if name != program_source.NAME]

    def parser_pids(self) -> list[int]:
        """The process that starts parsers for the reader, and the parsers."""
        return [pid for pid, name in self._reading() if name == program_source.NAME]

    def _reading(self) -> list[tuple[int, str]]:
        """All processes of the reader, each with its name."""
        return [
            (pid, name) for pid in _descendants(self.agent.process.pid) if (name := _name_of_reader(pid)) is not None
        ]

    def metrics(self) -> str:
        """What its exporter shows."""
        with urllib.request.urlopen(self.exporter(), timeout=60) as reply:
            return str(reply.read().decode())

    def updates(self) -> list[FindingUpdate]:
        """What has come so far, in order; each is genuine."""
        return [self._genuine(fields) for _, fields in self._entries()]

    def take_all(self) -> list[FindingUpdate]:
        """What has come so far, taken off the stream."""
        entries = self._entries()
        if entries:
            with redis.Redis.from_url(self.url) as client:
                client.xdel(FINDINGS, *(entry for entry, _ in entries))
        return [self._genuine(fields) for _, fields in entries]

    def _entries(self) -> Any:
        with redis.Redis.from_url(self.url) as client:
            return client.xrange(FINDINGS)

    def _genuine(self, fields: dict[bytes, bytes]) -> FindingUpdate:
        self._signer.verify(fields[FIELD], signatures_of(fields))
        return finding_codec.decode(fields[FIELD])

    def last_words(self) -> dict[str, FindingUpdate]:
        """The last that was said of each finding, by its mark."""
        return {update.finding.fields.get("n", update.finding.rule): update for update in self.updates()}

    def found(self, *marks: int, within: float = 90.0) -> dict[str, FindingUpdate]:
        """Wait until findings of these marks have come; return the last word of every one."""
        wanted = {str(mark) for mark in marks}
        eventually(lambda: wanted <= self.last_words().keys(), within, f"findings of {sorted(wanted)}", every=0.02)
        return self.last_words()


def _descendants(pid: int) -> list[int]:
    """The children of a process, each before its own."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return [each for child in found for each in (child, *_descendants(child))]


def _name_of_reader(pid: int) -> str | None:
    """Return the name of a process. None if it is not of the reader."""
    with contextlib.suppress(OSError):
        if b"agent-reader" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return Path(f"/proc/{pid}/comm").read_text().strip()
    return None
