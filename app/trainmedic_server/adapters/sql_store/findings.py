"""Findings in a unit of work.

Their statements do not wait for `SqlTransaction`'s pending writes, which are of other tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

import sqlalchemy as sa

from trainmedic_logs.domain.known_finding import Episode, EpisodeKey, JobPlace, KeptJob, KnownExcerpt, KnownFinding
from trainmedic_server.adapters.sql_store import finding_rows
from trainmedic_server.adapters.sql_store.bulk import UnitRecords
from trainmedic_server.adapters.sql_store.columns import TimeColumn
from trainmedic_server.adapters.sql_store.finding_tables import (
    finding_episodes,
    finding_excerpts,
    findings,
    job_places,
    kept_jobs,
)
from trainmedic_server.adapters.sql_store.lookup import KEYS, Lookup
from trainmedic_server.ports.findings import FindingRecords

_BY_ID = Lookup(sa.select(findings).where(findings.c.id.in_(KEYS)))
_OPEN = Lookup(sa.select(findings).where(findings.c.ended_at.is_(None), findings.c.key.in_(KEYS)))
_ALL_OPEN = sa.select(findings).where(findings.c.ended_at.is_(None)).order_by(findings.c.heard_first_at, findings.c.id)
_TO_TELL = (
    sa.select(findings)
    .where(findings.c.tell_at.is_not(None), findings.c.tell_at <= sa.bindparam("moment", type_=TimeColumn))
    .order_by(findings.c.tell_at, findings.c.id)
    .limit(sa.bindparam("limit"))
)
_EPISODES = Lookup(
    sa.select(finding_episodes).where(
        finding_episodes.c.node == sa.bindparam("on_node"), finding_episodes.c.id.in_(KEYS)
    )
)
_OPEN_EPISODES = Lookup(
    sa.select(finding_episodes.c.finding_id)
    .where(finding_episodes.c.finding_id.in_(KEYS), sa.not_(finding_episodes.c.is_over))
    .distinct()
)
_EXCERPT_COUNTS = Lookup(
    sa.select(finding_excerpts.c.finding_id, sa.func.count())
    .where(finding_excerpts.c.finding_id.in_(KEYS))
    .group_by(finding_excerpts.c.finding_id)
)
_RELEASE = sa.delete(kept_jobs).where(
    kept_jobs.c.job == sa.bindparam("of_job"), kept_jobs.c.attempt == sa.bindparam("of_attempt")
)
KEPT_JOBS = sa.select(kept_jobs).order_by(kept_jobs.c.job, kept_jobs.c.attempt)


class SqlFindings(UnitRecords, FindingRecords):
    def with_ids(self, ids: Collection[str]) -> dict[str, KnownFinding]:
        rows = _BY_ID.rows(self._connection(), ids)
        return {row[0]: finding_rows.finding_of(row) for row in rows}

    def open_with(self, keys: Collection[str]) -> dict[str, KnownFinding]:
        rows = _OPEN.rows(self._connection(), keys)
        return {row[1]: finding_rows.finding_of(row) for row in rows}

    def all_open(self) -> list[KnownFinding]:
        return [finding_rows.finding_of(row) for row in self._connection().execute(_ALL_OPEN)]

    def to_tell(self, moment: datetime, limit: int) -> list[KnownFinding]:
        rows = self._connection().execute(_TO_TELL, {"moment": moment, "limit": limit})
        return [finding_rows.finding_of(row) for row in rows]

    def save(self, changed: Sequence[KnownFinding]) -> None:
        # Ended findings first, because only one of each key may be open.
        ordered = sorted(changed, key=lambda known: known.is_open)
        self._write(findings, [finding_rows.finding_row(known) for known in ordered])

    def episodes(self, keys: Collection[EpisodeKey]) -> dict[EpisodeKey, Episode]:
        by_node: dict[str, list[str]] = {}
        for key in keys:
            by_node.setdefault(key.node, []).append(key.id)
        connection = self._connection()
        rows = [row for node, ids in by_node.items() for row in _EPISODES.rows(connection, ids, on_node=node)]
        return {episode.key: episode for episode in map(finding_rows.episode_of, rows)}

    def save_episodes(self, episodes: Sequence[Episode], at: datetime) -> None:
        self._write(finding_episodes, [finding_rows.episode_row(episode, at) for episode in episodes])

    def ids_with_open_episodes(self, ids: Collection[str]) -> set[str]:
        return {row[0] for row in _OPEN_EPISODES.rows(self._connection(), ids)}

    def excerpt_counts(self, ids: Collection[str]) -> dict[str, int]:
        return {row[0]: row[1] for row in _EXCERPT_COUNTS.rows(self._connection(), ids)}

    def save_excerpts(self, excerpts: Sequence[KnownExcerpt]) -> None:
        self._write(finding_excerpts, [finding_rows.excerpt_row(known) for known in excerpts])

    def keep_job(self, kept: KeptJob) -> None:
        # Attempt 0 stands for all.
        self._write(kept_jobs, [(kept.job, kept.attempt or 0, kept.by, kept.at, kept.note)])

    def release_job(self, job: str, attempt: int | None) -> bool:
        return self._connection().execute(_RELEASE, {"of_job": job, "of_attempt": attempt or 0}).rowcount > 0

    def kept_jobs(self) -> list[KeptJob]:
        return [finding_rows.kept_job_of(row) for row in self._connection().execute(KEPT_JOBS)]

    def job_places(self) -> Mapping[JobPlace, datetime]:
        rows = self._connection().execute(sa.select(job_places))
        return {JobPlace(job, node): seen_at for job, node, seen_at in rows}

    def save_job_places(self, places: Mapping[JobPlace, datetime]) -> None:
        self._write(job_places, [(*place, seen_at) for place, seen_at in places.items()])
