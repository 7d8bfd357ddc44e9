"""Signs and facts of a job's failure, from stored findings.

The server has only excerpts of logs and digests of dumps; `trainmedic diagnose --dir` reads the files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from msgspec.structs import replace

from trainmedic.wire import undoing
from trainmedic_logs.diagnosis import exits
from trainmedic_logs.diagnosis.collectives import CollectiveLines
from trainmedic_logs.diagnosis.exits import Exit
from trainmedic_logs.diagnosis.facts import Earlier, Facts, RankFacts, Sign
from trainmedic_logs.diagnosis.flight_recorder import digest, missing_ranks
from trainmedic_logs.diagnosis.flight_recorder.dump import Dump
from trainmedic_logs.diagnosis.reported_end import ReportedEnd
from trainmedic_logs.domain.finding import CauseClass, Finding, Role
from trainmedic_logs.domain.known_finding import KnownExcerpt, KnownFinding
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server.domain.job_life import JobLife, LifeState

END_RULES = frozenset({"launcher-table", "rank-failed"})  # Rules for lines that state how processes ended
_KILLED = re.compile(r"[Kk]ill(?:ed)? process (\d{1,10})")  # the kernel's line, with the PID
_LONGEST_LINE = 500  # characters
_LONGEST_SETTLING = timedelta(minutes=2)  # of a hang, however slow the steps are
_PRESENCE_LAGS = timedelta(seconds=15)  # Presences are written every 5 s, cached for up to 4.5 s, and read every 5 s
_SHORTEST_WATCH = timedelta(seconds=22)  # `_PRESENCE_LAGS`, the next reading after 5 s, and the next look after 2 s


def concerns(known: KnownFinding, job: str, nodes: Collection[str]) -> bool:
    """Return whether a finding is about a job: its own, a claimed one on its nodes, or of their kernels."""
    if job in (known.origin.job, known.target.job):
        return True
    if known.claimed_job == job:
        return known.origin.node in nodes
    return not known.is_printed and (known.target.node or known.origin.node) in nodes


def is_dump_digest(known: KnownFinding) -> bool:
    return known.rule == digest.RULE and known.origin.source == digest.SOURCE


def with_dumps(
    facts: Facts, excerpts: Iterable[KnownExcerpt], earlier: Sequence[KnownVerdict], updated_for: timedelta
) -> Facts:
    """Add the joint analysis of the dumps in `excerpts`, without those of other attempts and of failures with a
    verdict.
    """
    after = max((verdict.began_at + updated_for for verdict in earlier), default=None)
    dumps: list[Dump] = []
    refused: dict[str, str] = {}
    groups = digest.SharedGroups()
    for each in excerpts:
        if after is None or each.first_at > after:
            read, not_read = digest.read(each.excerpt.lines, facts.attempt, groups)
            dumps += read
            refused |= {f"the dump of rank {rank} on {each.key.node}": why for rank, why in not_read.items()}
    reading = missing_ranks.read_together(dumps) if dumps else None
    return replace(facts, recorder=reading, refused_dumps=refused)


def began_at(instances: Iterable[str], failed_at: datetime) -> datetime | None:
    """Return the start of the process that had failed by ``failed_at``, from process IDs; None without times."""
    times = (undoing.issued_at(instance) for instance in instances)
    return max((at for at in times if at is not None and at <= failed_at), default=None)


def is_kernel_kill(known: KnownFinding) -> bool:
    return known.cause is CauseClass.HOST_MEMORY and not known.is_printed


def with_kills(
    facts: Facts,
    findings: Sequence[KnownFinding],
    excerpts: Sequence[KnownExcerpt],
    earlier: Sequence[KnownVerdict],
    others: Collection[tuple[str, str]] = (),
) -> Facts:
    """Split kernel kills, which are stored combined by node, into one finding per process.

    Excludes kills before the last failure (`earlier`) and `others`, the `lost_processes` of other jobs.
    """
    by_id = {finding.id: finding.as_finding for finding in findings}
    after = max((verdict.began_at for verdict in earlier), default=None)
    kills: dict[tuple[str, str], Finding] = {}
    for each in excerpts:
        line = each.excerpt.lines[each.excerpt.at]
        if (pid := _KILLED.search(line)) is not None:
            own = replace(by_id[each.finding_id], id=each.key.id, first_at=each.first_at, last_at=each.first_at)
            kills[each.finding_id, pid[1]] = replace(own, line=line[:_LONGEST_LINE], fields={"pid": pid[1]}, count=1)
    # The first kill of a finding may have no excerpt.
    kills = {(first.id, first.fields.get("pid", "")): first for first in by_id.values()} | kills
    kills = {key: kill for key, kill in kills.items() if after is None or kill.last_at > after}
    kills = {key: kill for key, kill in kills.items() if (kill.origin.node, key[1]) not in others}
    rest = [finding for finding in facts.findings if finding.id not in by_id]
    return replace(facts, findings=sorted([*rest, *kills.values()], key=lambda finding: finding.first_at))


def lost_processes(findings: Iterable[KnownFinding], job: str) -> frozenset[tuple[str, str]]:
    """Return (node, PID) of ended processes reported by other jobs."""
    ended = (known for known in findings if known.origin.job not in (None, job) and known.role is not Role.NOISE)
    return frozenset((known.origin.node, pid) for known in ended if (pid := known.fields.get("pid")))


def failure_signs(findings: Iterable[KnownFinding], life: JobLife | None) -> list[Sign]:
    """Return signs of a failure or hang, earliest first.

    A root-cause line alone is none: loops may catch exceptions.
    """
    heard = [
        Sign(known.heard_first_at, known.origin.attempt, is_wait=not _is_of_launcher(known))
        for known in findings
        if _shows_failure(known)
    ]
    if life is not None and life.state is LifeState.GONE:
        heard.append(Sign(life.since))
    return sorted(heard, key=lambda sign: sign.at)


def _is_of_launcher(known: KnownFinding) -> bool:  # it states exit codes, so the processes have ended
    return known.rule in END_RULES and (known.rule != "rank-failed" or "exitcode" in known.line)


def _shows_failure(known: KnownFinding) -> bool:
    return known.rule in END_RULES or (known.role is Role.CASCADE and known.cause is CauseClass.HANG)


class Stepping(NamedTuple):
    """Progress of a job, by its presences."""

    step: int
    instance: str
    since: datetime  # time of the last advance, or of the first presence
    usual: timedelta = timedelta(0)  # longest recent time between advances; zero before this process's first

    def moved(self, step: int, instance: str, now: datetime) -> Stepping:
        """Another process (`instance`) proves no progress."""
        if instance != self.instance:
            return Stepping(step, instance, self.since)
        if step <= self.step:  # less after a rollback, from which the next steps count
            return self._replace(step=step)
        # Halved, so that one long time is soon forgotten.
        return Stepping(step, instance, now, max(now - self.since, self.usual / 2))


def is_settled(sign: Sign, stepping: Stepping | None, now: datetime, settling: timedelta) -> bool:
    """Return whether enough time has passed since a sign; for a hang, two usual steps more, within limits."""
    if sign.is_wait and stepping is not None and stepping.usual:
        settling = max(_SHORTEST_WATCH, min(2 * stepping.usual + settling, _LONGEST_SETTLING))
    return now - sign.at >= settling


def is_disproved(sign: Sign, stepping: Stepping | None) -> bool:
    """Return whether the job advanced after the sign of a hang."""
    return sign.is_wait and stepping is not None and bool(stepping.usual) and stepping.since > sign.at + _PRESENCE_LAGS


def is_of_another(sign: Sign, verdict: KnownVerdict, updated_for: timedelta) -> bool:
    if sign.attempt is not None and verdict.attempt is not None and sign.attempt > verdict.attempt:
        return True
    return sign.at - verdict.began_at > updated_for


def findings_of_attempt(findings: Iterable[KnownFinding], job: str, attempt: int | None) -> list[KnownFinding]:
    """Return findings of the attempt, those without one, and those that do not name the job.

    `attempt` None: open ones only, of their newest attempt.
    """
    findings = list(findings)
    if attempt is None:
        findings = [each for each in findings if each.is_open]
        attempts = [each.origin.attempt or 0 for each in findings if _names_job(each, job)]
        attempt = max(attempts, default=0)
    return [each for each in findings if not _names_job(each, job) or each.origin.attempt in (None, attempt)]


def settled_at(
    report: ReportedEnd, findings: Iterable[KnownFinding], settling: timedelta, unread: timedelta
) -> datetime:
    """Return when a verdict is due: after the first line that may explain the failure, otherwise after the report."""
    heard = [
        finding.heard_first_at
        for finding in findings
        if _names_job(finding, report.job) and finding.is_printed and finding.origin.attempt == report.attempt
        if finding.role is Role.ROOT or _shows_failure(finding)
    ]
    if heard:
        return min(heard) + settling
    return report.at + (unread if report.error and not report.is_hang else settling)


def _names_job(each: KnownFinding, job: str) -> bool:
    return job in (each.origin.job, each.target.job, each.claimed_job)


def healthy_shapes(
    past: Iterable[KnownFinding],
    attempt: int | None,
    failures: Iterable[KnownVerdict],
    reports: Iterable[ReportedEnd] = (),
) -> frozenset[str]:
    """Return line shapes that the job printed in earlier attempts without a known failure."""
    past = list(past)
    failed = {verdict.attempt for verdict in failures} | {each.attempt for each in reports if each.is_failure}
    failed |= {known.origin.attempt for known in past if _shows_failure(known)}
    numbered = ((known.origin.attempt, known) for known in past if known.is_printed and known.shape)
    return frozenset(
        known.shape
        for number, known in numbered
        if number is not None and number not in failed and attempt is not None and number < attempt
    )


def failure_facts(
    job: str,
    findings: Sequence[KnownFinding],
    excerpts: Sequence[KnownExcerpt],
    ranks: Mapping[int, RankFacts],
    gone_nodes: Mapping[str, datetime],
    earlier: Sequence[KnownVerdict],
    attempt: int | None = None,
    report: ReportedEnd | None = None,
) -> Facts:
    """Return the facts for a verdict. `excerpts` are those of `END_RULES`, `report` is the launcher's."""
    findings = [known for known in findings if not is_dump_digest(known)]
    attempts = [known.origin.attempt for known in findings if known.origin.attempt is not None]
    known_ranks = dict(ranks)
    for known in findings:
        rank = known.origin.rank
        if rank is not None and rank not in known_ranks and known.origin.node:
            known_ranks[rank] = RankFacts(node=known.origin.node)
    if report is not None and report.rank is not None and report.node:
        # The job may already report locations of the next attempt.
        place = known_ranks.get(report.rank)
        if place is None or place.node != report.node:
            known_ranks[report.rank] = RankFacts(node=report.node)
    ended = _exits(findings, excerpts)
    if report is not None and report.exit is not None:
        ended.append(report.exit)
    return Facts(
        reported=report.evidence if report is not None else None,
        is_reported_hang=report is not None and report.is_hang,
        is_known_to_fail=True,
        collectives=_collectives(findings),
        used_nccl=any("NCCL" in finding.line or "nccl" in finding.rule for finding in findings),
        job=job,
        attempt=attempt if attempt is not None else max(attempts, default=None),
        findings=_with_ranks([known.as_finding for known in findings], ended),
        exits=ended,
        ranks=known_ranks,
        knows_what_was_read=False,
        kernel_read=None,
        gone_nodes=gone_nodes,
        earlier=[Earlier(verdict.attempt or 0, verdict.fingerprint) for verdict in earlier],
    )


def _collectives(findings: Sequence[KnownFinding]) -> CollectiveLines:
    lines = CollectiveLines()
    for finding in findings:
        lines.take(finding.line, finding.first_at)
    return lines


def _with_ranks(findings: Iterable[Finding], ended: Iterable[Exit]) -> list[Finding]:
    """Add the global rank that an exit states for a finding's node and local rank."""
    ranks: dict[tuple[str, int | None], int | None] = {
        (each.node, each.local_rank): each.rank
        for each in ended
        if each.local_rank is not None and each.rank is not None
    }
    placed = [
        replace(each, origin=replace(each.origin, rank=ranks.get((each.origin.node, each.origin.local_rank))))
        if each.origin.rank is None and not each.ranks
        else each
        for each in findings
    ]
    return sorted(placed, key=lambda finding: finding.first_at)


def _exits(findings: Sequence[KnownFinding], excerpts: Sequence[KnownExcerpt]) -> list[Exit]:
    """Return each process's exit once. A table takes precedence over lines."""
    nodes = {known.id: known.origin.node for known in findings}
    tables: dict[tuple[str, int | None], Exit] = {}
    lines: list[Exit] = []
    for each in excerpts:
        node = each.key.node or nodes.get(each.finding_id, "")
        for ended in exits.torchrun_table("\n".join(each.excerpt.lines), node):
            tables[node, ended.pid] = replace(ended, is_node_sure=ended.node == node)
        lines += [ended for line in each.excerpt.lines for ended in _launcher_exits(line, node)]
    if not excerpts:
        lines = [ended for known in findings for ended in _launcher_exits(known.line, known.origin.node)]
    known_pids = {ended.pid for ended in tables.values()}
    others = (ended for ended in lines if ended.pid is None or ended.pid not in known_pids)
    return list(dict.fromkeys([*tables.values(), *others]))


def _launcher_exits(line: str, node: str) -> list[Exit]:
    ended = exits.launcher_line(line, node)
    return [replace(each, is_node_sure=bool(node) and each.node == node) for each in ended]
