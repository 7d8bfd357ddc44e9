"""Texts of messages on events, and their combination.

They state only recorded facts, claim no success, and name what is unknown.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import starmap

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core import duration
from trainmedic_core.plain_text import json_text
from trainmedic_core.target_labels import HOST_LABELS, JOB_LABELS, NODE_LABELS
from trainmedic_core.words import count, cut
from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain import links
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.alert_labels import Label
from trainmedic_server.domain.component import Component, component_of_run
from trainmedic_server.domain.event_codec import content_of, names
from trainmedic_server.domain.message import Message, MessageKind, Severity, minute
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.node_evidence import LIST_LABELS, UNKNOWN, host_of
from trainmedic_server.domain.node_names import spelled
from trainmedic_server.domain.playbook import ON_LIMITED
from trainmedic_server.domain.run import PASSING, Decision, Event, Run, Status, StepState, StepStatus
from trainmedic_server.ports.store import LinkedRun
from trainmedic_server.presentation import questions, runs

SOON = timedelta(seconds=10)  # Usual delay of a message, to combine several and to drop outdated ones
OVERDUE = timedelta(minutes=2)  # Delay of a message about a failing undo
LATE = timedelta(minutes=15)  # Delay from which a message states its event's time. Retries and grouping take less.
_MOST_LINES = 20  # of a text
_MOST_CHARACTERS = 4_000
_LONGEST_REASON = 200  # characters of a reason in a title
_FLAPS_WITHIN = timedelta(hours=4)  # Period with one message on refusals for a target

# Topics of messages on no playbook.
PLAYBOOKS = "playbooks"
SERVER = "server"
TARGETS = "targets"


class Draft(Struct, frozen=True):
    """A message before channels are chosen."""

    kind: MessageKind
    topic: str  # playbook, or a constant above; messages of one kind and topic are combined
    title: str
    text: str = ""
    run_id: str | None = None
    hold: timedelta = SOON  # delay
    once: str = ""  # key of messages sent only once
    to: str | None = None  # channel that a question names; None for those of rules and routes
    component: Component = Component.TRAINMEDIC


SentKinds = Mapping[str, set[MessageKind]]
"""Kinds of messages sent so far, by run ID; a waiting failure message counts too."""


def draft_of(event: Event, run: Run | None, kinds_sent: SentKinds, summary: str = "") -> Draft | None:
    """Return the message on an event, if any. `run` is its run's current state, `summary` its alert's."""
    if event.run_id is None:
        return _server_draft(event)
    if run is None or (run.parent is not None and event.kind not in _MEMBER_KINDS):
        return None
    draft = _run_draft(event, run, kinds_sent.get(run.id, set()), summary)
    return replace(draft, component=component_of_run(run)) if draft is not None else None


def _run_draft(event: Event, run: Run, kinds_sent: set[MessageKind], summary: str) -> Draft | None:
    match content := content_of(event):
        case kinds.QuestionEvent():
            return _asked(content, run)
        case kinds.RunApproved() | kinds.RunRejected():
            return _answered(run, kinds_sent, questions.answer_text(event.kind, event.actor, content.note))
        case kinds.ApprovalEnded():
            return _answered(run, kinds_sent, questions.UNANSWERED[content.outcome])
        case kinds.Closed():
            return _closed(run, summary)
        case kinds.RateLimited() if any(step.phase == ON_LIMITED for step in run.steps):
            return None  # they may notify people: its end decides
        case kinds.RateLimited() | kinds.ConcurrencyLimited() | kinds.CapacityLimited() | kinds.Stale():
            return _not_started(run, Decision(event.kind), content.why or run.message)
        case kinds.TargetUnknown() | kinds.TargetAmbiguous():
            return _untargeted(event.kind, content.why or run.message, run)
        case kinds.StartedLater():
            return _started_later(content, run, kinds_sent)
        case kinds.AlertResolved():
            return _resolved(content, run, kinds_sent)
        case kinds.UndoDelayed():
            return _delayed(content, run, kinds_sent)
        case kinds.LeaseLost():
            return _lost(content, run)
        case kinds.SetAgainDone():
            return _follow_up(run, "reapplied") if MessageKind.EFFECT_LOST in kinds_sent else None
        case kinds.UndoDone():
            return _undone("its changes are reverted", run, kinds_sent)
        case kinds.UndoClosed():
            return _undone(f"{event.actor} dropped the pending undo", run, kinds_sent)
        case _:
            return None


def _server_draft(event: Event) -> Draft | None:
    match content := content_of(event):
        case kinds.BreakerOpened():
            return _opened(content)
        case kinds.BreakerClosed():
            text = "Its count restarts: only later acts count."
            return Draft(MessageKind.BREAKER, SERVER, f"The breaker was closed by {event.actor}", text)
        case kinds.ModeChanged():
            return _observing(event, content)
        case kinds.OfPause():
            return _paused(event, content)
        case kinds.ServerStarted():
            return _started(content)
        case _:
            return None


# The parent reports all other events of its members, once.
_MEMBER_KINDS = names(kinds.UndoDelayed, kinds.UndoDone, kinds.UndoClosed, kinds.LeaseLost, kinds.SetAgainDone)

KINDS = names(  # events that may give a message
    *(kinds.QuestionEvent, kinds.RunApproved, kinds.RunRejected, kinds.ApprovalEnded, kinds.Closed, kinds.StartedLater),
    *(kinds.RateLimited, kinds.ConcurrencyLimited, kinds.CapacityLimited, kinds.Stale),
    *(kinds.TargetUnknown, kinds.TargetAmbiguous, kinds.LeaseLost, kinds.SetAgainDone),
    *(kinds.AlertResolved, kinds.UndoDelayed, kinds.UndoDone, kinds.UndoClosed),
    *(kinds.BreakerOpened, kinds.BreakerClosed, kinds.OfPause, kinds.ServerStarted),
)


def is_outdated(
    message: Message, run: Run | None, alerts: Sequence[AlertRecord] = (), linked: Sequence[LinkedRun] = ()
) -> bool:
    """Return whether the message is outdated. `alerts` are its run's, `linked` all runs of the first alert."""
    if message.run_id is None:
        return False
    match message.kind:
        case MessageKind.NOT_STARTED:
            has_started = any(other.playbook == message.topic and other.decision in _HANDLED for other in linked)
            return run is None or has_started or all(record.is_resolved for record in alerts)
        case MessageKind.APPROVAL:
            return run is None or run.status is not Status.AWAITING_APPROVAL
        case MessageKind.UNDO_OVERDUE:
            return run is None or run.delayed_undo is None
        case _:
            return False


_HANDLED = frozenset({Decision.STARTED, Decision.JOINED})  # a run handles the alert after all


def combined(messages: Sequence[Message], now: datetime) -> tuple[str, str, Severity]:
    """Return title, text and severity for messages of one kind and topic."""
    severity = max((message.severity for message in messages), key=lambda each: each.rank)
    first = min(messages, key=lambda message: message.at)
    late = _lateness(first, now)
    if len(messages) == 1:
        return f"[{severity}] {first.title}{late}", _with_handle(first), severity
    lines = [
        f"- {message.title}{_lateness(message, now)}{_handle(message, ' · ')}" for message in messages[:_MOST_LINES]
    ]
    if len(messages) > _MOST_LINES:
        lines.append(f"and {len(messages) - _MOST_LINES} more")
    title = f"[{severity}] {_heading(first.kind, first.topic, len(messages))}{late}"
    return title, cut("\n".join(lines), _MOST_CHARACTERS), severity


def _lateness(message: Message, now: datetime) -> str:
    whole = timedelta(minutes=1)
    age = (now - message.at) // whole * whole
    return f" (late: {duration.write(age)} ago, {minute(message.at)})" if age >= LATE else ""


def of_broken_playbooks(problems: Sequence[str]) -> Draft:
    files = sorted({problem.partition(":")[0] for problem in problems})
    text = "\n".join([*problems[:_MOST_LINES], "The previous versions stay active."])
    title = f"{count(len(files), 'playbook file')} cannot be loaded: {', '.join(files[:3])}"
    return Draft(MessageKind.PLAYBOOK_BROKEN, PLAYBOOKS, title, cut(text, _MOST_CHARACTERS), hold=timedelta(0))


# --- of a run -----------------------------------------------------------------------------------------


def _asked(content: kinds.QuestionEvent, run: Run) -> Draft:
    question = content.message or questions.UNASKED
    asking = next((step for step in run.steps if step.id == content.step and step.kind == "approve"), None)
    lines = [
        f"{questions.opening(run)} {question}",
        *(questions.steps_if_approved(run, asking) if asking is not None else ()),
        f"Needs approval by {questions.who_may_answer(content.by, content.count)}.",
        f"It waits until {minute(content.deadline)}." if content.deadline else "It waits until it is answered.",
        f"trainmedic runs approve {run.id}",
        f"trainmedic runs reject {run.id}",
    ]
    again = f"{questions.AGAIN[type(content)]}: " if type(content) in questions.AGAIN else ""
    title = f"{again}{run.target_key}: {question}"
    return Draft(MessageKind.APPROVAL, run.playbook, title, "\n".join(lines), run.id, to=content.to)


def _closed(run: Run, summary: str) -> Draft | None:
    if run.status is Status.NOT_STARTED and run.is_limited and has_notified_people(run, ON_LIMITED):
        return None
    if run.status is Status.NOT_STARTED:
        return _not_started(run, run.decision, run.message)
    if run.status is Status.FAILED and not has_notified_people(run):
        title = f"{runs.title_of(run)} failed"
        return Draft(MessageKind.RUN_FAILED, run.playbook, title, _story(run, summary), run.id)
    if run.status is Status.SUCCEEDED and run.acted_at is not None:
        title = f"{runs.title_of(run)}: {run.message}"
        return Draft(MessageKind.REPAIRED, run.playbook, title, _story(run, summary), run.id)
    return None


def has_notified_people(run: Run, phase: str = "on_failure") -> bool:
    return any(
        step.phase == phase and step.action == "notify" and step.status is StepStatus.SUCCEEDED for step in run.steps
    )


def channels_notified_by(run: Run) -> set[str]:
    outputs = (
        str(step.output.get("to", ""))
        for step in run.steps
        if step.action == "notify" and step.status is StepStatus.SUCCEEDED
    )
    return {name for output in outputs for name in output.split(", ") if name}


def _story(run: Run, summary: str) -> str:
    lines = [f"Alert {run.alert_name}. {run.message}", *([summary] if summary else [])]
    lines += [
        f"- {step.id}: {step.status}{_reason(step)}"
        for step in run.steps
        if (step.status is not StepStatus.SKIPPED or step.attempts) and step.phase not in ("on_success", "on_failure")
    ]
    owed = [step.undo.action for step in run.steps if step.undo and step.undo.status.is_owed]
    if owed:
        lines.append(f"Still to revert, by {', '.join(owed)}.")
    return "\n".join(lines)


def _reason(step: StepState) -> str:
    why = step.error or (step.message if step.status is StepStatus.SKIPPED else None)
    return f", {why}" if why else ""


def _answered(run: Run, kinds_sent: set[MessageKind], how: str) -> Draft | None:
    return _follow_up(run, how) if MessageKind.APPROVAL in kinds_sent else None


def _resolved(content: kinds.AlertResolved, run: Run, kinds_sent: set[MessageKind]) -> Draft | None:
    is_about_failure = run.status is Status.FAILED and (
        MessageKind.RUN_FAILED in kinds_sent or has_notified_people(run)
    )
    if not is_about_failure and MessageKind.NOT_STARTED not in kinds_sent:
        return None
    return _follow_up(run, f"{content.alert} has resolved")


def _not_started(run: Run, decision: Decision, why: str) -> Draft | None:
    """Return None if people know (manual starts, pauses, breaker) or need not (cooldowns, mode observe)."""
    remedy = _REMEDIES.get(decision)
    if remedy is None or run.mode is Mode.OBSERVE or run.started_by is not None:
        return None
    lines = [
        f"Nothing is done about {run.alert_name}: {why}.",
        *([_IF_REPEATED] if decision in PASSING and decision is not Decision.OUTSIDE_WINDOW else []),
        remedy.format(playbook=run.playbook, target=shlex.quote(run.target_key)),
    ]
    # Derive the key from the period, because flapping alerts start often. Several guards may block a target; one
    # message suffices.
    beginning = int(run.alert.starts_at.timestamp() // _FLAPS_WITHIN.total_seconds())
    once = _digest("not started", run.playbook, run.target_key, str(beginning))
    title = f"{runs.title_of(run)} did not start: {cut(why, _LONGEST_REASON)}"
    return Draft(MessageKind.NOT_STARTED, run.playbook, title, "\n".join(lines), run.id, once=once)


_IF_REPEATED = "It starts if the guard allows it when the alert is next reported, unless the alert is too old by then."
_START = "To start it anyway: trainmedic runs start {playbook} --target {target}"
_REMEDIES: Mapping[Decision, str] = {  # for the refusals that people need to know
    Decision.CONCURRENCY_LIMITED: "See which runs are open: trainmedic history --open --playbook {playbook}. To let "
    "more run at once, raise max_concurrent in the guards of the playbook.",
    Decision.CAPACITY_LIMITED: "Return nodes to service, or lower min_available in the guards of the playbook.",
    Decision.RATE_LIMITED: "See what ran: trainmedic history --playbook {playbook}. To let more run in that time, "
    "raise max_runs in the guards of the playbook.",
    Decision.TARGET_BUSY: _START,
    Decision.OUTSIDE_WINDOW: "It starts if the alert is reported in a window. To let it act at other times, change "
    "only_during in the playbook.",
    Decision.STALE: f"{_START}. To act on older alerts, raise --max-age.",
}


def _untargeted(kind: str, why: str, run: Run) -> Draft | None:
    if run.started_by is not None:
        return None
    subjects = {name: value for name, value in run.alert_labels.items() if _names_subject(name)}
    listed = ", ".join(f"{name}={json_text(value)}" for name, value in sorted(subjects.items())) or "none"
    lines = [
        f"{run.playbook} does nothing about {run.alert_name}, because it could act on the wrong thing: {why}.",
        f"Labels that name something: {listed}.",
        "If the node exists, start its agent or name it in the file of --inventory. Otherwise have the alert's "
        "rule set a label that names the node, the GPU or the job. How the labels were read: "
        f"trainmedic why --alert {shlex.quote(run.alert_name)}",
        "You are not notified of this one again for a week.",  # `message_delivery.KEPT`
    ]
    unknown_hosts = _hosts(label for label in _labels_in(why, subjects) if f"{label} {UNKNOWN}" in why)
    hosts = unknown_hosts or _hosts(_labels_in(why, subjects)) or _hosts(starmap(Label, subjects.items()))
    # An unknown host gets one message, whichever alerts and playbooks name it.
    once = _digest("stranger" if unknown_hosts else kind, *(hosts or (run.playbook, run.alert_name)))
    title = f"{run.playbook} does nothing about {run.alert_name}: {cut(why, _LONGEST_REASON)}"
    return Draft(MessageKind.TARGET_UNKNOWN, TARGETS, title, "\n".join(lines), run.id, once=once)


def _labels_in(why: str, labels: Mapping[str, str]) -> Iterator[Label]:  # in the forms that reasons write them
    for name, value in labels.items():
        label = Label(name, value.strip())
        shown = f"={label.value[:100]!r}"
        if str(label) in why or f"{name}{shown}" in why or f"{name.lower()}{shown}" in why:
            yield label


def _hosts(labels: Iterable[Label]) -> tuple[str, ...]:
    return tuple(sorted({spelled(host_of(label.value)) for label in labels}))


_SUBJECTS = frozenset({*NODE_LABELS, *HOST_LABELS, *JOB_LABELS, *LIST_LABELS, "instance"})


def _names_subject(label: str) -> bool:
    return label.lower().removeprefix("exported_") in _SUBJECTS  # Prometheus's prefix for a conflicting label


def _started_later(content: kinds.StartedLater, run: Run, kinds_sent: set[MessageKind]) -> Draft | None:
    if MessageKind.NOT_STARTED not in kinds_sent:
        return None
    return _follow_up(run, f"started later, as run {links.short_id(content.run_id)}")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _delayed(content: kinds.UndoDelayed, run: Run, kinds_sent: set[MessageKind]) -> Draft | None:
    if MessageKind.UNDO_OVERDUE in kinds_sent:
        return None
    title = f"{runs.title_of(run)}: its changes cannot be reverted"
    text = (
        f"{content.action} of step {content.step}: {content.error}\n"
        "It is retried until it succeeds or a person drops the undo: "
        f"trainmedic runs close-undo {run.id} --note TEXT"
    )
    return Draft(MessageKind.UNDO_OVERDUE, run.playbook, title, text, run.id, OVERDUE, f"{run.id}/overdue")


def _lost(content: kinds.LeaseLost, run: Run) -> Draft:
    title = f"{runs.title_of(run)}: its change on {content.place} has ended, and is still needed"
    text = (
        f"Step {content.step}: {content.why or 'the lease has expired'}\n"
        "It is reapplied only if an outage seems to have ended it."
    )
    return Draft(MessageKind.EFFECT_LOST, run.playbook, title, text, run.id)


def _undone(how: str, run: Run, kinds_sent: set[MessageKind]) -> Draft | None:
    if run.owes_undo:
        return None
    if kinds_sent & {MessageKind.RUN_FAILED, MessageKind.UNDO_OVERDUE} or has_notified_people(run):
        return replace(_follow_up(run, how), once=f"{run.id}/undone")
    title = f"{runs.title_of(run)}: {how}"
    return Draft(MessageKind.GIVEN_BACK, run.playbook, title, "", run.id, once=f"{run.id}/undone")


def _follow_up(run: Run, what: str) -> Draft:
    return Draft(MessageKind.FOLLOW_UP, run.playbook, f"Re: {runs.title_of(run)}: {what}", "", run.id)


# --- of the server ------------------------------------------------------------------------------------


def _opened(content: kinds.BreakerOpened) -> Draft:
    text = (
        f"{content.why}\nNo run starts or makes further changes until a person closes it; undos "
        "continue. Check what the nodes have in common, then run: trainmedic resume --breaker"
    )
    return Draft(MessageKind.BREAKER, SERVER, "The breaker opened", text)


def _paused(event: Event, pause: kinds.OfPause) -> Draft:
    match pause:
        case kinds.PauseOrdered():
            happened = f"Paused by {event.actor}"
        case kinds.Resumed():
            happened = f"Resumed by {event.actor}"
        case kinds.PauseBegan():
            happened = "A pause began"
        case _:
            happened = "A pause ended"
    return Draft(MessageKind.PAUSE, SERVER, f"{happened}{_circumstances(event, pause)}")


def _observing(event: Event, change: kinds.ModeChanged) -> Draft:
    happened = "Acts as written again" if change.mode == kinds.AS_WRITTEN else "Restricted to observing"
    return Draft(MessageKind.PAUSE, SERVER, f"{happened} by {event.actor}{_circumstances(event, change)}")


def _circumstances(event: Event, pause: kinds.OfPause) -> str:
    parts = [pause.scope] if pause.scope else []
    if not isinstance(pause, (kinds.Resumed, kinds.PauseEnded)):
        if pause.starts_at and pause.starts_at > event.at:
            parts.append(f"from {minute(pause.starts_at)}")
        parts += [f"until {minute(pause.until)}"] if pause.until else []
        parts += [f"every {pause.every}"] if pause.every else []
    details = f" ({', '.join(parts)})" if parts else ""
    return f"{details}: {pause.note}" if pause.note else details


def _started(content: kinds.ServerStarted) -> Draft | None:
    name = content.took_over_as
    return Draft(MessageKind.TAKEOVER, SERVER, f"{name} is the leader now") if name else None


# --- several as one -----------------------------------------------------------------------------------


def _heading(kind: MessageKind, topic: str, count: int) -> str:
    of_several = {
        MessageKind.APPROVAL: f"{topic}: {count} runs await approval",
        MessageKind.RUN_FAILED: f"{topic}: {count} runs failed",
        MessageKind.NOT_STARTED: f"{topic}: {count} runs did not start",
        MessageKind.TARGET_UNKNOWN: f"{topic}: {count} alerts name no known target",
        MessageKind.UNDO_OVERDUE: f"{topic}: what {count} runs did cannot be reverted",
        MessageKind.EFFECT_LOST: f"{topic}: {count} changes have ended, and are still needed",
        MessageKind.REPAIRED: f"{topic}: {count} runs succeeded",
        MessageKind.GIVEN_BACK: f"{topic}: what {count} runs did is reverted",
    }
    return of_several.get(kind, f"{topic}: {count} messages")


def _with_handle(message: Message) -> str:
    handle = _handle(message, "")
    text = cut(message.text, _MOST_CHARACTERS - len(handle) - 1)
    return "\n".join(filter(None, (text, handle)))


def _handle(message: Message, before: str) -> str:
    parts = [f"run {links.short_id(message.run_id)}"] if message.run_id else []
    parts += [message.link] if message.link else []
    return before + " · ".join(parts) if parts else ""
