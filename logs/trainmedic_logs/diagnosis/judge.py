"""Weighing of attributions into one verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from trainmedic_logs.diagnosis import (
    advice,
    collectives,
    evidence_sources,
    first_lines,
    pods,
    slow,
    stops,
    stragglers,
    wording,
)
from trainmedic_logs.diagnosis.attribution import Attribution, EvidenceSource, evidence_of, rank_of
from trainmedic_logs.diagnosis.exits import LAUNCHER
from trainmedic_logs.diagnosis.facts import Facts
from trainmedic_logs.diagnosis.own_times import LossRise
from trainmedic_logs.diagnosis.verdict import Advice, Confidence, Evidence, Verdict
from trainmedic_logs.diagnosis.window import TRUSTED_SOURCES, Relevant, select_relevant
from trainmedic_logs.domain.finding import CauseClass, Finding, Role

_NAN_RULE = "loss-nan"
_VAGUE_CAUSES = frozenset({CauseClass.UNKNOWN, CauseClass.HANG})  # compatible with any other cause
# A link, a file system or another process's memory may fail without effect on the job.
_OFTEN_UNRELATED = frozenset({CauseClass.NETWORK, CauseClass.STORAGE, CauseClass.HOST_MEMORY})
# Errors of the process itself, which explain its end better than doubtful signs of the machine.
_ERRORS_OF_PROCESS = frozenset({CauseClass.CODE, CauseClass.GPU_MEMORY})
_MOST_EVIDENCE = 20


def diagnose(facts: Facts) -> Verdict:
    """Return the verdict on an attempt that failed, is slow, or shows no fault."""
    relevant = select_relevant(facts)
    if facts.has_ended_well and not facts.is_known_to_fail:
        return _after_success(facts, relevant)
    attributions = sorted(_attributions(facts, relevant), key=lambda attribution: attribution.source)
    if not attributions:
        without_failure = _without_failure(facts) if relevant.first_sign is None else None
        return without_failure or _without_attribution(facts, relevant)
    leader = _leader(attributions)
    leader, against = _weighed(leader, [other for other in attributions if other is not leader])
    return _verdict(leader, against, facts, relevant)


def _after_success(facts: Facts, relevant: Relevant) -> Verdict:
    bad_numbers = [finding for finding in relevant.roots if finding.cause is CauseClass.NUMERICS]
    if bad_numbers:
        return _ended_with_bad_numbers(facts, bad_numbers[0])
    if facts.steps:
        slowness = slow.diagnose(facts.steps)
        if slowness.cause is not CauseClass.UNKNOWN:
            return slowness
    return _ended_well(facts)


def _without_failure(facts: Facts) -> Verdict | None:
    """Return the verdict by exit codes, step times, loss or throughput; None without these."""
    if _has_finished(facts):
        return _ended_well(facts)
    if facts.steps:
        slowness = slow.diagnose(facts.steps)
        if slowness.cause is not CauseClass.UNKNOWN or facts.loss_rise is None:
            return slowness
    if facts.loss_rise is not None:
        return _loss_rose(facts.loss_rise)
    if facts.throughput_drop is not None and not facts.steps:
        return slow.by_throughput(facts.throughput_drop, _timeouts(facts))
    return None


def _timeouts(facts: Facts) -> list[Evidence]:
    timeouts = {f.rule: f for f in facts.findings if f.role is Role.CASCADE and f.cause is CauseClass.HANG}
    return [evidence_of(finding, slow.WHY_TIMEOUT) for finding in timeouts.values()]


def _attributions(facts: Facts, relevant: Relevant) -> Iterable[Attribution]:
    yield from evidence_sources.kernel(facts, relevant)
    yield from pods.attributions(facts)
    yield from evidence_sources.recorder(facts)
    if any(finding.cause is CauseClass.HANG for finding in relevant.cascades):
        yield from collectives.attributions(facts.collectives)
    yield from first_lines.first_line(facts, relevant)
    yield from evidence_sources.gone_nodes(facts, relevant)
    if facts.is_reported_hang:
        # The launcher ended the processes, so their exit codes explain nothing.
        yield from stragglers.not_timed_out(facts, relevant)
        yield from stragglers.left_behind(facts, relevant)
        return
    stopped = list(stops.on_purpose(facts, relevant))
    # After an OOM kill, a scheduler also ends the rest of the step, without a reason.
    has_reason = any(attribution.confidence is Confidence.HIGH for attribution in stopped)
    killed = [] if has_reason else list(stops.scheduler_kills(facts, relevant))
    # A requested end explains the exits.
    yield from killed or stopped or evidence_sources.first_exits(facts, relevant)
    yield from stragglers.not_timed_out(facts, relevant)
    yield from stragglers.left_behind(facts, relevant)


def _leader(attributions: Sequence[Attribution]) -> Attribution:
    """Return the first of the strongest source, unless it describes consequences."""
    likely = [
        a for a in attributions if a.confidence is not Confidence.LOW and not _is_refuted_by_kill(a, attributions)
    ]
    errors = [a for a in likely if a.source is EvidenceSource.LINE and a.cause in _ERRORS_OF_PROCESS]
    strongest = next((a for a in likely if not (errors and _may_be_unrelated(a))), attributions[0])
    if strongest in errors:
        return strongest
    if strongest.source is EvidenceSource.LINE and strongest.cause is CauseClass.NETWORK:
        # A crashing process breaks its connections, which the others report.
        crashes = (a for a in likely if a.source is EvidenceSource.EXIT and a.cause in _ERRORS_OF_PROCESS)
        strongest = next(crashes, strongest)
    first = min((other for other in attributions if other.source is strongest.source), key=_order_in_source)
    lines = [other for other in attributions if other.source is EvidenceSource.LINE]
    # A certainly older job line from another place is the origin.
    for line in lines:
        if first.source < EvidenceSource.LINE and line.is_before(first) and not line.concerns(first):
            return line
    return first


def _order_in_source(attribution: Attribution) -> tuple[Any, ...]:
    # The proven first, then the certain, then the earliest.
    is_sure, moment = attribution.confidence is Confidence.HIGH, attribution.moment
    return (not attribution.is_proven, not is_sure, moment is None, moment and moment.at)


def _may_be_unrelated(attribution: Attribution) -> bool:
    is_sure = attribution.confidence is Confidence.HIGH
    has_time = attribution.moment is not None and attribution.moment.is_known
    is_vague = attribution.cause in _OFTEN_UNRELATED or not has_time
    return attribution.source is EvidenceSource.KERNEL and not is_sure and is_vague


def _weighed(leader: Attribution, others: Sequence[Attribution]) -> tuple[Attribution, list[Evidence]]:
    leader, against = _with_agreeing(leader, [other for other in others if other.concerns(leader)])
    for other in others:
        if other.concerns(leader) or leader.is_before(other) or leader.is_proven:
            continue
        # Requested ends, ranks without a timeout or left behind, and doubtful exits lower no leader's confidence.
        if other.source > EvidenceSource.EXIT or (
            other.source is EvidenceSource.EXIT and other.confidence is Confidence.LOW
        ):
            continue
        against += other.evidence[:2]
        leader = leader.with_confidence(leader.confidence.lowered())
    return leader, against


def _with_agreeing(leader: Attribution, same: Sequence[Attribution]) -> tuple[Attribution, list[Evidence]]:
    against: list[Evidence] = []
    for other in same:
        agrees = other.cause is leader.cause or leader.cause in _VAGUE_CAUSES or other.cause in _VAGUE_CAUSES
        agrees = agrees and not _ended_by_kill_instead(leader, other) and not _ended_by_kill_instead(other, leader)
        is_explained = _explains(leader, other)
        if not agrees and not is_explained:
            if leader.is_proven or leader.is_before(other):
                continue
            # Same ranks, contradicting causes: the stronger counts, with less confidence.
            leader = leader.with_confidence(leader.confidence.lowered())
            against += other.evidence[:2]
            continue
        takes_cause = leader.cause in _VAGUE_CAUSES and other.cause not in _VAGUE_CAUSES
        if takes_cause and other.confidence is Confidence.LOW:
            leader = leader.with_confidence(Confidence.LOW)  # a cause is no more certain than its source
        with_cause, without = (other, leader) if takes_cause else (leader, other)
        is_provable = with_cause.is_provable or other.is_trusted
        leader = replace(
            leader,
            cause=with_cause.cause,
            ranks=_combined_ranks(leader, other),
            node=leader.node or other.node,
            gpu=leader.gpu or other.gpu,
            is_trusted=leader.is_trusted or other.is_trusted,
            names_node=leader.names_node or other.names_node,
            confidence=Confidence.HIGH if is_provable and _raises_confidence(leader, other) else leader.confidence,
            evidence=with_cause.evidence + without.evidence,
            fingerprint=with_cause.fingerprint,
        )
    return leader, against


def _combined_ranks(leader: Attribution, other: Attribution) -> frozenset[int]:
    if not leader.ranks or not other.ranks:
        return leader.ranks or other.ranks
    # A source of low confidence does not narrow the leader's ranks.
    return leader.ranks if other.confidence is Confidence.LOW else leader.ranks & other.ranks


def _raises_confidence(leader: Attribution, other: Attribution) -> bool:
    if other.source > EvidenceSource.EXIT or other.source is leader.source:
        return False
    if Confidence.LOW in (leader.confidence, other.confidence):
        return False
    trusted = [each for each in (leader, other) if each.is_trusted]
    # A trusted one without a usable time may concern another failure.
    if any(each.moment is not None and not each.moment.is_known for each in trusted):
        return False
    return bool(trusted) or (bool(leader.ranks) and bool(other.ranks))


def _is_refuted_by_kill(printed: Attribution, attributions: Sequence[Attribution]) -> bool:
    return any(_ended_by_kill_instead(printed, other) and printed.concerns(other) for other in attributions)


def _ended_by_kill_instead(printed: Attribution, other: Attribution) -> bool:
    # The process may have caught the exception that it printed, and a later SIGKILL ended it.
    may_be_caught = printed.cause is CauseClass.CODE or not printed.is_provable
    return may_be_caught and printed.source is EvidenceSource.LINE and other.is_kill


def _explains(leader: Attribution, other: Attribution) -> bool:
    """Return whether a trusted statement explains the job's different error."""
    has_weight = leader.is_trusted and not other.is_trusted and bool(leader.moment and leader.moment.is_known)
    if leader.cause is CauseClass.HOST_MEMORY:  # the killed process was a data loader
        return has_weight and other.cause is CauseClass.DATA and bool(leader.ranks & other.ranks)
    return has_weight and leader.cause in (CauseClass.GPU, CauseClass.NODE)


def _loss_rose(rise: LossRise) -> Verdict:
    # Only a hint: a loss may rise and fall by itself.
    why = f"the loss was {rise.lowest:.3g}, and is {rise.last:.3g}"
    return Verdict(
        cause=CauseClass.NUMERICS,
        confidence=Confidence.LOW,
        summary=f"The numbers may be wrong: {why}. No log states that the job failed.",
        advice=Advice.ASK,
        evidence=(Evidence(why, rise.line, "training"),),
        fingerprint=f"{CauseClass.NUMERICS}:loss-rose",
    )


def _has_finished(facts: Facts) -> bool:
    return any(each.code == 0 for each in facts.exits) and not any(each.is_failure for each in facts.exits)


def _ended_well(facts: Facts) -> Verdict:
    ended = [each for each in facts.exits if each.code == 0]
    done = next((each for each in ended if each.reporter == LAUNCHER), ended[0])
    why = "a process states that it finished"
    if done.reporter == LAUNCHER:
        why = "its launcher saw it end with exit code 0"
    return Verdict(
        cause=CauseClass.UNKNOWN,
        confidence=Confidence.LOW,
        summary=wording.ENDED_WELL,
        advice=Advice.NONE,
        evidence=(Evidence(why, done.line, "exit", done.node, done.rank, done.at),),
        fingerprint=str(CauseClass.UNKNOWN),
    )


def _ended_with_bad_numbers(facts: Facts, first: Finding) -> Verdict:
    rank = rank_of(first)
    where = f" on rank {rank}" if rank is not None else ""
    well = _ended_well(facts)
    return Verdict(
        cause=CauseClass.NUMERICS,
        confidence=Confidence.HIGH if first.rule == _NAN_RULE else Confidence.MEDIUM,
        summary=f"The job ended without an error, but its numbers were wrong until its end{where}: {first.line[:200]}",
        advice=Advice.ASK,
        ranks=(rank,) if rank is not None else (),
        evidence=(evidence_of(first, "the first such line"), *well.evidence),
        fingerprint=f"{CauseClass.NUMERICS}:ended",
    )


def _without_attribution(facts: Facts, relevant: Relevant) -> Verdict:
    hang = next((finding for finding in relevant.cascades if finding.cause is CauseClass.HANG), None)
    by_rule = {finding.rule: finding for finding in reversed(relevant.cascades)}
    evidence = [
        evidence_of(finding, "a victim, which waited for another rank or lost its peer") for finding in by_rule.values()
    ]
    if facts.recorder and facts.recorder.waits and not facts.recorder.absent:
        wait = facts.recorder.waits[0]
        came = f"all {len(wait.waiting)} ranks with a dump reached {wait.operation} number {wait.number}"
        why = f"{came}, which did not complete"
        evidence.insert(0, Evidence(why, source="flight recorder", at=wait.since))
    if facts.reported is not None:
        evidence.insert(0, facts.reported)
    is_hang = hang is not None or facts.is_reported_hang or bool(facts.recorder and facts.recorder.waits)
    cause = CauseClass.HANG if is_hang else CauseClass.UNKNOWN
    before = sum(1 for earlier in facts.earlier if earlier.fingerprint == str(cause))
    has_signs = (
        is_hang
        or facts.reported is not None
        or bool(relevant.roots or relevant.cascades)
        or any(ended.is_failure for ended in facts.exits)
    )
    waited = next((f.fields for f in relevant.cascades if f.fields.get("joined")), {})
    next_step = advice.what_to_do(cause, Confidence.LOW, before, names_node=False)
    return Verdict(
        cause=cause,
        confidence=Confidence.LOW,
        summary=wording.without_origin(
            cause, has_signs=has_signs, joined=waited.get("joined", ""), size=waited.get("size", "")
        ),
        advice=next_step if has_signs or facts.is_known_to_fail else Advice.NONE,
        evidence=tuple(evidence),
        missing=tuple(wording.missing(facts, is_sure=False)),
        same_before=before,
        fingerprint=str(cause),
    )


def _verdict(leader: Attribution, against: Sequence[Evidence], facts: Facts, relevant: Relevant) -> Verdict:
    node = leader.node if _may_name_node(leader) else None
    before = sum(1 for earlier in facts.earlier if earlier.fingerprint == leader.fingerprint)
    evidence = [*leader.evidence, *_further_kernel_lines(leader, relevant)]
    # Without a known cause, a verdict is a hint even if the rank is certain.
    confidence = Confidence.LOW if leader.cause is CauseClass.UNKNOWN else leader.confidence
    return Verdict(
        cause=leader.cause,
        confidence=confidence,
        summary=wording.summary(leader, facts),
        advice=advice.what_to_do(
            leader.cause, leader.confidence, before, names_node=node is not None, has_started=leader.has_started
        ),
        ranks=tuple(sorted(leader.ranks)),
        node=node,
        gpu=leader.gpu if node else None,
        evidence=_without_repeats(evidence),
        against=_without_repeats(against),
        missing=tuple(wording.missing(facts, is_sure=leader.confidence is Confidence.HIGH)),
        same_before=before,
        fingerprint=leader.fingerprint,
    )


def _without_repeats(evidence: Sequence[Evidence]) -> tuple[Evidence, ...]:
    firsts = {(each.line or each.why, each.rank): each for each in reversed(evidence)}
    return tuple(each for each in evidence if firsts[each.line or each.why, each.rank] is each)[:_MOST_EVIDENCE]


def _may_name_node(leader: Attribution) -> bool:
    return leader.confidence is Confidence.HIGH and leader.is_trusted and leader.names_node and bool(leader.node)


def _further_kernel_lines(leader: Attribution, relevant: Relevant) -> list[Evidence]:
    # OOM kills confirm no other cause. Five lines suffice.
    return [
        evidence_of(finding, "the same node's kernel wrote this as well")
        for finding in relevant.trusted
        if finding.line not in {each.line for each in leader.evidence}
        if finding.cause is leader.cause or finding.cause is not CauseClass.HOST_MEMORY
        if finding.origin.source in TRUSTED_SOURCES and leader.node and finding.origin.node == leader.node
    ][:5]
