"""Whether anybody asks where jobs are. Who calls it: ``server``, for the topology that is read only then."""

from __future__ import annotations

from trainmedic_server.catalog.library import Library
from trainmedic_server.catalog.log_rule_library import LogRuleLibrary
from trainmedic_server.domain.target import TargetKind
from trainmedic_server.ports.playbooks import CompiledPlaybook


def asks_for_jobs(catalog: Library, rules: LogRuleLibrary) -> bool:
    """Whether anybody asks where jobs are: a playbook that works on them, or a finding in a log."""
    return bool(rules.rule_set.rules) or any(map(_works_on_jobs, catalog.all()))


def _works_on_jobs(playbook: CompiledPlaybook) -> bool:
    """Whether the target is a job: labels may name one by a GPU, pod or node that it uses, and what works on all its
    nodes is measured by the breaker against the nodes that have agents."""
    return playbook.definition.target_kind is TargetKind.JOB
