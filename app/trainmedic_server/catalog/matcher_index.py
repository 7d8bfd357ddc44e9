"""Which of the playbooks that name an alertname can react to an alert, found by their equality matchers.

Of each playbook the index has one matcher: the ``=`` that it shares with the fewest others. An alert that lacks this
very label and value is refused by it, whatever else the playbook asks, so only the playbooks of the alert's own labels
are evaluated, and those without an ``=``. Pure. Who calls it: ``library``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.ports.playbooks import Shortlist

_Equality = tuple[str, str]
"""A label and its value; the empty text is that of a label which an alert lacks."""


class MatcherIndex:
    """Playbooks that name one alertname, in the order of their names."""

    def __init__(self, playbooks: Sequence[YamlPlaybook]) -> None:
        self.playbooks = tuple(playbooks)
        shared = Counter(equality for playbook in playbooks for equality in set(_equalities(playbook)))
        self._asked_of_all: list[int] = []
        self._by_label: dict[str, dict[str, list[int]]] = {}
        for place, playbook in enumerate(playbooks):
            equalities = list(_equalities(playbook))
            if not equalities:
                self._asked_of_all.append(place)
                continue
            label, value = min(equalities, key=shared.__getitem__)
            self._by_label.setdefault(label, {}).setdefault(value, []).append(place)

    def shortlist(self, labels: Mapping[str, str]) -> Shortlist:
        """Return the playbooks that can react to an alert with these labels, and those that cannot."""
        places = list(self._asked_of_all)
        for label, by_value in self._by_label.items():
            places += by_value.get(labels.get(label, ""), ())
        if len(places) == len(self.playbooks):
            return Shortlist(self.playbooks)
        places.sort()
        chosen = set(places)
        ruled_out = (playbook for place, playbook in enumerate(self.playbooks) if place not in chosen)
        return Shortlist([self.playbooks[place] for place in places], ruled_out, len(self.playbooks) - len(places))


def _equalities(playbook: YamlPlaybook) -> Iterator[_Equality]:
    return ((matcher.label, matcher.value) for matcher in playbook.matchers if matcher.operator == "=")
