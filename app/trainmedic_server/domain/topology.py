"""Frozen view of jobs, ranks, pods, nodes, GPUs and addresses: `Topology`.

Jobs and agents report by presences in Redis, to which others may write too, so invalid data in them is skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_core import gpu_names
from trainmedic_server.domain.job_verdict import VerdictsOnJob
from trainmedic_server.domain.node_names import KnownNodes, NodeNames, is_address, known_nodes, spelled
from trainmedic_server.domain.withheld import Withheld

MOST_ENTRIES = 200_000  # most ranks, and most GPUs, read from all presences (tens of MB)

Jobs: TypeAlias = frozenset[str]
JobsByName: TypeAlias = Mapping[str, Jobs]
"""Jobs by node, GPU (`gpu_names.key`) or pod (``<namespace>/<name>``)."""

SLURM = "slurm:"  # begins the name of a job in Slurm: `slurm:<job ID>`

_NO_JOBS: Jobs = frozenset()


class ClusterNode(Struct, frozen=True):
    name: str
    addresses: tuple[str, ...]
    attributes: Mapping[str, str] = field(default_factory=dict)
    """For selectors of groups. Commas separate several values."""
    unavailable: str = ""  # Why it takes no work; empty if it does
    pools: tuple[str, ...] = ()  # Slurm partitions; empty for the whole cluster


class Pod(Struct, frozen=True):
    uid: str
    namespace: str
    name: str
    node: str
    job: str | None
    addresses: tuple[str, ...] = ()
    """The node's if it uses the host network."""
    gpus: int = 0
    """At least 1 for shares of one."""
    is_per_node: bool | None = None
    """True if each node has one, as with a DaemonSet. None if the pod has no owner."""
    is_ending: bool = False
    """True if it is being deleted: another pod may already have its address."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Gpu(Struct, frozen=True):
    node: str
    uuid: str
    index: int | None = None
    pci: str | None = None
    pods: tuple[str, ...] = ()  # UIDs of the pods that use it

    def every_key(self) -> Iterator[str]:
        """Yield all keys by which others may name it (`gpu_names.key`)."""
        yield gpu_names.key(self.uuid)
        if self.index is not None:
            yield f"{self.node}/{self.index}"
        if self.pci is not None:
            yield f"{self.node}/{self.pci}"


class Rank(Struct, frozen=True):
    job: str
    rank: Any
    """Number from 0, or any other data from the presence."""
    node: str
    gpu: str | None = None


class JobsBySource(NamedTuple):
    """Jobs of a node or GPU: ``reported`` by themselves, ``observed`` by agents and schedulers."""

    reported: Jobs
    observed: Jobs


class AgentTopology(Struct, frozen=True, dict=True):
    """Nodes of connected agents, and their GPUs."""

    gpus_by_node: Mapping[str, tuple[Gpu, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, details_by_node: Mapping[str, Mapping[str, Any]]) -> AgentTopology:
        left = MOST_ENTRIES
        gpus_by_node = {}
        for node, details in details_by_node.items():
            gpus_by_node[node] = tuple(islice(_gpus_in(node, details), left))
            left -= len(gpus_by_node[node])
        return cls(gpus_by_node)

    def prepare(self) -> None:
        """Compute the lookup tables; 0.1 s for thousands of nodes."""
        _ = self.gpus_by_key, self.names.by_spelling, self.names.by_beginning, self.names.longer_names

    @cached_property
    def gpus_by_key(self) -> Mapping[str, Gpu]:
        """GPUs by all their keys, except those that several nodes report."""
        gpus = chain.from_iterable(self.gpus_by_node.values())
        return {key: gpu for gpu in gpus if gpu_names.key(gpu.uuid) not in self.contested for key in gpu.every_key()}

    @cached_property
    def names(self) -> NodeNames:
        return NodeNames(frozenset(self.gpus_by_node))

    def uuid_key(self, name: str, node: str) -> str:
        """Return the key of the UUID of GPU `name` (also an index or PCI address) on `node`, else of `name`."""
        key = gpu_names.key(name, node)
        gpu = self.gpus_by_key.get(key)
        return key if gpu is None else gpu_names.key(gpu.uuid)

    def name_of(self, node: str) -> str:
        """Return a node's agent name; `node` if none or several fit."""
        called = self.names.called(node) or self.names.related(node)
        return next(iter(called)) if len(called) == 1 else node

    @cached_property
    def contested(self) -> Mapping[str, frozenset[str]]:
        """Nodes by GPU key, for GPUs that several nodes report."""
        nodes: dict[str, str] = {}
        contested: dict[str, frozenset[str]] = {}
        for gpu in chain.from_iterable(self.gpus_by_node.values()):
            key = gpu_names.key(gpu.uuid)
            first = nodes.setdefault(key, gpu.node)
            if first != gpu.node:
                contested[key] = contested.get(key, frozenset({first})) | {gpu.node}
        return contested

    @cached_property
    def gpus_by_pod(self) -> Mapping[str, Sequence[Gpu]]:
        by_pod: dict[str, list[Gpu]] = {}
        for gpu in chain.from_iterable(self.gpus_by_node.values()):
            for uid in gpu.pods:
                by_pod.setdefault(uid, []).append(gpu)
        return by_pod


class JobTopology(Struct, frozen=True, dict=True):
    jobs_by_node: JobsByName = field(default_factory=dict)
    jobs_by_gpu: JobsByName = field(default_factory=dict)
    nodes_by_job: Mapping[str, frozenset[str]] = field(default_factory=dict)
    gpus_by_job: Mapping[str, int] = field(default_factory=dict)  # number
    unsure_nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By job, nodes of ranks whose GPU no agent knows: it may be any there."""
    keys_by_job: Mapping[str, Set[str]] = field(default_factory=dict)  # of GPUs (`gpu_names.key`)
    namespace_by_job: Mapping[str, str] = field(default_factory=dict)
    names_by_slurm_id: JobsByName = field(default_factory=dict)

    @classmethod
    def of(cls, details_by_job: Mapping[str, Mapping[str, Any]], agents: AgentTopology) -> JobTopology:
        """Read the jobs' presences. GPUs that an agent sees can be looked up by all names."""
        # Build the indexes here, where the caller has a thread: thousands of ranks take 0.1 s.
        by_node: dict[str, Jobs] = {}
        by_gpu: dict[str, Jobs] = {}
        nodes: dict[str, set[str]] = {}
        gpus: dict[str, set[str]] = {}
        unsure: dict[str, set[str]] = {}
        gpus_by_key = agents.gpus_by_key
        ranks = chain.from_iterable(ranks_in(job, details) for job, details in details_by_job.items())
        agent_names: dict[str, str] = {}
        alone = {job: frozenset({job}) for job in details_by_job}
        for reported in islice(ranks, MOST_ENTRIES):
            if reported.node not in agent_names:
                agent_names[reported.node] = agents.name_of(reported.node)
            node = agent_names[reported.node]
            rank = reported if node == reported.node else replace(reported, node=node)
            by_node[rank.node] = by_node.get(rank.node, _NO_JOBS) | alone[rank.job]
            nodes.setdefault(rank.job, set()).add(rank.node)
            if rank.gpu is None:
                unsure.setdefault(rank.job, set()).add(rank.node)
                continue
            key = gpu_names.key(rank.gpu, rank.node)
            if key not in gpus_by_key:
                unsure.setdefault(rank.job, set()).add(rank.node)
            gpus.setdefault(rank.job, set()).add(key)
            for each in {key, *(gpus_by_key[key].every_key() if key in gpus_by_key else ())}:
                # All GPUs of a job share its set: one set each would take 100 MB more.
                by_gpu[each] = by_gpu[each] | alone[rank.job] if each in by_gpu else alone[rank.job]
        counts = {job: len(keys) for job, keys in gpus.items()}
        pairs = ((job, _text(details.get("namespace"))) for job, details in details_by_job.items())
        namespaces = {job: namespace for job, namespace in pairs if namespace is not None}
        in_slurm: dict[str, set[str]] = {}
        for job, details in details_by_job.items():
            if (slurm_id := slurm_job_id(details)) is not None:
                in_slurm.setdefault(slurm_id, set()).add(job)
        return cls(by_node, by_gpu, _frozen(nodes), counts, _frozen(unsure), gpus, namespaces, _frozen(in_slurm))

    @cached_property
    def slurm_ids(self) -> Mapping[str, str]:
        return {job: slurm_id for slurm_id, jobs in self.names_by_slurm_id.items() for job in jobs}


class ClusterTopology(Struct, frozen=True, dict=True):
    """Nodes and pods in Kubernetes. Indexes are built on first use: pods change constantly, queries are rare."""

    nodes: Sequence[ClusterNode] = ()
    pods: Mapping[str, Pod] = field(default_factory=dict)
    answers: bool = True  # True if nodes and pods were listed and the API server still answers
    listed_names: NodeNames | None = None  # of `nodes`, computed once for many values; None: compute them
    silent_since: datetime | None = None  # last answer, else the server's start; None if it answers

    @cached_property
    def names(self) -> NodeNames:
        return self.listed_names if self.listed_names is not None else names_of(self.nodes)

    @cached_property
    def pods_by_address(self) -> Mapping[str, Pod | None]:
        """None for pods of several nodes. Ending pods count only without others."""
        pods: dict[str, Pod | None] = {}
        for pod in sorted(self.pods.values(), key=lambda pod: pod.is_ending):
            for address in pod.addresses:
                before = pods.setdefault(address, pod)
                if before is not None and before.node != pod.node and before.is_ending == pod.is_ending:
                    pods[address] = None
        return pods

    @cached_property
    def pods_by_full_name(self) -> Mapping[str, Pod]:
        return {str(pod): pod for pod in self.pods.values()}

    @cached_property
    def pods_by_name(self) -> Mapping[str, Pod | None]:
        """None for a name in several namespaces."""
        pods: dict[str, Pod | None] = {}
        for pod in self.pods.values():
            pods[pod.name] = None if pod.name in pods else pod
        return pods

    @cached_property
    def jobs_by_pod(self) -> JobsByName:
        return {str(pod): frozenset({pod.job}) for pod in self.pods.values() if pod.job is not None}

    @cached_property
    def jobs_by_node(self) -> JobsByName:
        jobs: dict[str, set[str]] = {}
        for pod in self.pods.values():
            if pod.job is not None:
                jobs.setdefault(pod.node, set()).add(pod.job)
        return {node: frozenset(on_node) for node, on_node in jobs.items()}

    @cached_property
    def pods_by_job(self) -> Mapping[str, Sequence[Pod]]:
        pods: dict[str, list[Pod]] = {}
        for pod in self.pods.values():
            if pod.job is not None:
                pods.setdefault(pod.job, []).append(pod)
        return pods


class SlurmTopology(Struct, frozen=True, dict=True):
    nodes: Sequence[ClusterNode] = ()
    # Jobs are named `slurm:<job ID>`, GPUs `<node>/<index>`.
    jobs_by_node: JobsByName = field(default_factory=dict)
    jobs_by_gpu: JobsByName = field(default_factory=dict)
    nodes_by_job: Mapping[str, frozenset[str]] = field(default_factory=dict)
    whole_by_id: Mapping[str, str] = field(default_factory=dict)
    """Job ID by its own ID, and by that of its tasks (``4711_3``) or components."""
    answers: bool = True  # False before the first reading and after a failed or overlong one
    names: NodeNames = NodeNames()  # without host names and addresses that several nodes share
    shared: Mapping[str, frozenset[str]] = field(default_factory=dict)  # nodes by such a name
    silent_since: datetime | None = None  # None while it answers, and during the first reading
    withheld: Withheld = Withheld()

    @classmethod
    def of(
        cls,
        nodes: Sequence[ClusterNode],
        by_node: Mapping[str, set[str]],
        by_gpu: Mapping[str, set[str]],
        whole_by_id: Mapping[str, str],
        before: SlurmTopology,  # value of the previous reading
    ) -> SlurmTopology:
        listed = names_of(nodes)
        aliases = {alias: whose for alias, whose in listed.aliases.items() if len(whose) == 1}
        names = NodeNames(listed.names, aliases)
        nodes_by_job: dict[str, set[str]] = {}
        for node, jobs in by_node.items():
            for job in jobs:
                nodes_by_job.setdefault(job, set()).add(node)
        names = before.names if names == before.names else names  # the same object keeps the cache of `known_nodes`
        shared = {spelled(alias): whose for alias, whose in listed.aliases.items() if len(whose) > 1}
        frozen = _frozen(by_node), _frozen(by_gpu), _frozen(nodes_by_job)
        return cls(nodes, *frozen, whole_by_id, names=names, shared=shared)

    def unanswered(self, since: datetime) -> SlurmTopology:
        return replace(self, answers=False, silent_since=since)

    def job_of(self, slurm_id: str) -> str:
        return f"{SLURM}{self.whole_by_id.get(slurm_id, slurm_id)}"

    @cached_property
    def unavailable(self) -> frozenset[str]:
        """Names of nodes on which no job starts."""
        return frozenset(node.name for node in self.nodes if node.unavailable)

    def ids_of(self, job: str) -> Collection[str]:
        """Return a job's ID and those of its parts."""
        return self._ids_by_job.get(job) or (job.removeprefix(SLURM),)

    @cached_property
    def _ids_by_job(self) -> Mapping[str, Sequence[str]]:
        ids: dict[str, list[str]] = {}
        for slurm_id in self.whole_by_id:
            ids.setdefault(self.job_of(slurm_id), []).append(slurm_id)
        return ids


NO_SLURM = SlurmTopology()


class Pool(Struct, frozen=True):
    """Nodes whose capacity counts together."""

    title: str
    nodes: frozenset[str]
    out: Mapping[str, str]
    """Reason by node out of service."""


class WrittenTopology(Struct, frozen=True, dict=True):
    """The inventory file (`domain.inventory`), which overrides the other sources."""

    nodes_by_address: Mapping[str, str] = field(default_factory=dict)
    jobs_by_pod: JobsByName = field(default_factory=dict)
    reported_by_node: JobsByName = field(default_factory=dict)
    reported_by_gpu: JobsByName = field(default_factory=dict)
    observed_by_node: JobsByName = field(default_factory=dict)
    observed_by_gpu: JobsByName = field(default_factory=dict)
    attributes_by_node: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    gpus_by_node: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def names(self) -> NodeNames:
        aliases = {spelled(address): frozenset({node}) for address, node in self.nodes_by_address.items()}
        named = (
            *(self.nodes_by_address.values(), self.reported_by_node, self.observed_by_node),
            *(self.attributes_by_node, self.gpus_by_node),
        )
        return NodeNames(frozenset(chain.from_iterable(named)), aliases)


class Topology(Struct, frozen=True, dict=True):
    """State of all sources at one moment. Unknown facts are empty, never guessed."""

    written: WrittenTopology = field(default_factory=WrittenTopology)
    jobs: JobTopology = field(default_factory=JobTopology)
    agents: AgentTopology = field(default_factory=AgentTopology)
    cluster: ClusterTopology = field(default_factory=ClusterTopology)
    verdicts: Mapping[str, VerdictsOnJob] = field(default_factory=dict)  # by job, of the last hour
    remembered: NodeNames = field(default_factory=NodeNames)  # nodes whose agents are known, lost ones too
    agents_answer: bool = True  # False if Redis has not delivered presences lately
    slurm: SlurmTopology = NO_SLURM
    slurm_ids: Mapping[str, str] = field(default_factory=dict)  # last reported Slurm ID, by job, of gone jobs too

    @cached_property
    def known(self) -> KnownNodes:
        return known_nodes(self.agents.names, self.cluster.names, self.slurm.names, self.written.names, self.remembered)

    @property
    def answers(self) -> bool:
        return self.agents_answer and self.cluster.answers and self.slurm.answers

    @property
    def knows_all_nodes(self) -> bool:
        """True if there is a node source, and all sources answer: an unknown node does not exist."""
        if not self.answers:
            return False
        known = self.known
        return bool(
            (known.agents.names or known.remembered.names or known.cluster.names or known.slurm.names)
            or (self.written.nodes_by_address or self.written.attributes_by_node)
        )

    @property
    def nodes(self) -> Set[str]:
        listed = {node.name for node in (*self.cluster.nodes, *self.slurm.nodes)}
        return self.agents.gpus_by_node.keys() | listed | self.written.attributes_by_node.keys()

    @cached_property
    def attributes_by_node(self) -> Mapping[str, Mapping[str, str]]:
        """By preferred name. The inventory overrides Kubernetes, which overrides Slurm."""
        attributes: dict[str, dict[str, str]] = {node: {} for node in self.agents.gpus_by_node}
        for node in (*self.slurm.nodes, *self.cluster.nodes):
            attributes.setdefault(self.known.name_of(node.name), {}).update(node.attributes)
        for name in self.written.names.names:
            attributes.setdefault(self.known.name_of(name), {}).update(self.written.attributes_by_node.get(name, {}))
        return attributes

    @cached_property
    def pools(self) -> Sequence[Pool]:
        """Schedulers' pools; without schedulers, one of all known nodes."""
        members: dict[str, list[str]] = {}
        for whole, source in (("the Kubernetes cluster", self.cluster), ("Slurm", self.slurm)):
            for node in source.nodes:
                for title in [f"partition {name}" for name in node.pools] or [whole]:
                    members.setdefault(title, []).append(self.known.name_of(node.name))
        if not members:
            members["the cluster"] = [self.known.name_of(node) for node in self.nodes]
        return [self.pool(title, nodes) for title, nodes in members.items()]

    def pool(self, title: str, nodes: Collection[str]) -> Pool:
        return Pool(title, frozenset(nodes), self._out_of_service(nodes))

    def _out_of_service(self, nodes: Iterable[str]) -> dict[str, str]:
        # Unknown readiness counts as in service: nothing could start otherwise.
        out: dict[str, str] = {}
        for node in nodes:
            why = self._scheduled.get(node)
            if why is None and node in self._silent:
                why = "its agent is silent"
            elif why is None and node not in self.attributes_by_node:
                why = "it is gone"
            if why:
                out[node] = why
        return out

    @cached_property
    def _scheduled(self) -> Mapping[str, str]:
        """Reason out of service by node of a scheduler; empty if in service."""
        states: dict[str, str] = {}
        for title, source in (("Slurm: ", self.slurm), ("", self.cluster)):
            for node in source.nodes:
                name = self.known.name_of(node.name)
                states[name] = f"{title}{node.unavailable}" if node.unavailable else states.get(name, "")
        return states

    @cached_property
    def _silent(self) -> Set[str]:
        return self.known.remembered.names - self.known.agents.names

    def gpus_on(self, node: str) -> tuple[str, ...] | None:
        """Return the GPU UUIDs that a node's agent reports, else the inventory's names. None if unknown."""
        reported = self.agents.gpus_by_node.get(node)
        return self.written.gpus_by_node.get(node) if reported is None else tuple(gpu.uuid for gpu in reported)

    def node_at(self, address: str) -> str | None:
        nodes = self.known.find(address)
        if not nodes and is_address(address):
            pod = self.cluster.pods_by_address.get(address)
            nodes = frozenset() if pod is None else frozenset({self.known.name_of(pod.node)})
        return next(iter(nodes)) if len(nodes) == 1 else None

    def jobs_of_pod(self, pod: str) -> Jobs:
        return _first(pod, self.written.jobs_by_pod, self.cluster.jobs_by_pod)

    def jobs_on_node(self, node: str) -> JobsBySource:
        observed = self.written.observed_by_node.get(node)  # None: not in the inventory; empty: no job is there
        return JobsBySource(
            _first(node, self.written.reported_by_node, self.jobs.jobs_by_node),
            self._jobs_seen_at(node) if observed is None else observed,
        )

    def _jobs_seen_at(self, node: str) -> Jobs:
        by_pods = self.cluster.jobs_by_node.get(self.listed_as(node, self.cluster.names), _NO_JOBS)
        return by_pods | self._own_names(self.slurm.jobs_by_node.get(self.listed_as(node, self.slurm.names), _NO_JOBS))

    def _own_names(self, slurm_jobs: Jobs) -> Jobs:
        return frozenset(chain.from_iterable(self._names_of_slurm_job(job) or {job} for job in slurm_jobs))

    def _names_of_slurm_job(self, job: str) -> Jobs:  # of connected jobs
        names = self.jobs.names_by_slurm_id
        return frozenset(chain.from_iterable(names.get(slurm_id, _NO_JOBS) for slurm_id in self.slurm.ids_of(job)))

    def other_names_of_job(self, job: str) -> Jobs:
        """Return the names by which a Slurm job is connected; of an SDK job, its name in Slurm."""
        if job.startswith(SLURM):
            return self._names_of_slurm_job(job) - {job}
        slurm_id = self._slurm_id_of(job)
        return _NO_JOBS if slurm_id is None else frozenset({self.slurm.job_of(slurm_id)})

    def may_be_same_job(self, job: str, other: str) -> bool:
        """Return whether an SDK's and a Slurm's name may be of one job. True if unknown."""
        own, in_slurm = (other, job) if job.startswith(SLURM) else (job, other)
        slurm_id = self._slurm_id_of(own)
        return slurm_id is None or not self.slurm.answers or self.slurm.job_of(slurm_id) == in_slurm

    def _slurm_id_of(self, job: str) -> str | None:
        return self.jobs.slurm_ids.get(job) or self.slurm_ids.get(job)

    def nodes_of_job(self, job: str) -> frozenset[str]:
        """Return the known nodes of the job's ranks; empty if one is in an unknown place."""
        nodes = self._nodes_by_job.get(job)
        if nodes is None:
            nodes = self._nodes_by_job[job] = self._nodes_named(self.jobs.nodes_by_job.get(job, _NO_JOBS))
        return nodes

    @cached_property
    def _nodes_by_job(self) -> dict[str, frozenset[str]]:
        return {}

    def _nodes_named(self, names: frozenset[str]) -> frozenset[str]:
        nodes: set[str] = set()
        for name in names:
            node = self.node_named(name)
            if node is None:
                return frozenset()
            nodes.add(node)
        return frozenset(nodes)

    def node_named(self, name: str) -> str | None:
        """Return the node of a name that ranks report: of a node, or of their pod."""
        nodes = self.known.find(name)
        pod = self.cluster.pods_by_name.get(name) if not nodes else None
        if pod is not None:
            return self.known.name_of(pod.node)
        return next(iter(nodes)) if len(nodes) == 1 else None

    def listed_as(self, node: str, names: NodeNames) -> str:
        """Return a source's name for a node, which may differ from its agent's."""
        if node in names.names:
            return node
        called = [name for name in names.called(node) or names.related(node) if self.known.name_of(name) == node]
        return called[0] if len(called) == 1 else node

    def jobs_on_gpu(self, key: str) -> JobsBySource:
        reported = _first(key, self.written.reported_by_gpu, self.jobs.jobs_by_gpu)
        observed = self.written.observed_by_gpu.get(key)
        return JobsBySource(reported, self._jobs_seen_on(key) if observed is None else observed)

    def _jobs_seen_on(self, key: str) -> Jobs:
        gpu = self.agents.gpus_by_key.get(key)
        pods = [self.cluster.pods.get(uid) for uid in gpu.pods] if gpu is not None else []
        by_pods = frozenset(pod.job for pod in pods if pod is not None and pod.job is not None)
        return by_pods or self._own_names(self._slurm_jobs_on(key, gpu))

    def _slurm_jobs_on(self, key: str, gpu: Gpu | None) -> Jobs:
        if gpu is not None:
            node, index = gpu.node, str(gpu.index)
        else:
            node, _, index = key.rpartition("/")
        return self.slurm.jobs_by_gpu.get(f"{self.listed_as(node, self.slurm.names)}/{index}", _NO_JOBS)


def names_of(nodes: Sequence[ClusterNode]) -> NodeNames:
    aliases: dict[str, frozenset[str]] = {}
    for node in nodes:
        for address in node.addresses:
            if address != node.name:
                aliases[address] = aliases.get(address, frozenset()) | {node.name}
    return NodeNames(frozenset(node.name for node in nodes), aliases)


def _frozen(sets: Mapping[str, set[str]]) -> Mapping[str, frozenset[str]]:
    return {key: frozenset(values) for key, values in sets.items()}


def slurm_job_id(details: Mapping[str, Any]) -> str | None:
    slurm = details.get("slurm")
    job_id = slurm.get("job_id") if isinstance(slurm, Mapping) else None
    return job_id if isinstance(job_id, str) and job_id.isascii() and job_id.isdecimal() else None


def ranks_in(job: str, details: Mapping[str, Any]) -> list[Rank]:
    return [
        Rank(job, entry.get("rank"), node, _text(entry.get("gpu")))
        for entry in _mappings(details.get("placement"))
        if (node := _text(entry.get("node"))) is not None
    ]


def _gpus_in(node: str, details: Mapping[str, Any]) -> Iterator[Gpu]:
    for entry in _mappings(details.get("gpus")):
        uuid, index, pods = _text(entry.get("uuid")), entry.get("index"), entry.get("pods")
        if uuid is None:
            continue
        pci = gpu_names.normal_pci(_text(entry.get("pci_bus_id")) or "")
        number = index if isinstance(index, int) and not isinstance(index, bool) and index >= 0 else None
        uids = tuple(uid for uid in pods if isinstance(uid, str)) if isinstance(pods, list) else ()
        yield Gpu(node, uuid, number, pci, uids)


def _first(name: str, *sources: JobsByName) -> Jobs:  # of the first source that has the name
    return next((source[name] for source in sources if name in source), _NO_JOBS)


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
