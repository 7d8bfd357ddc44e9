"""Check whether the topology is needed. Caller: ``server``, which reads it only then."""

from __future__ import annotations

from trainmedic_core.target import TargetKind
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary
from trainmedic_server.catalog.library import Library
from trainmedic_server.ports.playbooks import CompiledPlaybook


def asks_where_things_are(catalog: Library, rules: LogRuleLibrary) -> bool:
    """Return whether the place of jobs, GPUs and nodes is needed: for a playbook that works on them, or a finding in a
    log."""
    return bool(rules.rule_set.rules) or any(map(_has_a_place, catalog.all()))


def _has_a_place(playbook: CompiledPlaybook) -> bool:
    """Return whether the target is in some place. Labels name nodes and GPUs in many ways, and agents know which is
    meant. Jobs are named by what they use. The breaker measures against the nodes that have agents."""
    return playbook.definition.target_kind is not TargetKind.CLUSTER
