"""Whatever labels an alert has, nothing is done on a machine, GPU or job other than that which it is about.

The tests print the share of label sets that is refused.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.unit.domain.any_fleet import Fleet
from tests.unit.domain.any_labels import Case, clear_case, job_case, unclear_case
from trainmedic_core import gpu_names
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain import job_lookup
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.target_resolution import resolve, unknown_node
from trainmedic_server.domain.topology import Topology

EXAMPLES = examples(300)
PER_FLEET = 8
LEAST_ACTING = 0.95
"""Of the label sets that name exactly one known subject."""
fleets = st.integers(0, 2**48)
made = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def found(case: Case, known: Topology) -> Target | Unresolved:
    """As admission finds it."""
    target = resolve(TargetKind(case.kind), case.labels, known)
    if isinstance(target, Unresolved):
        return target
    return unknown_node(target, known, case.labels) or target


def job_found(fleet: Fleet, case: Case) -> str | Unresolved:
    if not case.kind:
        target = resolve(TargetKind.JOB, case.labels, fleet.known)
        return target if isinstance(target, Unresolved) else str(target.job)
    return job_lookup.resolve_job(case.kind, case.labels, fleet.known)


def check_place(fleet: Fleet, case: Case, target: Target) -> None:
    assert case.node is not None, (case, target)
    assert fleet.node_of(target.node or "") is case.node, (case, target)
    if case.card is None:
        return
    names = {gpu_names.key(case.card.uuid), str(case.card.index), gpu_names.normal_pci(case.card.pci)}
    gpu = target.gpu or ""
    name = gpu_names.key(gpu).rpartition("/")[2]
    assert name in names, (case, target)


def in_fleets(check: Callable[[Fleet], None]) -> None:
    """Call it with fleets, some times with each."""

    @made
    @given(fleets)
    def in_fleet(seed: int) -> None:
        fleet = Fleet(random.Random(seed))
        for _ in range(PER_FLEET):
            check(fleet)

    in_fleet()


def told(what: str, counts: Counter[str]) -> None:
    share = counts["refused"] / max(1, counts["clear"])
    print(f"{what}: {counts['clear']} label sets name one known subject, {share:.2%} of them were refused")


def test_no_label_set_leads_to_another_machine() -> None:
    """And at least 95 % of those that name one known subject lead to it."""
    counts: Counter[str] = Counter()

    @in_fleets
    def check(fleet: Fleet) -> None:
        case = clear_case(fleet)
        target = found(case, fleet.known)
        counts["clear"] += case.names_one
        if isinstance(target, Target):
            check_place(fleet, case, target)
        elif case.names_one:
            counts["refused"] += 1

    told("nodes and GPUs", counts)
    assert counts["clear"] > EXAMPLES
    assert counts["refused"] <= (1 - LEAST_ACTING) * counts["clear"], counts


def test_a_server_that_has_just_started_acts_on_no_other_machine() -> None:
    """While a source does not answer nothing is refused as unknown; what is done is done on the right machine."""

    @in_fleets
    def check(fleet: Fleet) -> None:
        case, topology = clear_case(fleet), fleet.partly_known()
        target = found(case, topology)
        if isinstance(target, Target):
            check_place(fleet, case, target)


def test_a_label_set_of_strangers_or_of_several_leads_nowhere() -> None:
    """The exporter's own host least of all."""

    @in_fleets
    def check(fleet: Fleet) -> None:
        case = unclear_case(fleet)
        target = found(case, fleet.known)
        assert isinstance(target, Unresolved), (case, target)
        assert target.reason in ("target_unknown", "target_ambiguous")
        assert len(target.why) < 2000


def test_no_label_set_leads_to_another_teams_job() -> None:
    """Of two jobs of one name only the one that is connected takes commands; alerts about the other are refused."""
    counts: Counter[str] = Counter()

    @in_fleets
    def check(fleet: Fleet) -> None:
        case = job_case(fleet)
        if case is None:
            return
        job = job_found(fleet, case)
        counts["clear"] += case.names_one
        if isinstance(job, str):
            assert case.job is not None
            assert (job, True) == (case.job.name, case.names_one), (case, job)
        elif case.names_one:
            counts["refused"] += 1

    told("jobs", counts)
    assert counts["refused"] <= (1 - LEAST_ACTING) * counts["clear"], counts
