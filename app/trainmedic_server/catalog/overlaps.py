"""Detection of playbooks that would both act on one alert, by alertnames and written matcher values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from trainmedic_core.problems import FileProblem
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook, by_alertname
from trainmedic_server.catalog.matchers import Matcher
from trainmedic_server.domain.playbook import ActionStep, Mode
from trainmedic_server.ports.actions import Actions

_WORDS = re.compile(r"[\w -]+(\|[\w -]+)*")  # a pattern that lists values


def warnings(playbooks: Sequence[YamlPlaybook], actions: Actions) -> Iterator[FileProblem]:
    acting = by_alertname(playbook for playbook in playbooks if acts(playbook, actions))
    for name, rivals in acting.items():
        for first, second in itertools.combinations(rivals, 2):
            if _both_match(first.matchers, second.matchers) and not _one_is_exclusive(first, second):
                yield FileProblem(second.source, second.line, 1, _warning(name, first, second))


def _warning(alertname: str, first: YamlPlaybook, second: YamlPlaybook) -> str:
    names = f"{first.definition.name!r} ({first.source}:{first.line}) and {second.definition.name!r}"
    has_condition = first.condition is not None or second.condition is not None
    unless = ", unless on.when distinguishes them" if has_condition else ""
    return f"warning: {names} both act on the alert {alertname}, {_order(first, second)}{unless}"


def _order(first: YamlPlaybook, second: YamlPlaybook) -> str:
    one, other = first.definition, second.definition
    if one.priority == other.priority:
        return "one after the other"
    return f"{(one if one.priority > other.priority else other).name!r} first"


def _one_is_exclusive(first: YamlPlaybook, second: YamlPlaybook) -> bool:
    is_exclusive = first.definition.exclusive or second.definition.exclusive
    return is_exclusive and first.definition.target_kind is second.definition.target_kind


def acts(playbook: YamlPlaybook, actions: Actions) -> bool:
    """Return whether one of its ``steps`` may change something. Unknown actions do not count."""
    if playbook.definition.mode is Mode.OBSERVE:
        return False
    classes = (actions.action_class(step.action) for step in playbook.definition.steps if isinstance(step, ActionStep))
    return any(action is not None and action.harmful for action in classes)


def _both_match(first: Sequence[Matcher], second: Sequence[Matcher]) -> bool:
    labels = {matcher.label for matcher in first} & {matcher.label for matcher in second}
    for label in labels:
        of_label = [matcher for matcher in (*first, *second) if matcher.label == label]
        values = [value for matcher in of_label for value in _values(matcher)]
        if values and not any(all(matcher.matches({label: value}) for matcher in of_label) for value in values):
            return False
    return True


def _values(matcher: Matcher) -> list[str]:  # values that the matcher names; none if it excludes or has a pattern
    if matcher.operator == "=":
        return [matcher.value]
    return matcher.value.split("|") if matcher.operator == "=~" and _WORDS.fullmatch(matcher.value) else []
