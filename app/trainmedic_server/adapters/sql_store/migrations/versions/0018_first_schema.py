"""The first schema. Its number is that of the last migration that it replaces: a store migrated by those is at this
revision already.
"""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = None
branch_labels = None
depends_on = None

_SCHEMA = """
CREATE TABLE alerts (
    fingerprint TEXT NOT NULL, starts_at BIGINT NOT NULL, status TEXT NOT NULL, labels TEXT NOT NULL,
    annotations TEXT NOT NULL, ends_at BIGINT, generator_url TEXT NOT NULL, first_heard_at BIGINT NOT NULL,
    last_heard_at BIGINT NOT NULL, times_heard BIGINT NOT NULL, resolved_at BIGINT, resolved_because TEXT,
    alert_name TEXT, reactions TEXT, reacted BOOLEAN, original_name TEXT, original_labels TEXT,
    CONSTRAINT pk_alerts PRIMARY KEY (fingerprint, starts_at)
);
CREATE INDEX ix_alerts_firing ON alerts (fingerprint, starts_at) WHERE resolved_at IS NULL;
CREATE INDEX ix_alerts_last_heard ON alerts (last_heard_at);
CREATE INDEX ix_alerts_first_heard ON alerts (first_heard_at);
CREATE INDEX ix_alerts_name ON alerts (alert_name, first_heard_at);
CREATE INDEX ix_alerts_not_reacted ON alerts (first_heard_at) WHERE {not_reacted};
CREATE INDEX ix_alerts_original_name ON alerts (original_name, first_heard_at) WHERE original_name IS NOT NULL;

CREATE TABLE runs (
    id TEXT NOT NULL, playbook TEXT NOT NULL, version TEXT NOT NULL, target_kind TEXT, node TEXT, gpu TEXT,
    job TEXT, target_key TEXT NOT NULL, mode TEXT NOT NULL, status TEXT NOT NULL, decision TEXT NOT NULL,
    alert_fingerprint TEXT NOT NULL, alert_starts_at BIGINT NOT NULL, alert_name TEXT NOT NULL,
    alert_labels TEXT NOT NULL, created_at BIGINT NOT NULL, ended_at BIGINT, acted_at BIGINT, waiting_on TEXT,
    message TEXT NOT NULL, unfinished BOOLEAN NOT NULL, started_by TEXT, repeats TEXT, request_key TEXT,
    original_alert_name TEXT, original_labels TEXT,
    CONSTRAINT pk_runs PRIMARY KEY (id)
);
CREATE INDEX ix_runs_cooldown ON runs (playbook, target_key, ended_at, status) WHERE status <> 'not_started';
CREATE INDEX ix_runs_unfinished ON runs (created_at, id) WHERE {unfinished};
CREATE UNIQUE INDEX uq_runs_open ON runs (playbook, target_key)
    WHERE status IN ('running', 'waiting', 'awaiting_approval');
CREATE UNIQUE INDEX uq_runs_request ON runs (request_key) WHERE request_key IS NOT NULL;
CREATE INDEX ix_runs_created ON runs (created_at){with_id};
CREATE INDEX ix_runs_alert_name ON runs (alert_name, created_at){with_id};
CREATE INDEX ix_runs_playbook ON runs (playbook, created_at, status){with_id};
CREATE INDEX ix_runs_status ON runs (status, created_at){with_id};
CREATE INDEX ix_runs_decision ON runs (decision, created_at){with_id};
CREATE INDEX ix_runs_node ON runs (node, created_at){with_id} WHERE node IS NOT NULL;
CREATE INDEX ix_runs_gpu ON runs (gpu, created_at){with_id} WHERE gpu IS NOT NULL;
CREATE INDEX ix_runs_job ON runs (job, created_at){with_id} WHERE job IS NOT NULL;
CREATE INDEX ix_runs_original_alert_name ON runs (original_alert_name, created_at){with_id}
    WHERE original_alert_name IS NOT NULL;

CREATE TABLE run_alerts (
    seq {serial} NOT NULL, run_id TEXT NOT NULL, fingerprint TEXT NOT NULL, starts_at BIGINT NOT NULL,
    CONSTRAINT pk_run_alerts PRIMARY KEY (seq),
    CONSTRAINT uq_run_alerts_run_id_fingerprint_starts_at UNIQUE (run_id, fingerprint, starts_at),
    CONSTRAINT fk_run_alerts_fingerprint_starts_at_alerts FOREIGN KEY(fingerprint, starts_at)
        REFERENCES alerts (fingerprint, starts_at),
    CONSTRAINT fk_run_alerts_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE INDEX ix_run_alerts_alert ON run_alerts (fingerprint, starts_at);

CREATE TABLE steps (
    run_id TEXT NOT NULL, phase TEXT NOT NULL, position INTEGER NOT NULL, id TEXT NOT NULL, kind TEXT NOT NULL,
    action TEXT, status TEXT NOT NULL, params TEXT NOT NULL, attempts TEXT NOT NULL, output TEXT NOT NULL,
    error TEXT, message TEXT, started_at BIGINT, ended_at BIGINT, deadline BIGINT, retry_at BIGINT, command_id TEXT,
    undo_trigger TEXT, undo_action TEXT, undo_params TEXT, undo_of TEXT, undo_status TEXT, undo_because TEXT,
    undo_attempts TEXT, undo_output TEXT, undo_error TEXT, undo_retry_at BIGINT, undo_command_id TEXT,
    CONSTRAINT pk_steps PRIMARY KEY (run_id, phase, position),
    CONSTRAINT fk_steps_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id)
){keyed};
CREATE INDEX ix_steps_command ON steps (command_id) WHERE command_id IS NOT NULL AND status <> 'succeeded';
CREATE INDEX ix_steps_undo_command ON steps (undo_command_id)
    WHERE undo_command_id IS NOT NULL AND undo_status <> 'done';

CREATE TABLE touched_nodes (
    run_id TEXT NOT NULL, node TEXT NOT NULL, at BIGINT NOT NULL,
    CONSTRAINT pk_touched_nodes PRIMARY KEY (run_id, node),
    CONSTRAINT fk_touched_nodes_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id)
){keyed};
CREATE INDEX ix_touched_nodes_at ON touched_nodes (at, node);
CREATE INDEX ix_touched_nodes_node ON touched_nodes (node, run_id) WHERE node <> '';

CREATE TABLE orders (
    seq {serial} NOT NULL, id TEXT NOT NULL, run_id TEXT NOT NULL, kind TEXT NOT NULL, actor TEXT NOT NULL,
    at BIGINT NOT NULL, note TEXT NOT NULL, step TEXT, asked INTEGER,
    CONSTRAINT pk_orders PRIMARY KEY (seq),
    CONSTRAINT uq_orders_id UNIQUE (id),
    CONSTRAINT fk_orders_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE INDEX ix_orders_run ON orders (run_id);
CREATE INDEX ix_orders_actor ON orders (actor, run_id);
CREATE INDEX ix_orders_undo ON orders (run_id) WHERE kind = 'undo';

CREATE TABLE events (
    seq {never_reused}, run_id TEXT, kind TEXT NOT NULL, at BIGINT NOT NULL, actor TEXT NOT NULL, data TEXT NOT NULL
);
CREATE INDEX ix_events_of_no_run ON events (at) WHERE run_id IS NULL;
CREATE INDEX ix_events_people ON events (seq) WHERE actor <> 'trainmedic';
CREATE INDEX ix_events_run ON events (run_id);

CREATE TABLE controls (
    id INTEGER NOT NULL, paused BOOLEAN NOT NULL, paused_by TEXT, paused_at BIGINT, breaker_open BOOLEAN NOT NULL,
    breaker_opened_at BIGINT, breaker_reason TEXT, alive_at BIGINT, pauses TEXT, breaker_closed_at BIGINT,
    CONSTRAINT pk_controls PRIMARY KEY (id)
);

CREATE TABLE time_gaps (
    seq {serial} NOT NULL, ended_at BIGINT NOT NULL, microseconds BIGINT NOT NULL, is_downtime BOOLEAN NOT NULL,
    CONSTRAINT pk_time_gaps PRIMARY KEY (seq)
);

CREATE TABLE effects (
    run_id TEXT NOT NULL, playbook TEXT NOT NULL, acted_at BIGINT NOT NULL, due_at BIGINT, verdict TEXT NOT NULL,
    plain TEXT NOT NULL,
    CONSTRAINT pk_effects PRIMARY KEY (run_id),
    CONSTRAINT fk_effects_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE INDEX ix_effects_due ON effects (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX ix_effects_acted ON effects (acted_at, playbook, verdict);

CREATE TABLE event_positions (
    listener TEXT NOT NULL, position BIGINT NOT NULL,
    CONSTRAINT pk_event_positions PRIMARY KEY (listener)
);

CREATE TABLE messages (
    id TEXT NOT NULL, channel TEXT NOT NULL, kind TEXT NOT NULL, severity TEXT NOT NULL, topic TEXT NOT NULL,
    title TEXT NOT NULL, text TEXT NOT NULL, at BIGINT NOT NULL, due_at BIGINT NOT NULL, run_id TEXT,
    link TEXT NOT NULL, sent_at BIGINT, newer_kind TEXT,
    CONSTRAINT pk_messages PRIMARY KEY (id)
);
CREATE INDEX ix_messages_waiting ON messages (channel, at) WHERE sent_at IS NULL;
CREATE INDEX ix_messages_run ON messages (run_id) WHERE run_id IS NOT NULL;
CREATE INDEX ix_messages_sent ON messages (sent_at) WHERE sent_at IS NOT NULL;

CREATE TABLE shown_questions (
    run_id TEXT NOT NULL, step TEXT NOT NULL, channel TEXT NOT NULL, message TEXT NOT NULL, shown TEXT NOT NULL,
    CONSTRAINT pk_shown_questions PRIMARY KEY (run_id, step),
    CONSTRAINT fk_shown_questions_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id)
);

CREATE TABLE sessions (
    id TEXT NOT NULL, digest TEXT NOT NULL, name TEXT NOT NULL, token TEXT NOT NULL, created_at BIGINT NOT NULL,
    ends_at BIGINT NOT NULL, address TEXT NOT NULL, browser TEXT NOT NULL,
    CONSTRAINT pk_sessions PRIMARY KEY (id)
);

CREATE TABLE job_lives (
    name TEXT NOT NULL, state TEXT NOT NULL, since BIGINT NOT NULL, instance TEXT NOT NULL, reason TEXT NOT NULL,
    failures INTEGER NOT NULL, restarts INTEGER NOT NULL, numbers TEXT NOT NULL,
    CONSTRAINT pk_job_lives PRIMARY KEY (name)
);

CREATE TABLE agent_lives (
    name TEXT NOT NULL, seen_at BIGINT NOT NULL, lost_at BIGINT,
    CONSTRAINT pk_agent_lives PRIMARY KEY (name)
);

CREATE TABLE nodes (
    name TEXT NOT NULL, seen_at BIGINT NOT NULL,
    CONSTRAINT pk_nodes PRIMARY KEY (name)
);

CREATE TABLE playbook_versions (
    name TEXT NOT NULL, version TEXT NOT NULL, text TEXT NOT NULL, kept_at BIGINT NOT NULL,
    CONSTRAINT pk_playbook_versions PRIMARY KEY (name, version)
);

CREATE TABLE playbook_days (
    day BIGINT NOT NULL, playbook TEXT NOT NULL, fact TEXT NOT NULL, count BIGINT NOT NULL,
    CONSTRAINT pk_playbook_days PRIMARY KEY (day, playbook, fact)
){keyed};

CREATE TABLE identity (
    id TEXT NOT NULL, readable_from TEXT, counted_from BIGINT,
    CONSTRAINT pk_identity PRIMARY KEY (id)
);

CREATE TABLE findings (
    id TEXT NOT NULL, "key" TEXT NOT NULL, rule TEXT NOT NULL, role TEXT NOT NULL, cause TEXT NOT NULL,
    target_kind TEXT NOT NULL, node TEXT, gpu TEXT, job TEXT, attempt INTEGER, origin TEXT NOT NULL,
    line TEXT NOT NULL, first_at BIGINT NOT NULL, last_at BIGINT NOT NULL, heard_first_at BIGINT NOT NULL,
    heard_at BIGINT NOT NULL, labels TEXT NOT NULL, fields TEXT NOT NULL, ranks TEXT NOT NULL, nodes TEXT NOT NULL,
    count BIGINT NOT NULL, time_source TEXT NOT NULL, clock_error FLOAT NOT NULL, shape TEXT NOT NULL,
    is_printed BOOLEAN NOT NULL, ended_at BIGINT, ended_because TEXT, is_suspected BOOLEAN NOT NULL,
    confirmed_by TEXT NOT NULL, fingerprint TEXT, alert TEXT, no_alert_because TEXT NOT NULL, tell_at BIGINT,
    CONSTRAINT pk_findings PRIMARY KEY (id)
);
CREATE UNIQUE INDEX uq_findings_open ON findings ("key") WHERE ended_at IS NULL;
CREATE INDEX ix_findings_open ON findings (heard_first_at, id) WHERE ended_at IS NULL;
CREATE INDEX ix_findings_tell ON findings (tell_at) WHERE tell_at IS NOT NULL;
CREATE INDEX ix_findings_job ON findings (job, heard_first_at, id) WHERE job IS NOT NULL;
CREATE INDEX ix_findings_alert ON findings (fingerprint) WHERE fingerprint IS NOT NULL;
CREATE INDEX ix_findings_heard_first ON findings (heard_first_at, id);
CREATE INDEX ix_findings_rule ON findings (rule, heard_first_at, id);
CREATE INDEX ix_findings_heard ON findings (heard_at);

CREATE TABLE finding_episodes (
    node TEXT NOT NULL, id TEXT NOT NULL, finding_id TEXT NOT NULL, count BIGINT NOT NULL,
    counted_before BIGINT NOT NULL, is_over BOOLEAN NOT NULL, heard_at BIGINT NOT NULL,
    CONSTRAINT pk_finding_episodes PRIMARY KEY (node, id),
    CONSTRAINT fk_finding_episodes_finding_id_findings FOREIGN KEY(finding_id) REFERENCES findings (id)
);
CREATE INDEX ix_finding_episodes_finding ON finding_episodes (finding_id, node);

CREATE TABLE finding_excerpts (
    finding_id TEXT NOT NULL, node TEXT NOT NULL, id TEXT NOT NULL, source TEXT NOT NULL, stream TEXT NOT NULL,
    rank INTEGER, first_at BIGINT NOT NULL, lines TEXT NOT NULL, at INTEGER NOT NULL, number BIGINT NOT NULL,
    CONSTRAINT pk_finding_excerpts PRIMARY KEY (finding_id, node, id),
    CONSTRAINT fk_finding_excerpts_finding_id_findings FOREIGN KEY(finding_id) REFERENCES findings (id)
);

CREATE TABLE kept_jobs (
    job TEXT NOT NULL, attempt INTEGER NOT NULL, "by" TEXT NOT NULL, at BIGINT NOT NULL, note TEXT NOT NULL,
    CONSTRAINT pk_kept_jobs PRIMARY KEY (job, attempt)
);

CREATE TABLE job_places (
    job TEXT NOT NULL, node TEXT NOT NULL, seen_at BIGINT NOT NULL,
    CONSTRAINT pk_job_places PRIMARY KEY (job, node)
);

CREATE TABLE verdicts (
    id TEXT NOT NULL, job TEXT NOT NULL, attempt INTEGER, began_at BIGINT NOT NULL, made_at BIGINT NOT NULL,
    cause TEXT NOT NULL, confidence TEXT NOT NULL, node TEXT, fingerprint TEXT NOT NULL, plain TEXT NOT NULL,
    labels TEXT, tell_at BIGINT,
    CONSTRAINT pk_verdicts PRIMARY KEY (id)
);
CREATE INDEX ix_verdicts_job ON verdicts (job, began_at);
CREATE INDEX ix_verdicts_began ON verdicts (began_at);
CREATE INDEX ix_verdicts_node ON verdicts (node, began_at) WHERE node IS NOT NULL;
CREATE INDEX ix_verdicts_tell ON verdicts (tell_at) WHERE tell_at IS NOT NULL;
"""
_WORDS = {
    "sqlite": {
        "serial": "INTEGER",
        "never_reused": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT",
        "keyed": " WITHOUT ROWID",
        "with_id": "",
        "unfinished": "unfinished = 1",
        "not_reacted": "reacted = 0",
    },
    "postgresql": {
        "serial": "BIGSERIAL",
        "never_reused": "BIGSERIAL NOT NULL CONSTRAINT pk_events PRIMARY KEY",
        "keyed": "",
        "with_id": " INCLUDE (id)",
        "unfinished": "unfinished",
        "not_reacted": "NOT reacted",
    },
}


def upgrade() -> None:
    connection = op.get_bind()
    database = connection.dialect.name
    schema = _SCHEMA.format(**_WORDS[database])
    if database == "postgresql":
        schema = schema.replace(" TEXT", ' TEXT COLLATE "C"')
    for statement in schema.strip().removesuffix(";").split(";\n"):
        connection.exec_driver_sql(statement)
