"""Checks of playbooks that the ends of other playbooks' runs start."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from trainmedic_core.problems import FileProblem, did_you_mean
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook


def ring_from(name: str, playbooks: Mapping[str, YamlPlaybook]) -> Sequence[str]:
    """Return a shortest chain of runs from the playbook back to itself, empty if there is none."""
    starts: dict[str, str] = {}  # by playbook, the one that its end starts on the way back to `name`
    waiting = [name]
    for each in waiting:
        for cause in _causes(playbooks.get(each)):
            if cause == name:
                ring = [name, each]
                while ring[-1] != name:
                    ring.append(starts[ring[-1]])
                return ring
            if cause not in starts and cause in playbooks:
                starts[cause] = each
                waiting.append(cause)
    return ()


def cycles(playbooks: Mapping[str, YamlPlaybook]) -> Iterator[tuple[YamlPlaybook, FileProblem]]:
    """Yield each playbook whose run's end starts its own run again."""
    for name, playbook in playbooks.items():
        ring = ring_from(name, playbooks) if playbook.definition.on.run is not None else ()
        if ring:
            message = f"on.run: its runs would start each other without end: {' → '.join(ring)}; remove one 'on: run'"
            yield playbook, FileProblem(playbook.source, playbook.line, 1, message)


def warnings(playbooks: Sequence[YamlPlaybook]) -> Iterator[FileProblem]:
    names = {playbook.definition.name for playbook in playbooks}
    for playbook in playbooks:
        for cause in _causes(playbook):
            if cause not in names:
                message = f"warning: on.run: there is no playbook {cause!r} here{did_you_mean(cause, sorted(names))}"
                yield FileProblem(playbook.source, playbook.line, 1, message)


def _causes(playbook: YamlPlaybook | None) -> Collection[str]:
    trigger = playbook.definition.on.run if playbook is not None else None
    return trigger.playbook if trigger is not None else ()
