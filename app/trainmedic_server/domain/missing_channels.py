from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from trainmedic_core.words import count, few
from trainmedic_server.domain.playbook import EVERY_PHASE, ActionStep, ApproveStep, Playbook

_SHOWN = 5


def unset_channels(playbooks: Iterable[Playbook], channels: Collection[str]) -> str:
    """Return a warning if no channel is set, or playbooks name others; else ""."""
    named = {playbook.name: set(_channels_of(playbook)) for playbook in playbooks}
    if not channels:
        affected = sorted(name for name, wanted in named.items() if wanted)
        lost = f"; {_listed(affected)} would notify people: steps are skipped, questions not sent" if affected else ""
        return f"no notification channel is set, so no messages are sent{lost}; set TRAINMEDIC_NOTIFY_URLS"
    missing = {channel for wanted in named.values() for channel in wanted if channel and channel not in channels}
    wrong = sorted(name for name, wanted in named.items() if wanted & missing)
    if not wrong:
        return ""
    there, names = ", ".join(sorted(channels)), ", ".join(map(repr, sorted(missing)))
    return f"{_listed(wrong)} would notify {names}, which TRAINMEDIC_NOTIFY_URLS does not set; it sets {there}"


def _channels_of(playbook: Playbook) -> Iterator[str]:
    """Yield the channels of steps, "" for all or a template."""
    for step in chain.from_iterable(map(playbook.phase, EVERY_PHASE)):
        if isinstance(step, ActionStep) and step.action == "notify":
            yield _name_or_all(step.with_.get("to"))
        elif isinstance(step, ApproveStep):
            yield _name_or_all(step.question.to)


def _name_or_all(channel: object) -> str:
    return channel if isinstance(channel, str) and "{" not in channel else ""


def _listed(names: Sequence[str]) -> str:
    return f"{count(len(names), 'playbook')} ({few(names, _SHOWN)})"
