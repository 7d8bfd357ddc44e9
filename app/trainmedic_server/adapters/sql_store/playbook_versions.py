# Versions of a playbook that its runs used, for `GET /playbooks/{name}/versions`.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store import statements
from trainmedic_server.adapters.sql_store.history import SqlHistory
from trainmedic_server.adapters.sql_store.schema import is_no_member, playbook_versions, runs
from trainmedic_server.ports.playbook_versions import PlaybookVersions, UsedVersion

_MOST_VERSIONS = 500  # of a playbook, the newest
_NAME: sa.BindParameter[str] = sa.bindparam("name")
_NEWEST_RUNS = (
    sa.select(runs.c.version, runs.c.created_at, runs.c.id)
    .where(runs.c.playbook == _NAME, is_no_member)
    .order_by(runs.c.created_at.desc(), runs.c.id.desc())
    .limit(sa.bindparam("most_runs"))
    .subquery()
)
_RUNS = sa.select(
    _NEWEST_RUNS.c.version,
    sa.func.max(_NEWEST_RUNS.c.created_at, type_=runs.c.created_at.type).label("last_used_at"),
    sa.func.count().label("runs"),
    # An ID begins with its creation time.
    sa.func.min(_NEWEST_RUNS.c.id).label("first_run"),
    sa.func.max(_NEWEST_RUNS.c.id).label("last_run"),
).group_by(_NEWEST_RUNS.c.version)
_KEPT = (
    sa.select(playbook_versions.c.version, playbook_versions.c.kept_at)
    .where(playbook_versions.c.name == _NAME)
    .order_by(playbook_versions.c.kept_at.desc(), playbook_versions.c.version)
    .limit(_MOST_VERSIONS)
)


class SqlPlaybookVersions(SqlHistory, PlaybookVersions):
    async def used_versions(self, playbook: str, most_runs: int) -> Sequence[UsedVersion]:
        def read(connection: sa.Connection) -> list[UsedVersion]:
            values = {"name": playbook, "most_runs": most_runs}
            counted = {row.version: row for row in connection.execute(_RUNS, values)}
            return [_used(row, counted.get(row.version)) for row in connection.execute(_KEPT, {"name": playbook})]

        return await self._read(read)

    async def text_of_version(self, playbook: str, version: str) -> str | None:
        values = {"name": playbook, "version": version}

        def read(connection: sa.Connection) -> str | None:
            text: str | None = connection.execute(statements.PLAYBOOK_TEXT, values).scalar()
            return text

        return await self._read(read)


def _used(kept: Any, counted: Any) -> UsedVersion:
    if counted is None:
        return UsedVersion(kept.version, kept.kept_at)
    return UsedVersion(
        kept.version, kept.kept_at, counted.last_used_at, counted.runs, counted.first_run, counted.last_run
    )
