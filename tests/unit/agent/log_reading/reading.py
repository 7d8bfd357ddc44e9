"""Reading logs in virtual time, on real files: what the agent's threads do, called one after another.

Here: a `Reading` with rules of its own, which is told when to look and to read, can be killed, and goes on from its
database. Not here: Redis (``tests/integration/agent``).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from trainmedic_agent.journal import Journal
from trainmedic_agent.log_opening.node_files import NodeFiles
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading.discovery import Discovery
from trainmedic_agent.log_reading.files import FileFollowing
from trainmedic_agent.log_reading.followed_file import followed_by
from trainmedic_agent.log_reading.job_budgets import FindingsOfJobs
from trainmedic_agent.log_reading.log_counters import LogCounters
from trainmedic_agent.log_reading.log_policy import LogsPolicy, read_logs
from trainmedic_agent.log_reading.log_store import LogStore, NodeBoot
from trainmedic_agent.log_reading.rule_runner import RuleRunner
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.lines.rule import LinePattern, LogRule, RuleAlert, RuleSet

NODE = "n1"
SOURCES = ("training", "launcher", "kernel", "slurm", "fabric-manager")
RULES = RuleSet(
    (
        LogRule(
            "marked",
            SOURCES,
            Role.ROOT,
            CauseClass.CODE,
            contains=("MARK",),
            match=(LinePattern(r"MARK (?P<n>\d+)"),),
            alert=RuleAlert("Marked", labels={"n": "{{ fields.n }}"}),
        ),
    )
)
"""One rule, which takes each line with a mark; each number makes a finding of its own, repeats of it count."""


def policy_of(**section: Any) -> LogsPolicy:
    """The policy that a section of a file makes. Raises AssertionError where it has faults."""
    faults: list[Any] = []
    policy = read_logs(section, faults)
    assert not faults, faults
    return policy


class Reading:
    """An agent's reading of files, from the database in `state`."""

    def __init__(
        self,
        state: Path,
        policy: LogsPolicy,
        rules: RuleSet = RULES,
        pods: str = "/nowhere",
        node: str = NODE,
        opened_by: NodeFiles = OwnFiles(),
    ) -> None:
        self._files = opened_by
        self.elapsed = 1000.0
        self.began = datetime.now(UTC)
        self._state = state
        self._policy = policy
        self._rules = rules
        self._pods = pods
        self._node = node
        self.start()

    def start(self) -> None:
        """A process begins, after the one before has gone."""
        self.journal = Journal(self._state)
        self.counters = LogCounters()
        self.store = LogStore(self.journal, NodeBoot(self._node, "boot-1", self.began), self.counters)
        cuts, clock = self.counters.cuts, self._clock
        of_jobs = FindingsOfJobs(self._policy.max_job_findings, cuts, clock)
        self.runner = RuleRunner(self.store, lambda _: None, self.counters, self.now, of_jobs, clock)
        self.runner.use(self._rules)
        self.discovery = Discovery(self._policy, self._node, self._pods, cuts=cuts, files=self._files)
        self.following = FileFollowing(
            self.runner,
            followed_by(self.runner, self.counters, self._policy.max_lines),
            self.counters,
            max_files=self._policy.max_files,
            now=self.now,
            monotonic=clock,
            max_job_files=self._policy.max_job_files,
            cuts=cuts,
            files=self._files,
        )

    def _clock(self) -> float:
        return self.elapsed

    def now(self) -> datetime:
        return self.began + timedelta(seconds=self.elapsed - 1000.0)

    def look(self) -> None:
        self.following.take_scan(self.discovery.scan(self.following.known_keys, lambda: False))

    def read(self, seconds: float = 1.1) -> None:
        """Read until there is no more, after so many seconds."""
        self.elapsed += seconds
        for _ in range(10_000):
            if not self.following.read():
                break
        self.runner.store_due()

    def step(self, seconds: float = 1.1) -> None:
        self.look()
        self.read(seconds)

    def kill(self) -> None:
        """The process is gone, with what it had in memory."""
        self.following.close()
        self.journal.close()

    def updates(self) -> list[FindingUpdate]:
        """What waits to be sent."""
        return [finding_codec.decode(body) for _, body in self.store.number_next(10_000)]

    def last_words(self) -> Mapping[str, FindingUpdate]:
        """The last that is said of each finding, by its id."""
        return {update.finding.id: update for update in self.updates()}

    def marks(self) -> list[str]:
        """The first mark of each finding, in the order in which they were found."""
        return [update.finding.fields["n"] for update in self.last_words().values()]

    def counted(self) -> int:
        """Lines in all findings together."""
        return sum(update.finding.count for update in self.last_words().values())
