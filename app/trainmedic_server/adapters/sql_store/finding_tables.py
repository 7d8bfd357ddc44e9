"""Tables of findings."""

from __future__ import annotations

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store.columns import JsonColumn, Text, TimeColumn, metadata, partial_index

findings = sa.Table(
    "findings",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("key", Text, nullable=False),
    sa.Column("rule", Text, nullable=False),
    sa.Column("role", Text, nullable=False),
    sa.Column("cause", Text, nullable=False),
    sa.Column("target_kind", Text, nullable=False),
    sa.Column("node", Text),
    sa.Column("gpu", Text),
    sa.Column("job", Text),
    sa.Column("attempt", sa.Integer),
    sa.Column("origin", JsonColumn, nullable=False),
    sa.Column("line", Text, nullable=False),
    sa.Column("first_at", TimeColumn, nullable=False),
    sa.Column("last_at", TimeColumn, nullable=False),
    sa.Column("heard_first_at", TimeColumn, nullable=False),
    sa.Column("heard_at", TimeColumn, nullable=False),
    sa.Column("labels", JsonColumn, nullable=False),
    sa.Column("fields", JsonColumn, nullable=False),
    sa.Column("ranks", Text, nullable=False),
    sa.Column("nodes", JsonColumn, nullable=False),
    sa.Column("count", sa.BigInteger, nullable=False),
    sa.Column("time_source", Text, nullable=False),
    sa.Column("clock_error", sa.Float, nullable=False),
    sa.Column("shape", Text, nullable=False),
    sa.Column("is_printed", sa.Boolean, nullable=False),
    sa.Column("ended_at", TimeColumn),
    sa.Column("ended_because", Text),
    sa.Column("is_suspected", sa.Boolean, nullable=False),
    sa.Column("confirmed_by", Text, nullable=False),
    sa.Column("fingerprint", Text),
    sa.Column("alert", JsonColumn),
    sa.Column("no_alert_because", Text, nullable=False),
    sa.Column("tell_at", TimeColumn),
)
"""`KnownFinding`s. ``job`` is the target, or the job whose log contains it. ``ranks`` are spans as text (0-7)."""

# An episode is an agent's finding under one ID. Several episodes of different nodes are one finding.
finding_episodes = sa.Table(
    "finding_episodes",
    metadata,
    sa.Column("node", Text, primary_key=True),
    sa.Column("id", Text, primary_key=True),  # the agent's, not that of `findings`
    sa.Column("finding_id", Text, sa.ForeignKey("findings.id"), nullable=False),
    sa.Column("count", sa.BigInteger, nullable=False),
    sa.Column("counted_before", sa.BigInteger, nullable=False),  # lines in `count` of an earlier, ended finding
    sa.Column("is_over", sa.Boolean, nullable=False),
    sa.Column("heard_at", TimeColumn, nullable=False),
)

finding_excerpts = sa.Table(
    "finding_excerpts",
    metadata,
    sa.Column("finding_id", Text, sa.ForeignKey("findings.id"), primary_key=True),
    sa.Column("node", Text, primary_key=True),
    sa.Column("id", Text, primary_key=True),  # of the episode
    sa.Column("source", Text, nullable=False),
    sa.Column("stream", Text, nullable=False),
    sa.Column("rank", sa.Integer),
    sa.Column("first_at", TimeColumn, nullable=False),
    sa.Column("lines", JsonColumn, nullable=False),
    sa.Column("at", sa.Integer, nullable=False),  # index of the finding's line
    sa.Column("number", sa.BigInteger, nullable=False),  # line number of `lines[0]`, 0 if unknown
)

# jobs whose records a person protects from deletion
kept_jobs = sa.Table(
    "kept_jobs",
    metadata,
    sa.Column("job", Text, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),  # 0: all attempts
    sa.Column("by", Text, nullable=False),
    sa.Column("at", TimeColumn, nullable=False),
    sa.Column("note", Text, nullable=False),
)

# nodes on which jobs ran, with the last time
job_places = sa.Table(
    "job_places",
    metadata,
    sa.Column("job", Text, primary_key=True),
    sa.Column("node", Text, primary_key=True),
    sa.Column("seen_at", TimeColumn, nullable=False),
)

# the finding to which a new line belongs; only one is open
partial_index("uq_findings_open", findings.c.key, where="ended_at IS NULL", unique=True)
# all open findings
partial_index("ix_findings_open", findings.c.heard_first_at, findings.c.id, where="ended_at IS NULL")
# the next alerts to send
partial_index("ix_findings_tell", findings.c.tell_at, where="tell_at IS NOT NULL")
# one page, for each common filter
sa.Index("ix_findings_heard_first", findings.c.heard_first_at, findings.c.id)
sa.Index("ix_findings_rule", findings.c.rule, findings.c.heard_first_at, findings.c.id)
partial_index("ix_findings_job", findings.c.job, findings.c.heard_first_at, findings.c.id, where="job IS NOT NULL")
# findings behind a run
partial_index("ix_findings_alert", findings.c.fingerprint, where="fingerprint IS NOT NULL")
# pruning
sa.Index("ix_findings_heard", findings.c.heard_at)
# whether all streams of a finding have ended, and whether one is on a node
sa.Index("ix_finding_episodes_finding", finding_episodes.c.finding_id, finding_episodes.c.node)
