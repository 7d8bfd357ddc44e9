"""The data needed for admission."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from msgspec import Struct, field

from trainmedic_core.target import Target
from trainmedic_server.domain import places
from trainmedic_server.domain.alert import EVENT, AlertRecord, AlertStatus, Identity
from trainmedic_server.domain.memory import RunMemory
from trainmedic_server.domain.run import Controls
from trainmedic_server.domain.time_gaps import Ago
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import guards, matching
from trainmedic_server.engine.matching import Candidate, Key, PreparedDelivery
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.playbooks import Catalog, CompiledPlaybook
from trainmedic_server.ports.store import GuardFacts, LinkedRun, Transaction


class AdmissionFacts(Struct, kw_only=True):
    records: dict[Identity, AlertRecord] = field(default_factory=dict)
    firing: dict[str, dict[Identity, AlertRecord]] = field(default_factory=dict)
    """By fingerprint; read only for alerts that resolve in these deliveries."""
    newest: dict[str, AlertRecord] = field(default_factory=dict)  # of events, by fingerprint
    linked: dict[Identity, list[LinkedRun]] = field(default_factory=dict)  # runs of each alert, oldest first
    open_runs: dict[Key, str] = field(default_factory=dict)  # run IDs
    guards: dict[Key, GuardFacts] = field(default_factory=dict)
    controls: Controls = Controls()
    nodes_acted_on: set[str] = field(default_factory=set)  # in the breaker's window
    known_nodes: set[str]  # of which the breaker takes its share
    topology: Topology
    memories: dict[Key, RunMemory] = field(default_factory=dict)  # only of playbooks that use ``runs``
    limited: dict[str, set[str]] = field(default_factory=dict)
    """Targets by playbook, as `Transaction.limited_since`."""
    nodes_taken: set[str] = field(default_factory=set)
    """Nodes of open runs with ``min_available``, and nodes acted on lately."""


_TOPOLOGY_LAG = timedelta(seconds=30)  # until Slurm and Kubernetes show what a run has changed


def read(
    tx: Transaction,
    prepared: Sequence[PreparedDelivery],
    limits: EngineLimits,
    ago: Ago,
    topology: Topology,
    catalog: Catalog,
) -> AdmissionFacts:
    alerts = [alert for entry in prepared for alert in entry.delivery.alerts]
    candidates = [candidate for entry in prepared for candidate in entry.candidates]
    keys = {candidate.key for candidate in candidates if isinstance(candidate.target, Target)}
    playbooks = {candidate.playbook.definition.name: candidate.playbook for candidate in candidates}

    per_target = {name for name, each in playbooks.items() if guards.counts_per_target(each.definition.guards)}

    firing: dict[str, dict[Identity, AlertRecord]] = {}
    rejected = [each for entry in prepared for each in entry.delivery.rejected]
    ended = {alert.fingerprint for alert in alerts if alert.status is AlertStatus.RESOLVED}
    ended |= {each.identity.fingerprint for each in rejected if each.identity is not None and each.is_end}
    for record in tx.firing_with(ended) if ended else ():
        firing.setdefault(record.alert.fingerprint, {})[record.identity] = record
    events = {alert.fingerprint for alert in alerts if alert.fingerprint.startswith(EVENT)}
    newest = tx.newest_alerts(events) if events else {}
    identities = {alert.identity for alert in alerts} | {key for records in firing.values() for key in records}
    identities |= {each.identity for each in rejected if each.identity is not None}
    identities |= {record.identity for record in newest.values()}
    nodes = matching.nodes_named(prepared)
    has_nodes = bool(nodes) or matching.names_group(prepared)
    controls = tx.controls()
    counts_from = controls.breaker_counts_from(ago(limits.breaker_window))
    return AdmissionFacts(
        records=tx.alerts(identities),
        firing=firing,
        newest=newest,
        linked=tx.linked_runs(identities),
        open_runs=tx.open_runs_for(keys) if keys else {},
        guards=tx.guard_facts(keys, counted_since(playbooks.values(), ago), per_target) if keys else {},
        controls=controls,
        nodes_acted_on=tx.nodes_acted_on(counts_from) if has_nodes else set(),
        known_nodes=tx.known_nodes() | nodes | topology.nodes if has_nodes else set(),
        topology=topology,
        memories=_memories(tx, candidates, ago),
        limited={
            name: tx.limited_since(name, ago(rules.max_runs.per))
            for name, playbook in playbooks.items()
            if (rules := playbook.definition.guards).on_limited and rules.max_runs is not None
        },
        nodes_taken=_nodes_taken(tx, candidates, catalog, ago),
    )


def _memories(tx: Transaction, candidates: Sequence[Candidate], ago: Ago) -> dict[Key, RunMemory]:
    using: dict[str, CompiledPlaybook] = {}
    targets: dict[str, set[str]] = {}
    for candidate in candidates:
        if candidate.playbook.remembers is not None and isinstance(candidate.target, Target):
            using[candidate.key[0]] = candidate.playbook
            targets.setdefault(candidate.key[0], set()).add(candidate.key[1])
    return {
        (name, target): memory
        for name, playbook in using.items()
        for target, memory in tx.memories(
            name, targets[name], {window: ago(length) for window, length in (playbook.remembers or {}).items()}
        ).items()
    }


def for_members(
    tx: Transaction,
    candidates: Sequence[Candidate],
    limits: EngineLimits,
    ago: Ago,
    topology: Topology,
    catalog: Catalog,
) -> AdmissionFacts:
    """Read the data for members of a group, whose alerts are the parent's."""
    keys = {candidate.key for candidate in candidates}
    controls = tx.controls()
    return AdmissionFacts(
        open_runs=tx.open_runs_for(keys),
        guards=tx.guard_facts(keys, {}),  # without starts: `max_runs` counts the group once, as its parent
        controls=controls,
        nodes_acted_on=tx.nodes_acted_on(controls.breaker_counts_from(ago(limits.breaker_window))),
        known_nodes=tx.known_nodes() | topology.nodes,
        topology=topology,
        memories=_memories(tx, candidates, ago),
        nodes_taken=_nodes_taken(tx, candidates, catalog, ago),
    )


def _nodes_taken(tx: Transaction, candidates: Sequence[Candidate], catalog: Catalog, ago: Ago) -> set[str]:
    if all(each.playbook.definition.guards.min_available is None for each in candidates):
        return set()
    keeping = {each.definition.name for each in catalog.all() if each.definition.guards.min_available is not None}
    targets = (Target.of_key(key) for playbook, key in tx.open_targets() if playbook in keeping)
    # The topology does not show yet what has just ended.
    return tx.nodes_acted_on(ago(_TOPOLOGY_LAG)).union(*map(places.counted_nodes, targets))


def counted_since(playbooks: Iterable[CompiledPlaybook], ago: Ago) -> Mapping[str, datetime]:
    # Start of the period of ``max_runs``, by playbook.
    return {
        playbook.definition.name: ago(playbook.definition.guards.max_runs.per)
        for playbook in playbooks
        if playbook.definition.guards.max_runs
    }
