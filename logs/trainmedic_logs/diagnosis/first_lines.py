"""The job's first line that can be the origin, and its confidence."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence

from trainmedic_logs.diagnosis import wording
from trainmedic_logs.diagnosis.attribution import (
    RERUN,
    Attribution,
    EvidenceSource,
    clock_of,
    evidence_of,
    moment_of,
    rank_of,
)
from trainmedic_logs.diagnosis.facts import Facts
from trainmedic_logs.diagnosis.verdict import Confidence
from trainmedic_logs.diagnosis.window import Relevant, is_heading_only
from trainmedic_logs.domain.finding import CauseClass, Finding, Role
from trainmedic_logs.lines.exception_causes import GUESS, PROOF
from trainmedic_logs.lines.observation import GROUP_RANK

# Causes of which a training sees only the effects.
_NEVER_SURE_BY_LINE = frozenset(
    {CauseClass.UNKNOWN, CauseClass.NETWORK, CauseClass.GPU, CauseClass.NODE, CauseClass.HANG}
)
_XIDS_OF_PROGRAMS = frozenset({"13", "31"})  # illegal accesses, usually by the program's CUDA kernel
# Captured groups of lines that may have ended nothing: exceptions in a thread, without a complete (`first_frame`) or
# any (`alone`) traceback, and crashes of any process.
_DOUBTFUL = frozenset({"thread", "first_frame", "alone", "crash", GUESS})
_CODE_PROOF = re.compile(
    r"Assertion `[^`']*(?:index out of bounds|srcIndex < srcSelectDimSize|srcSelectDimSize)[^`']*[`'] ?failed"
    r"|Detected mismatch between collectives on ranks"
    r"|no kernel image is available|invalid device ordinal|Duplicate GPU detected|ncclInvalid(?:Usage|Argument)"
)
# Words that prove the cause.
_PROOF: Mapping[CauseClass, re.Pattern[str]] = {
    CauseClass.STORAGE: re.compile(
        r"No space left on device|[Dd]isk quota exceeded|Stale (?:NFS )?file handle|\[Errno (?:5|28|116|117|122)\]"
        r"|failed writing file [^:]{1,200}: file write failed"
        r"|ephemeral[- ](?:local )?storage|local storage usage exceeds|os error (?:28|122)\b"
    ),
    CauseClass.HOST_MEMORY: re.compile(
        r"No space left on device|\[Errno (?:12|28)\]|bad_alloc|^MemoryError(?:: Unable to allocate|\s*$)"
        r"|[Oo]ut[ -]of[ -][Mm]emory: Kill|OOMKill|OOM Killed|low on resource: |running low on memory"
        r"|NODE_OUT_OF_MEMORY|RayOutOfMemoryError"
        r"|exceeds the memory usage threshold|can't allocate memory: you tried"
    ),
    CauseClass.DATA: re.compile(r"image file is truncated"),
    CauseClass.PREEMPTION: re.compile(
        r"\bPreempted\b|DUE TO (?:PREEMPTION|JOB REQUEUE|TIME LIMIT)|node was preempted|: this job is preempted"
    ),
}
# Driver messages about faults that no program causes.
_HARDWARE = re.compile(r"uncorrectable (?:ECC|NVLink) error|GPU is lost|HBM multi-bit")
# Quoted errors happened elsewhere or not at all.
_QUOTED = re.compile(
    r"""['"`](?:[\w.]{1,80}(?:Error|Exception): )?(?:CUDA|HIP) error|['"`][\w.]{1,80}(?:Error|Exception): """
    r"""|[a-z,=>] (?:CUDA|HIP) (?:error|out of memory)"""
)
# Text that the model read or generated.
_MODEL_TEXT = re.compile(
    r"(?i)\W{0,4}(?:prompt|question|answer|response|completion|generat(?:ed|ion)|user|assistant|sample|example|prediction"
    r"|output text|target text)\b[^:=>]{0,20}[:=>]"
)
# Megatron-LM recomputes a step with wrong numbers, and decides only on another GPU that the training computes them.
_RECOMPUTED = re.compile(
    r"Unexpected result \S+ on rank \d+ at iteration|rerun: unexpected result is "
    r"|Possible (?:transient|persistent) error!"
)
_REPRODUCED = re.compile(r"Second rerun: unexpected result is reproducible|Correct result \(but possible")
# Printed after all ranks were compared.
_COMPARED_ALL_RANKS = re.compile(r"Duplicate GPU detected|Detected mismatch between collectives")
# Messages with one reading, even without a traceback.
_UNAMBIGUOUS = re.compile(
    r"Detected mismatch between collectives|out of memory\. Tried to allocate|ERROR_OUT_OF_DEVICE_MEMORY"
    r"|got an unexpected keyword argument|missing \d+ required (?:positional|keyword-only) argument"
)
_LARGE_LOSS_RULE = "loss-high"
# Rules that count only without another cause: scripts may survive a failed tool.
_LAST_RESORT_RULES = frozenset({"tool-failed", "pod-evicted"})
# Rules of ranks that wait for others, which may have failed for a reason of their own.
_WAITING_RULES = frozenset({"rendezvous-failed", "rendezvous-timeout"})
_RULES_PREVENTING_START = frozenset({"pod-not-started", "image-not-pulled"})
# Rules for events and tables of Kubernetes, which list any pods of a namespace.
_POD_RULES = _RULES_PREVENTING_START | {"container-oom-killed", "pod-evicted", "pod-preempted", "pod-storage-used-up"}
_LISTED_POD = re.compile(
    r"\b[Pp]od/(?P<a>[a-z0-9][a-z0-9.-]*)|^\s*(?:\S+\s+)?(?P<b>[a-z0-9][a-z0-9.-]*)\s+\d+/\d+\s+[A-Z]\w+\s+\d"
)
# Causes that a process states of itself, not of a peer's end.
_OWN_CAUSES = frozenset({CauseClass.CODE, CauseClass.DATA, CauseClass.GPU_MEMORY, CauseClass.STORAGE})
# Longest time between the same line of ranks that failed together, and from an exception to a line of its message.
_TOGETHER_S = 30.0
_SAME_MESSAGE_S = 1.0
# Difference that two nodes' clocks may have.
_WORST_CLOCK_S = 900.0


def first_line(facts: Facts, relevant: Relevant) -> Iterator[Attribution]:
    """Yield at most one attribution, to all ranks that printed the line together."""
    if not relevant.roots:
        return
    unsure_pods = [finding for finding in relevant.roots if _is_of_unknown_pod(finding, facts)]
    has_own = any(
        f.cause in _OWN_CAUSES and GUESS not in f.fields and f not in unsure_pods and not _is_last_resort(f, facts)
        for f in relevant.roots
    )
    last_resort = [
        f
        for f in relevant.roots
        if _is_last_resort(f, facts) or (has_own and (f in unsure_pods or _waited_for_other(f, relevant.roots)))
    ]
    roots = [finding for finding in relevant.roots if finding not in last_resort] or last_resort
    first = roots[0]
    rivals = [other for other in roots[1:] if not moment_of(first).is_before(moment_of(other))]
    # If the order is unknown, prefer the more specific line.
    leading = min([first, *(other for other in rivals if not _is_later_of_message(other, first))], key=_vagueness)
    leading = _cause_printed_next(leading, roots) or leading
    # The same line of other ranks.
    alike = [f for f in [first, *rivals] if f.rule == leading.rule or _has_result(f, leading)]
    alike += [f for f in roots if f not in alike and f.shape == leading.shape and _is_soon_after(f, leading)]
    ranks = frozenset(rank for finding in alike if (rank := rank_of(finding)) is not None)
    # Lines of other ranks that state another cause, or are certainly earlier, make the leading one doubtful.
    others = [f for f in [first, *rivals] if f.rule != leading.rule and rank_of(f) not in ranks]
    others = [f for f in others if f.cause is not leading.cause]
    earlier = [
        other
        for other in [*relevant.cascades, *last_resort]
        if rank_of(other) not in ranks and moment_of(other).is_before(moment_of(leading), by=1.0)
        if moment_of(leading).is_known
    ]
    is_sure = not others and not earlier and _is_sure(leading, ranks, facts, relevant)
    yield Attribution(
        EvidenceSource.LINE,
        _cause_of_line(leading, facts),
        _confidence_of(leading, facts, relevant, is_sure=is_sure),
        (
            evidence_of(leading, _step_of(leading) or "the first line that can be the cause"),
            *(evidence_of(f, "the same at about the same time") for f in [f for f in alike if f is not leading][:7]),
        ),
        ranks,
        "" if GROUP_RANK in leading.fields else facts.node_of(rank_of(leading)) or leading.origin.node,
        moment=moment_of(leading),
        place=_quoted_place(alike),
        is_provable=_proves_cause(leading) and GUESS not in leading.fields,
        has_started=leading.rule not in _RULES_PREVENTING_START,
        fingerprint=f"{leading.cause}:{leading.rule}:{leading.shape}",
    )


def _quoted_place(findings: Sequence[Finding]) -> str:
    # A rule of the user's may have a group of this name, with any text.
    texts = {str(f.fields[GROUP_RANK]) for f in findings if GROUP_RANK in f.fields}
    quoted = {int(text) for text in texts if text.isascii() and text.isdigit() and len(text) < 7}
    return f"{wording.ranks(quoted)} of the checkpoint's group" if quoted else ""


def _is_sure(leading: Finding, ranks: frozenset[int], facts: Facts, relevant: Relevant) -> bool:
    if facts.followed.get(leading.id) or leading.id in facts.excused or GROUP_RANK in leading.fields:
        return False
    if any(_may_be_first(other, leading, ranks) for other in relevant.roots):
        return False
    # A loss that is not a number ends no process; another failure may.
    if leading.cause is CauseClass.NUMERICS and (
        any(f.cause is not leading.cause for f in relevant.roots) or _is_recomputed_without_result(facts)
    ):
        return False
    is_hardware = leading.cause is CauseClass.GPU and bool(_HARDWARE.search(leading.line))
    if leading.cause in _NEVER_SURE_BY_LINE and not is_hardware:
        return False
    if _was_ended_by_sigkill(leading) or _QUOTED.search(leading.line):
        return False
    if _is_doubtful(leading) or not _proves_cause(leading):
        return False
    if relevant.cascades and _is_of_unknown_pod(leading, facts):
        return False
    if _were_ended_after_crash(ranks, facts) or _ran_until_stopped(leading, facts, relevant):
        return False
    # An exception can follow from another one on an unread rank.
    is_of_one = leading.cause is CauseClass.CODE and not _COMPARED_ALL_RANKS.search(leading.line)
    return not (is_of_one and facts.unread_ranks)


def _is_recomputed_without_result(facts: Facts) -> bool:
    lines = [finding.line for finding in facts.findings]
    return any(map(_RECOMPUTED.search, lines)) and not any(map(_REPRODUCED.search, lines))


def _is_later_of_message(other: Finding, first: Finding) -> bool:
    """Return whether both lines are of one message. False for exceptions: their rules match unrelated messages too."""
    is_exception = bool(first.fields.keys() & {"exception", "alone"})
    return other.rule == first.rule and not is_exception and other.origin.stream == first.origin.stream


def _cause_printed_next(leading: Finding, roots: Sequence[Finding]) -> Finding | None:
    if leading.cause is CauseClass.NUMERICS:
        # A recomputed step with another result shows that the GPU computed wrong numbers.
        return next((other for other in roots if other.rule == RERUN and other.cause is CauseClass.GPU), None)
    if leading.cause is not CauseClass.CODE or PROOF in leading.fields or _CODE_PROOF.search(leading.line):
        return None
    return next(
        (other for other in roots if other.cause is not CauseClass.CODE and _is_printed_next(other, leading)), None
    )


def _is_printed_next(other: Finding, leading: Finding) -> bool:
    is_same = other.origin.stream == leading.origin.stream and rank_of(other) == rank_of(leading)
    apart = (other.first_at - leading.first_at).total_seconds()
    is_own = not _is_later_of_message(other, leading)
    return is_same and is_own and GUESS not in other.fields and 0 <= apart <= _SAME_MESSAGE_S


def _has_result(finding: Finding, result: Finding) -> bool:
    return result.rule == RERUN and finding.cause is CauseClass.NUMERICS


def _proves_cause(finding: Finding) -> bool:
    if finding.rule == _LARGE_LOSS_RULE:
        return False  # it may be a sum over many samples
    if finding.cause in (CauseClass.NUMERICS, CauseClass.GPU_MEMORY, CauseClass.HANG):
        return True
    if PROOF in finding.fields or _CODE_PROOF.search(finding.line):
        return True
    words = _PROOF.get(finding.cause)
    is_hardware = finding.cause is CauseClass.GPU and _HARDWARE.search(finding.line)
    return bool(is_hardware or (words and words.search(finding.line)))


def _is_last_resort(finding: Finding, facts: Facts) -> bool:
    is_number = finding.cause is CauseClass.NUMERICS and "exception" not in finding.fields
    was_survived = is_number and (finding.id in facts.excused or bool(facts.followed.get(finding.id)))
    return is_heading_only(finding) or finding.rule in _LAST_RESORT_RULES or was_survived or _is_model_text(finding)


def _waited_for_other(finding: Finding, roots: Sequence[Finding]) -> bool:
    """Return whether another stream's own cause may have come first."""
    return finding.rule in _WAITING_RULES and any(
        other.cause in _OWN_CAUSES
        and GUESS not in other.fields
        and other.origin.stream != finding.origin.stream
        and not moment_of(finding).is_before(moment_of(other))
        for other in roots
    )


def _is_of_unknown_pod(finding: Finding, facts: Facts) -> bool:
    if finding.rule == "container-oom-killed" and "unit" in finding.fields:
        return True  # a journal has all services of a machine
    listed = _LISTED_POD.search(finding.line) if finding.rule in _POD_RULES else None
    return listed is not None and (listed["a"] or listed["b"]) not in facts.nodes


def _is_model_text(finding: Finding) -> bool:
    return "exception" not in finding.fields and bool(_MODEL_TEXT.match(finding.line))


def _is_doubtful(finding: Finding) -> bool:
    doubts = _DOUBTFUL & finding.fields.keys()
    return bool(doubts) and not (doubts <= {"alone", "first_frame"} and _UNAMBIGUOUS.search(finding.line))


def _vagueness(finding: Finding) -> tuple[bool, bool, bool]:
    # The most specific line sorts first.
    is_vague = finding.cause in (CauseClass.CODE, CauseClass.UNKNOWN)
    return is_vague, GROUP_RANK in finding.fields, "alone" in finding.fields


def _confidence_of(leading: Finding, facts: Facts, relevant: Relevant, *, is_sure: bool) -> Confidence:
    firsts = {ended.rank for ended in facts.exits if ended.is_first and ended.signal is None and ended.rank is not None}
    others = {rank_of(finding) for finding in relevant.roots if finding.rule != leading.rule}
    # A line after which its rank went on, while a rank with another line ended first, is a weak origin.
    is_passed = leading.cause is CauseClass.PREEMPTION or bool(facts.followed.get(leading.id))
    if (
        is_heading_only(leading)
        or _is_model_text(leading)
        or GUESS in leading.fields
        or leading.id in facts.excused
        or (is_passed and rank_of(leading) not in firsts and others & firsts)
    ):
        return Confidence.LOW
    return Confidence.HIGH if is_sure else Confidence.MEDIUM


def _step_of(finding: Finding) -> str:
    """Return ``in step 7 the loss is nan``. Empty for other lines."""
    fields = finding.fields
    if fields.get("event") != "step":
        return ""
    named = {"loss": "the loss", "grad_norm": "the gradient norm"}
    stated = [f"{name} is {fields[key]}" for key, name in named.items() if fields.get(key)]
    return f"in step {fields.get('step', '?')} {' and '.join(stated)}" if stated else ""


def _is_soon_after(finding: Finding, leading: Finding) -> bool:
    return abs((finding.first_at - leading.first_at).total_seconds()) <= _TOGETHER_S


def _may_be_first(finding: Finding, leading: Finding, ranks: frozenset[int]) -> bool:
    """Return whether another rank's finding may be earlier, by a wrong clock."""
    if GROUP_RANK in finding.fields and finding.shape == leading.shape:
        return False
    if rank_of(finding) in ranks or not moment_of(finding).is_known or not moment_of(leading).is_known:
        return False
    is_same_clock = clock_of(finding) == clock_of(leading)
    return not is_same_clock and (finding.first_at - leading.first_at).total_seconds() <= _WORST_CLOCK_S


def _was_ended_by_sigkill(finding: Finding) -> bool:
    return "signal: Killed" in finding.line


def _were_ended_after_crash(ranks: frozenset[int], facts: Facts) -> bool:
    own = [ended for ended in facts.exits if ended.rank in ranks]
    has_crashed = any(
        each.signal is not None and not each.is_victims and each.rank not in ranks for each in facts.exits
    )
    return has_crashed and bool(own) and all(ended.signal == signal.SIGTERM for ended in own)


def _ran_until_stopped(leading: Finding, facts: Facts, relevant: Relevant) -> bool:
    if leading.cause is CauseClass.PREEMPTION or any(each.is_failure and not each.is_victims for each in facts.exits):
        return False
    # A stop with a stated reason was requested.
    return any(finding.fields.get("why", "").strip() for finding in relevant.stopped)


def _cause_of_line(leading: Finding, facts: Facts) -> CauseClass:
    # A CUDA error after a program's illegal access, reported by the kernel, is the program's fault.
    if leading.cause is not CauseClass.GPU:
        return leading.cause
    node = leading.origin.node or facts.node_of(rank_of(leading))
    programs = [f for f in facts.findings if f.role is Role.CONFIRMATION and f.fields.get("xid") in _XIDS_OF_PROGRAMS]
    is_programs = any(not node or other.origin.node in ("", node) for other in programs)
    return CauseClass.CODE if is_programs else CauseClass.GPU
