"""The index over equality matchers: it rules out nothing that would react, and is no dearer than it has to be."""

from __future__ import annotations

import random

from tests.unit.catalog.actions import TestActions, alert, playbook_of
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.catalog.library import StaticCatalog
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import matching

LABELS = ("team", "rack", "severity", "note")
VALUES = ("", "a", "b", "c")


def playbook(name: str, matchers: list[str], when: str = "") -> YamlPlaybook:
    listed = ", ".join(f"'{matcher}'" for matcher in matchers)
    condition = f"  when: {when}\n" if when else ""
    on = f"on:\n  alert: Hot\n  matchers: [{listed}]\n{condition}"
    return playbook_of(
        f"playbook: {name}\n{on}target: cluster\nsteps:\n  - action: test.tell\n    with: {{message: x}}\n"
    )


def some_playbook(chance: random.Random, name: str) -> YamlPlaybook:
    kinds = ('{}="{}"', '{}!="{}"', '{}=~"{}|x"', '{}!~"{}"', '{}=~".{{0,900}}{}"')
    matchers = [
        chance.choice(kinds).format(chance.choice(LABELS), chance.choice(VALUES)) for _ in range(chance.randint(0, 4))
    ]
    return playbook(name, matchers, chance.choice(["", "", "labels.rack == 'a'", "labels.absent + 1 > 0"]))


def test_the_index_decides_like_matching_each_playbook() -> None:
    """Random playbooks and alerts give the same reactions, evaluation failures and retained reasons."""
    for seed in range(40):
        chance = random.Random(seed)
        catalog = StaticCatalog([some_playbook(chance, f"p{n:02}") for n in range(60)], TestActions())
        for _ in range(10):
            labels = {label: chance.choice((*VALUES, "x" * 60_000)) for label in chance.sample(LABELS, 3)}
            heard = alert("Hot", **labels)
            plain = matching.match(catalog.for_alert("Hot"), heard, Topology())
            indexed = matching.match_shortlist(catalog.shortlist(heard), heard, Topology())
            assert indexed.candidates == plain.candidates, (seed, labels)
            assert indexed.no_run_because == plain.no_run_because, (seed, labels)
            failed, kept = (
                [each for each in found.misses if each.decision == "match_failed"] for found in (plain, indexed)
            )
            assert kept == failed, (seed, labels)
            named = [miss for miss in indexed.misses if miss.playbook]
            assert set(named) <= set(plain.misses)
            unmatched = len(plain.misses) - len(failed)
            assert len(named) - len(failed) == min(unmatched, matching.MOST_MISSES)
            counted = [miss.reason for miss in indexed.misses if not miss.playbook]
            more = unmatched - matching.MOST_MISSES
            assert counted == ([f"{more} more playbooks name it and do not match"] if more > 0 else [])


def test_only_playbooks_indexed_by_the_alerts_labels_are_matched() -> None:
    """The rarest matcher is indexed. A playbook without an equality is always tried; no label means empty."""
    books = [playbook(f"rack-{n}", ['severity="a"', f'rack="{n}"']) for n in range(100)]
    books += [playbook("any", ['rack!="7"']), playbook("none", ['rack=""'])]
    catalog = StaticCatalog(books, TestActions())

    def asked(**labels: str) -> list[str]:
        return [each.definition.name for each in catalog.shortlist(alert("Hot", **labels)).playbooks]

    assert asked(rack="7", severity="a") == ["any", "rack-7"]
    assert asked(severity="a") == ["any", "none"]
    assert asked(rack="x") == ["any"]
    assert list(catalog.shortlist(alert("Cold")).playbooks) == []
