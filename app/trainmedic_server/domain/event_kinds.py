"""The kinds of events that the history can have, for whoever chooses among them; ``docs/reference/events.md`` says what
each means, and a test that the three agree."""

from __future__ import annotations

from trainmedic_server.domain.run import Decision

_OF_ALERTS = (
    "alert_repeated", "alert_resolved", "alert_rejected", "match_failed",
    *map(str, set(Decision) - {Decision.DUPLICATE}),
)  # fmt: skip
_OF_STEPS = (
    "step_started", "step_located", "step_resumed", "step_succeeded", "step_failed", "step_skipped", "step_unknown",
    "step_stopped", "attempt_waits", "attempt_called_off", "attempt_failed", "late_reply", "wait_started",
    "wait_ended", "lease_lost",
    "set_again_started", "set_again_done", "set_again_held",
    "undo_started", "undo_resumed", "undo_delayed", "undo_done", "undo_closed",
)  # fmt: skip
_OF_RUNS = (
    "retried", "started_later", "waiting_for_target", "waiting_for_resume", "closed",
    "approval_requested", "approval_reminded", "approval_escalated", "approval_ended",
    "approved", "rejected", "cancel_ordered", "undo_ordered", "undo_close_ordered",
)  # fmt: skip
_OF_JOBS_AND_AGENTS = (
    "job_ended", "job_failed", "job_restarted", "job_gone", "job_returned", "job_forgotten", "job_kept",
    "job_released", "job_evaluated", "agent_lost", "agent_returned",
)  # fmt: skip
_OF_THE_SERVER = (
    "server_started", "pause_ordered", "resumed", "pause_began", "pause_ended", "mode_changed",
    "breaker_opened", "breaker_closed", "channel_tested", "signed_in", "signed_out", "clock_stepped",
)  # fmt: skip

EVENT_KINDS = frozenset({*_OF_ALERTS, *_OF_STEPS, *_OF_RUNS, *_OF_JOBS_AND_AGENTS, *_OF_THE_SERVER})
