"""Selectors of groups by topology attributes, such as ``nodes: {pool: h100}``.

Equal selectors have the same canonical text, which is the parent run's target key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from urllib.parse import quote, unquote

from msgspec import Struct

from trainmedic_core import gpu_names
from trainmedic_core.target import MEMBER_KINDS, Target, TargetKind
from trainmedic_core.words import few
from trainmedic_server.domain import host_lists, places
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.topology import Topology

ALL = "all"
NAME = "name"
ON_NODES = "on_nodes"  # of jobs; takes host lists, as NAME does for nodes
MOST_MEMBERS = 10_000  # twice the GPUs of the largest single rollout planned for
_UNESCAPED = "/[]:;+@~()*!$&' "  # readable in keys; the separators , = | are escaped
_SHOWN = 3


class Selector(Struct, frozen=True):
    """Conditions as (attribute, accepted values). All must hold."""

    kind: TargetKind
    terms: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def target(self) -> Target:
        terms = (f"{_quoted(name)}={'|'.join(map(_quoted, values))}" for name, values in self.terms)
        return Target(TargetKind.GROUP, group=f"{self.kind.plural}:{','.join(terms) or ALL}")

    @classmethod
    def of(cls, target: Target) -> Selector:
        """Raises ValueError."""
        plural, _, text = (target.group or "").partition(":")
        kind = MEMBER_KINDS.get(plural)
        if kind is None or not text:
            raise ValueError(f"{target.key!r} is no group, such as nodes:pool=h100")
        if text == ALL:
            return cls(kind)
        terms: dict[str, tuple[str, ...]] = {}
        for term in text.split(","):
            name, equals, values = term.partition("=")
            if not (name and equals and all(values.split("|"))):
                raise ValueError(f"{term!r} in {target.key!r} is not NAME=VALUE")
            terms[unquote(name)] = tuple(map(unquote, values.split("|")))
        return cls(kind, tuple(sorted(terms.items())))


class Selection(Struct, frozen=True):
    members: tuple[Target, ...]
    left_out: tuple[str, ...] = ()  # in a group of GPUs
    """Selected nodes whose GPUs no agent reports, and GPUs that several nodes report."""


def _quoted(text: str) -> str:
    return quote(text, safe=_UNESCAPED)


def resolve(selector: Selector, topology: Topology) -> Selection | Unresolved:
    """Return the members in natural order. Refused if there are none, too many, or a source does not answer."""
    if not topology.answers:
        return Unresolved("target_unknown", "a source of the topology does not answer, so the group is not known whole")
    key = selector.target.key
    if selector.kind is TargetKind.JOB:
        selection = _jobs(selector, topology)
    else:
        nodes = _nodes(selector, topology)
        if isinstance(nodes, Unresolved):
            return nodes
        if selector.kind is TargetKind.GPU:
            selection = _gpus(nodes, topology)
        else:
            selection = Selection(tuple(Target(TargetKind.NODE, node=node) for node in nodes))
    if isinstance(selection, Unresolved):
        return selection
    if not selection.members:
        why = _why_empty(selector, topology, selection)
        return Unresolved("target_unknown", f"{key} selects nothing: {why}")
    if len(selection.members) > MOST_MEMBERS:
        return Unresolved(
            "target_unknown", f"{key} selects {len(selection.members)} members; a group has at most {MOST_MEMBERS}"
        )
    return selection


def jobs_on_node(target: Target, topology: Topology) -> tuple[Target, ...] | Unresolved:
    """Return the jobs on a target's node that take commands, in natural order."""
    if not topology.agents_answer:
        return Unresolved("target_unknown", f"the jobs on {target.node} are not known while Redis does not answer")
    node = target.node or ""
    jobs = topology.jobs_on_node(node).reported
    if node not in topology.written.reported_by_node:  # jobs may report another name of the node
        jobs |= {job for job in topology.jobs.nodes_by_job if node in topology.nodes_of_job(job)}
    return tuple(Target(TargetKind.JOB, job=job) for job in sorted(jobs, key=natural))


def other_names(job: Target, topology: Topology, before: Collection[Target] = ()) -> tuple[Target, ...]:
    """Return the job's other names, and those of `before` that the topology does not refute."""
    name = job.job or ""
    kept = {each.job for each in before if each.job and topology.may_be_same_job(name, each.job)}
    names = topology.other_names_of_job(name) | kept
    return tuple(Target(TargetKind.JOB, job=name) for name in sorted(names, key=natural))


def nodes_selected(selector: Selector, topology: Topology) -> list[str] | Unresolved:
    if not topology.answers:
        return Unresolved("target_unknown", "a source of the topology does not answer")
    return _nodes(selector, topology)


def vanished(member: Target, topology: Topology) -> str | None:
    """Return why a member of a run's fixed list no longer exists; None if it does, or a source does not answer."""
    if not topology.answers:
        return None
    if member.kind is TargetKind.JOB:
        return None if member.job in _job_names(topology) else f"the job {member.job} is gone"
    node = topology.known.name_of(member.node or "")  # the name changes as its agent comes and goes
    if node not in topology.attributes_by_node:
        return f"the node {node} is gone"
    gpus = topology.gpus_on(node)
    if member.kind is TargetKind.GPU and gpus is not None and member.gpu not in gpus:
        return f"the GPU {member.gpu} is no longer on {node}"
    return None


def nodes_of(members: Collection[Target], topology: Topology) -> set[str]:
    return {node for member in members for node in places.nodes_of(member, topology)}


def gpus_of(members: Sequence[Target], topology: Topology) -> int | None:
    """Return the number of distinct GPUs; None if one member's is unknown."""
    keys: set[str] = set()
    for member in members:
        if member.kind is TargetKind.GPU:
            keys.add(gpu_names.key(member.gpu or "", member.node or ""))
            continue
        if member.kind is TargetKind.JOB:
            of_job = topology.jobs.keys_by_job.get(member.job or "")
            if of_job is None:
                return None
            keys |= of_job
            continue
        gpus = topology.gpus_on(member.node or "")
        if gpus is None:
            return None
        keys |= {gpu_names.key(gpu, member.node or "") for gpu in gpus}
    return len(keys)


def natural(text: str) -> tuple[tuple[str, int], ...]:
    """Return the sort key that puts ``n2`` before ``n10``."""
    return tuple((word, int(number or 0)) for word, number in re.findall(r"(\D*)(\d*)", text)[:-1])


def _nodes(selector: Selector, topology: Topology) -> list[str] | Unresolved:
    named = _named_nodes(dict(selector.terms).get(NAME), topology)
    if isinstance(named, Unresolved):
        return named
    nodes = topology.attributes_by_node if named is None else named
    others = [(name, values) for name, values in selector.terms if name != NAME]
    return sorted((node for node in nodes if _has_all(node, others, topology)), key=natural)


def _has_all(node: str, terms: Collection[tuple[str, tuple[str, ...]]], topology: Topology) -> bool:
    return all(has_value(node, name, values, topology) for name, values in terms)


def has_value(node: str, name: str, values: Collection[str], topology: Topology) -> bool:
    """Return whether the attribute, maybe a list, has one of `values`."""
    attribute = topology.attributes_by_node.get(node, {}).get(name)
    return attribute is not None and (attribute in values or any(each in values for each in attribute.split(",")))


def _named_nodes(values: tuple[str, ...] | None, topology: Topology) -> set[str] | Unresolved | None:
    """Return the nodes in host lists; None without a condition on names."""
    if values is None:
        return None
    names: list[str] = []
    for value in values:
        try:
            names += host_lists.expand(value)
        except host_lists.UnreadableHostList as error:
            return Unresolved("target_unknown", f"the host list {value[:80]!r} {error}")
    found = {name: topology.known.find(name) for name in names}
    several = next((name for name, nodes in found.items() if len(nodes) > 1), None)
    if several is not None:
        return Unresolved("target_ambiguous", f"{several!r} may be {' or '.join(sorted(found[several]))}")
    unknown = [name for name, nodes in found.items() if not nodes & topology.attributes_by_node.keys()]
    if unknown:
        return Unresolved("target_unknown", f"there is no node {few(unknown, _SHOWN)}")
    return {node for nodes in found.values() for node in nodes}


def _gpus(nodes: Collection[str], topology: Topology) -> Selection:
    members: list[Target] = []
    left_out: list[str] = []
    for node in nodes:
        gpus = topology.gpus_on(node)
        if not gpus:
            left_out.append(node)
        for gpu in gpus or ():
            if gpu_names.key(gpu, node) in topology.agents.contested:
                left_out.append(f"{node}/{gpu}")
            else:
                members.append(Target(TargetKind.GPU, node=node, gpu=gpu))
    return Selection(tuple(members), tuple(left_out))


def _jobs(selector: Selector, topology: Topology) -> Selection | Unresolved:
    terms = dict(selector.terms)
    wanted, on_nodes = terms.pop(NAME, None), _named_nodes(terms.pop(ON_NODES, None), topology)
    if isinstance(on_nodes, Unresolved):
        return on_nodes
    members = []
    for job in sorted(_job_names(topology), key=natural):
        target = Target(TargetKind.JOB, job=job)
        nodes = places.nodes_of(target, topology) if terms or on_nodes is not None else frozenset[str]()
        is_placed = on_nodes is None or bool(nodes & on_nodes)
        has_attributes = not terms or any(_has_all(node, terms.items(), topology) for node in nodes)
        if (wanted is None or job in wanted) and is_placed and has_attributes:
            members.append(target)
    return Selection(tuple(members))


def _job_names(topology: Topology) -> set[str]:
    written = (job for jobs in topology.written.reported_by_node.values() for job in jobs)
    return {*topology.jobs.nodes_by_job, *written}


def _why_empty(selector: Selector, topology: Topology, selection: Selection) -> str:
    if selection.left_out:
        contested = [name for name in selection.left_out if "/" in name]
        unreported = [name for name in selection.left_out if "/" not in name]
        parts = [f"no agent reports the GPUs of {few(unreported, _SHOWN)}"] if unreported else []
        return "; ".join([*parts, *([f"several nodes report {few(contested, _SHOWN)}"] if contested else [])])
    if selector.kind is TargetKind.JOB:
        return "no connected job fits"
    attributes = topology.attributes_by_node.values()
    for name, values in selector.terms:
        there = sorted({value for each in attributes if name in each for value in each[name].split(",")})
        if name != NAME and not there:
            return f"no node has the attribute {name!r}"
        if name != NAME and not set(there) & set(values):
            return f"no node has {name}={'|'.join(values)}; there are {few(there, _SHOWN)}"
    return "no node has all of these attributes" if selector.terms else "no node is known"


def of_written(plural: str, written: str | Mapping[str, Collection[str]]) -> Selector:  # a text is `ALL`
    terms = {} if isinstance(written, str) else written
    return Selector(MEMBER_KINDS[plural], tuple(sorted((name, tuple(values)) for name, values in terms.items())))


def attribute_pairs(attributes: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of ``rack=r1, pool=h100``. Raises ValueError."""
    for pair in attributes.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not (name and equals and value):
            raise ValueError(f"{pair.strip()!r} is not NAME=VALUE, such as rack=r1")
        yield name, value
