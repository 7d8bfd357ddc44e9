"""Rows of findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from trainmedic.wire.envelope import read_time, write_time
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.finding import CauseClass, Excerpt, Origin, Role, TimeSource
from trainmedic_logs.domain.finding_codec import read_ranks, write_ranks
from trainmedic_logs.domain.known_finding import (
    Episode,
    EpisodeKey,
    FindingAlert,
    FindingEnd,
    KeptJob,
    KnownExcerpt,
    KnownFinding,
)

Row = Sequence[Any]


def finding_row(known: KnownFinding) -> tuple[Any, ...]:
    target = known.target
    return (
        known.id,
        known.key,
        known.rule,
        known.role.value,
        known.cause.value,
        target.kind.value,
        target.node,
        target.gpu,
        target.job or known.origin.job,
        known.origin.attempt,
        asdict(known.origin),
        known.line,
        known.first_at,
        known.last_at,
        known.heard_first_at,
        known.heard_at,
        dict(known.labels),
        dict(known.fields),
        write_ranks(known.ranks),
        sorted(known.nodes),
        known.count,
        known.time_source.value,
        known.clock_error,
        known.shape,
        known.is_printed,
        known.ended_at,
        known.ended_because.value if known.ended_because else None,
        known.is_suspected,
        known.confirmed_by,
        known.alert.fingerprint if known.alert else None,
        _written_alert(known.alert) if known.alert else None,
        known.no_alert_because,
        known.tell_at,
    )


def finding_of(row: Row) -> KnownFinding:
    finding_id, _, rule, role, cause, kind, node, gpu, job, _, origin, line, *others = row
    first_at, last_at, heard_first_at, heard_at, labels, fields, ranks, nodes, count, *others = others
    time_source, clock_error, shape, is_printed, ended_at, ended_because, is_suspected, confirmed_by, *others = others
    _, alert, no_alert_because, tell_at = others
    target_kind = TargetKind(kind)
    return KnownFinding(
        id=finding_id,
        rule=rule,
        role=Role(role),
        cause=CauseClass(cause),
        target=Target(target_kind, node, gpu, job if target_kind is TargetKind.JOB else None),
        origin=Origin(**origin),
        line=line,
        first_at=first_at,
        last_at=last_at,
        heard_first_at=heard_first_at,
        heard_at=heard_at,
        labels=labels,
        fields=fields,
        ranks=read_ranks(ranks),
        nodes=frozenset(nodes),
        count=count,
        time_source=TimeSource(time_source),
        clock_error=clock_error,
        shape=shape,
        is_printed=is_printed,
        ended_at=ended_at,
        ended_because=FindingEnd(ended_because) if ended_because else None,
        is_suspected=is_suspected,
        confirmed_by=confirmed_by,
        alert=_alert_of(alert) if alert else None,
        no_alert_because=no_alert_because,
        tell_at=tell_at,
    )


def episode_row(episode: Episode, at: Any) -> tuple[Any, ...]:
    return (
        *episode.key,
        episode.finding_id,
        episode.count,
        episode.counted_before,
        episode.is_over,
        at,
    )


def episode_of(row: Row) -> Episode:
    node, episode_id, finding_id, count, counted_before, is_over, _ = row
    return Episode(EpisodeKey(node, episode_id), finding_id, count, counted_before, is_over)


def excerpt_row(known: KnownExcerpt) -> tuple[Any, ...]:
    return (
        known.finding_id,
        *known.key,
        known.source,
        known.stream,
        known.rank,
        known.first_at,
        list(known.excerpt.lines),
        known.excerpt.at,
        known.excerpt.number,
    )


def excerpt_of(row: Row) -> KnownExcerpt:
    finding_id, node, episode_id, source, stream, rank, first_at, lines, at, number = row
    excerpt = Excerpt(tuple(lines), at, number)
    return KnownExcerpt(finding_id, EpisodeKey(node, episode_id), source, stream, rank, first_at, excerpt)


def kept_job_of(row: Row) -> KeptJob:
    job, attempt, by, at, note = row  # Attempt 0 stands for all, in `KeptJob` None.
    return KeptJob(job, attempt or None, by, at, note)


def _written_alert(alert: FindingAlert) -> dict[str, Any]:
    return {**asdict(alert), "labels": dict(alert.labels), "starts_at": write_time(alert.starts_at)}


def _alert_of(written: dict[str, Any]) -> FindingAlert:
    return FindingAlert(**{**written, "starts_at": read_time(written["starts_at"])})
