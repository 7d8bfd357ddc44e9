"""Blocks of a question's message, within Slack's limits. Pure.

Text from alerts, jobs and playbooks is plain, without mentions, links or markup.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from trainmedic_core.plain_text import visible
from trainmedic_server.domain import approval
from trainmedic_server.domain.approval import AskedQuestion, Terms, Unanswered
from trainmedic_server.domain.event_kinds import QuestionEvent
from trainmedic_server.domain.links import run_link, short_id
from trainmedic_server.domain.run import OperatorOrder, OrderKind, Run, StepState, StepStatus
from trainmedic_server.presentation import questions
from trainmedic_server.presentation.runs import title_of

APPROVE, REJECT, REASON = "approve", "reject", "reason"
METADATA = "trainmedic_question"  # Type of the metadata by which a posted question is found again.
# Characters.
LONGEST_REASON = 1_000
_LONGEST_NAME = 200
_TEXT, _SHORT, _CONFIRM = 2_900, 300, 290  # Slack's limits are 3,000 for a text, and 300 for a confirmation.

Block = dict[str, Any]


class RunQuestion(NamedTuple):
    run_id: str
    question: AskedQuestion


class MessageId(NamedTuple):
    channel: str
    ts: str


class Answered(Struct, frozen=True):
    approved_by: tuple[str, ...]
    how: str  # Empty while the question is open.


def answered(run: Run, step: StepState, orders: Sequence[OperatorOrder]) -> Answered:
    answers = approval.answers(step, orders)
    names = tuple(dict.fromkeys(order.actor for order in answers if order.kind is OrderKind.APPROVE))
    rejection = next((order for order in answers if order.kind is OrderKind.REJECT), None)
    if rejection is not None:
        return Answered(names, _capital(questions.answer_text("rejected", rejection.actor, rejection.note)))
    if names and len(names) >= Terms.of(step).count:
        return Answered(names, _capital(questions.answer_text("approved", " and ".join(names), "")))
    if step.status is StepStatus.WAITING:
        return Answered(names, "")
    if step.status is StepStatus.SUCCEEDED:
        return Answered(names, _capital(questions.UNANSWERED[Unanswered.APPROVED_BY_TIMEOUT]))
    return Answered(names, f"Not asked any more: {step.error or run.message or step.status}")


def is_open(run: Run, step: StepState, orders: Sequence[OperatorOrder]) -> bool:
    return run.is_open and step.status is StepStatus.WAITING and not answered(run, step, orders).how


def message(run: Run, step: StepState, orders: Sequence[OperatorOrder], external_url: str) -> dict[str, Any]:
    link = run_link(external_url, run.id)
    ahead = questions.steps_if_approved(run, step)
    blocks = [_section(f"{visible(questions.opening(run))}\n{_quoted(step.message or questions.UNASKED)}")]
    blocks += [_section("\n".join(map(visible, ahead)))] if ahead else []
    if is_open(run, step, orders):
        blocks += [_terms(run, step, orders), _buttons(run, step, link)]
        words = "asks"
    else:
        # Also state how a closed run ended: an approved one may have failed.
        how = answered(run, step, orders).how or "Not asked any more"
        after = "" if run.is_open else f"\nThe run has {run.status}: {visible(run.message)}"
        blocks.append(_section(f"{visible(how)}.{after}"))
        blocks += [{"type": "actions", "elements": [_link_button(link)]}] if link else []
        words = visible(how)
    blocks.append({"type": "context", "elements": [_plain(f"run {short_id(run.id)}")]})
    short = f"{title_of(run)} {words}: {step.message or ''}"
    return {
        "text": escaped(cut(visible(short), _SHORT)),
        "blocks": blocks,
        "metadata": {"event_type": METADATA, "event_payload": {"run_id": run.id, "step": step.id}},
        "parse": "none",
        "link_names": False,
        "unfurl_links": False,
        "unfurl_media": False,
    }


def reminder(run: Run, step: StepState, kind: type[QuestionEvent]) -> str:
    text = f"{questions.AGAIN.get(kind, 'Asked again')}: {title_of(run)} still waits: {step.message or ''}"
    return escaped(cut(visible(text), _TEXT // 2))  # Half, because escaping makes it longer.


def reason_form(metadata: str, run: Run, step: StepState) -> dict[str, Any]:
    field = {"type": "plain_text_input", "action_id": REASON, "multiline": True, "min_length": 1,
             "max_length": LONGEST_REASON, "focus_on_load": True}  # fmt: skip
    return {
        "type": "modal",
        "callback_id": REJECT,
        "private_metadata": metadata,
        "title": _plain("Reject"),
        "submit": _plain("Reject"),
        "close": _plain("Back"),
        "blocks": [
            _section(f"{visible(title_of(run))}\n{_quoted(step.message or '')}"),
            {"type": "input", "block_id": REASON, "label": _plain("Why?"), "element": field},
        ],
    }


def button_value(run_id: str, question: AskedQuestion) -> str:
    return json.dumps([run_id, question.step, question.asked])


def read_button_value(value: Any) -> RunQuestion | None:
    """Return None if the button is not ours."""
    try:
        run_id, step, asked = json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return None
    if not _is_short_text(run_id) or not _is_short_text(step) or type(asked) is not int:
        return None
    return RunQuestion(run_id, AskedQuestion(step, asked))


def _is_short_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_NAME and value.isprintable()


def form_metadata(value: str, at: MessageId) -> str:
    return json.dumps([value, *at])


def read_form_metadata(metadata: Any) -> tuple[RunQuestion, MessageId] | None:
    try:
        value, channel, message_ts = json.loads(metadata)
    except (TypeError, ValueError, RecursionError):
        return None
    asked = read_button_value(value)
    if asked is None or not _is_short_text(channel) or not _is_short_text(message_ts):
        return None
    return asked, MessageId(channel, message_ts)


def digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def escaped(text: str) -> str:
    return visible(text, keep="\n").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def cut(text: str, limit: int) -> str:
    """Count in UTF-16, as Slack's clients do."""
    units = text.encode("utf-16-le", "surrogatepass")
    if len(units) // 2 <= limit:
        return text
    kept = units[: 2 * (limit - 1)].decode("utf-16-le", errors="ignore")
    return f"{kept}…"


def _terms(run: Run, step: StepState, orders: Sequence[OperatorOrder]) -> Block:
    terms, approved_by = Terms.of(step), answered(run, step, orders).approved_by
    so_far = {"asked": terms.asked, "escalated": terms.escalated, "approved_by": approved_by}
    parts = [f"Needs approval by {questions.who_may_answer(terms.by, terms.count)}", *questions.state_parts(so_far)]
    parts += [questions.UNANSWERED[Unanswered.ASKED_AGAIN_LATER]] if terms.lapsed else []
    elements = [_plain(cut(visible("; ".join(parts)), _TEXT))]
    if step.deadline is not None:
        moment, otherwise = int(step.deadline.timestamp()), step.deadline.strftime("%d %b %H:%M UTC")
        until = f"Until <!date^{moment}^{{date_short_pretty}} {{time}}|{otherwise}>"
        elements.append({"type": "mrkdwn", "text": until, "verbatim": True})
    return {"type": "context", "elements": elements}


def _buttons(run: Run, step: StepState, link: str) -> Block:
    value = button_value(run.id, AskedQuestion(step.id, Terms.of(step).asked))
    confirmation = {
        "title": _plain("Approve?"),
        "text": _plain(cut(visible(f"{title_of(run)}: {step.message or ''}"), _CONFIRM)),
        "confirm": _plain("Approve"),
        "deny": _plain("Back"),
    }
    approve = {
        "type": "button",
        "action_id": APPROVE,
        "text": _plain("Approve"),
        "style": "primary",
        "confirm": confirmation,
    }
    reject = {"type": "button", "action_id": REJECT, "text": _plain("Reject…"), "style": "danger"}
    elements = [{**approve, "value": value}, {**reject, "value": value}, *([_link_button(link)] if link else [])]
    return {"type": "actions", "elements": elements}


def _link_button(link: str) -> Block:
    return {"type": "button", "action_id": "open", "text": _plain("Open"), "url": link}


def _section(text: str) -> Block:
    return {"type": "section", "text": _plain(cut(text, _TEXT))}


def _plain(text: str) -> Block:
    return {"type": "plain_text", "text": text, "emoji": False}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _quoted(text: str) -> str:
    return "\n".join(f"│ {line}" for line in visible(text, keep="\n").splitlines()) or "│"
