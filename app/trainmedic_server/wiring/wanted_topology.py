"""Whether anybody asks where things are. Who calls it: ``server``, for the topology that is read only then."""

from __future__ import annotations

from trainmedic_server.catalog.library import Library
from trainmedic_server.catalog.log_rule_library import LogRuleLibrary
from trainmedic_server.domain.target import TargetKind
from trainmedic_server.ports.playbooks import CompiledPlaybook


def asks_where_things_are(catalog: Library, rules: LogRuleLibrary) -> bool:
    """Whether anybody asks where jobs, GPUs and nodes are: a playbook that works on them, or a finding in a log."""
    return bool(rules.rule_set.rules) or any(map(_has_a_place, catalog.all()))


def _has_a_place(playbook: CompiledPlaybook) -> bool:
    """Whether the target is in some place. Labels name nodes and GPUs in many ways, and agents know which is meant;
    jobs are named by what they use; and the breaker measures against the nodes that have agents."""
    return playbook.definition.target_kind is not TargetKind.CLUSTER
