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
from trainmedic_server.adapters.sql_store.finding_tables import findings

Row = Sequence[Any]

_COLUMNS = tuple(column.name for column in findings.c)


def finding_row(known: KnownFinding) -> tuple[Any, ...]:
    target = known.target
    values = {
        "role": known.role.value,
        "cause": known.cause.value,
        "target_kind": target.kind.value,
        "node": target.node,
        "gpu": target.gpu,
        "job": target.job or known.origin.job,
        "attempt": known.origin.attempt,
        "origin": asdict(known.origin),
        "labels": dict(known.labels),
        "fields": dict(known.fields),
        "ranks": write_ranks(known.ranks),
        "nodes": sorted(known.nodes),
        "time_source": known.time_source.value,
        "ended_because": known.ended_because.value if known.ended_because else None,
        "fingerprint": known.alert.fingerprint if known.alert else None,
        "alert": _written_alert(known.alert) if known.alert else None,
    }
    return tuple(values[name] if name in values else getattr(known, name) for name in _COLUMNS)


def finding_of(row: Row) -> KnownFinding:
    values = dict(zip(_COLUMNS, row, strict=True))
    kind, node, gpu, job = (values.pop(name) for name in ("target_kind", "node", "gpu", "job"))
    for derived in ("key", "attempt", "fingerprint"):
        del values[derived]
    target = Target(TargetKind(kind), node, gpu, job if kind == TargetKind.JOB else None)
    because, alert = values["ended_because"], values["alert"]
    values |= {
        "role": Role(values["role"]),
        "cause": CauseClass(values["cause"]),
        "origin": Origin(**values["origin"]),
        "ranks": read_ranks(values["ranks"]),
        "nodes": frozenset(values["nodes"]),
        "time_source": TimeSource(values["time_source"]),
        "ended_because": FindingEnd(because) if because else None,
        "alert": _alert_of(alert) if alert else None,
    }
    return KnownFinding(target=target, **values)


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
