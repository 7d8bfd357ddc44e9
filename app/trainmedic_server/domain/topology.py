"""Jobs, ranks, pods, nodes, GPUs and addresses, and which belongs to which: `Topology`, one frozen value.

Four sources know a part each, and none overwrites another: the jobs report their ranks (`JobTopology`), the agents
see processes of pods on their GPUs (`AgentTopology`), the cluster lists nodes and pods (`ClusterTopology`), and a
person may write down what none of them can know (`WrittenTopology`). A `Topology` returns the answers of the
sources side by side where they may differ; the caller decides between them.

Presences, which `AgentTopology.of` and `JobTopology.of` read, are written by anybody who can write to Redis: what
makes no sense in them is passed over.

Pure. Not here: finding a target by its labels (``target``, ``job_lookup``), reading an inventory (``inventory``),
keeping the value up to date (``engine.topology_watch``, ``adapters.kubernetes_topology``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_core import gpu_names
from trainmedic_server.domain.job_verdict import VerdictsOnJob
from trainmedic_server.domain.node_names import KnownNodes, NodeNames, is_address, known_nodes, spelled

MOST_ENTRIES = 200_000
"""Ranks or GPUs that are taken in at most, whatever is in Redis: they are some tens of MB."""

Jobs: TypeAlias = frozenset[str]
JobsByName: TypeAlias = Mapping[str, Jobs]
"""The jobs that use a node, a GPU (by `gpu_names.key`), or a pod (by ``<namespace>/<name>``)."""

_NO_JOBS: Jobs = frozenset()


class ClusterNode(Struct, frozen=True):
    """A node, as the cluster knows it."""

    name: str
    addresses: tuple[str, ...]
    """IP addresses and host names, as its status lists them."""


class Pod(Struct, frozen=True):
    """A pod that has a node and has not ended."""

    uid: str
    namespace: str
    name: str
    node: str
    job: str | None
    """The job that its labels name; None where they name none."""
    addresses: tuple[str, ...] = ()
    """Its IP addresses; those of its node where it is in the node's network."""
    gpus: int = 0
    """How many GPUs it asks for; at least 1 where it asks for shares of one."""
    is_per_node: bool | None = None
    """True if each node has one like it, as of a DaemonSet. None if the pod has no owner."""
    is_ending: bool = False
    """True if it is being deleted. Its address may be another pod's by now."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Gpu(Struct, frozen=True):
    """A GPU that answers its agent."""

    node: str
    uuid: str
    index: int | None = None
    """Its number on the node, from 0."""
    pci: str | None = None
    """Its PCI address, as `gpu_names.normal_pci` writes it."""
    pods: tuple[str, ...] = ()
    """The uids of the pods that have a process on it."""

    def names(self) -> Iterator[str]:
        """Every key by which it is looked up (`gpu_names.key`)."""
        yield gpu_names.key(self.uuid)
        if self.index is not None:
            yield f"{self.node}/{self.index}"
        if self.pci is not None:
            yield f"{self.node}/{self.pci}"


class Rank(Struct, frozen=True):
    """A rank of a job, and where it reports that it runs."""

    job: str
    rank: Any
    """Its number, from 0; anything else where the presence has something else."""
    node: str
    gpu: str | None = None
    """As the rank names it: a UUID, as a rule."""


class JobsBySource(NamedTuple):
    """The jobs that use something, as two sources know it. Their names may differ: see ``job_lookup``."""

    reported: Jobs
    """What the jobs report themselves."""
    observed: Jobs
    """What agents and the cluster know."""


class AgentTopology(Struct, frozen=True, dict=True):
    """What the agents see. A node whose agent sees no GPU is in it too: its agent is connected."""

    gpus_by_node: Mapping[str, tuple[Gpu, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, details_by_node: Mapping[str, Mapping[str, Any]]) -> AgentTopology:
        """What the presences of the agents say, given by the agents' nodes."""
        left = MOST_ENTRIES
        gpus_by_node = {}
        for node, details in details_by_node.items():
            gpus_by_node[node] = tuple(islice(_gpus_in(node, details), left))
            left -= len(gpus_by_node[node])
        return cls(gpus_by_node)

    def prepare(self) -> None:
        """Compute the look-up tables of deliveries. With thousands of nodes this takes a tenth of a second."""
        _ = self.gpus_by_key, self.names.by_spelling, self.names.by_beginning, self.names.longer_names

    @cached_property
    def gpus_by_key(self) -> Mapping[str, Gpu]:
        """By each of a GPU's keys. One that several nodes list is found by none: nobody knows where it is."""
        gpus = chain.from_iterable(self.gpus_by_node.values())
        return {key: gpu for gpu in gpus if gpu_names.key(gpu.uuid) not in self.contested for key in gpu.names()}

    @cached_property
    def names(self) -> NodeNames:
        """Names of the nodes that have an agent."""
        return NodeNames(frozenset(self.gpus_by_node))

    def card_of(self, name: str, node: str) -> str:
        """Return the key of the GPU with this name on the node. If an agent has the GPU, all its names give the same
        key."""
        key = gpu_names.key(name, node)
        gpu = self.gpus_by_key.get(key)
        return key if gpu is None else gpu_names.key(gpu.uuid)

    def name_of(self, node: str) -> str:
        """Return the name of the agent on a node, if one has this name for it; otherwise the given name."""
        called = self.names.called(node) or self.names.related(node)
        return next(iter(called)) if len(called) == 1 else node

    @cached_property
    def contested(self) -> Mapping[str, frozenset[str]]:
        """The nodes that list a GPU, by its key, where these are several."""
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
        """The GPUs on which a pod has a process, by the pod's uid."""
        by_pod: dict[str, list[Gpu]] = {}
        for gpu in chain.from_iterable(self.gpus_by_node.values()):
            for uid in gpu.pods:
                by_pod.setdefault(uid, []).append(gpu)
        return by_pod


class JobTopology(Struct, frozen=True):
    """What the jobs report: which of them have ranks on a node or a GPU."""

    jobs_by_node: JobsByName = field(default_factory=dict)
    jobs_by_gpu: JobsByName = field(default_factory=dict)
    nodes_by_job: Mapping[str, frozenset[str]] = field(default_factory=dict)
    gpus_by_job: Mapping[str, int] = field(default_factory=dict)
    """How many GPUs each job reports."""
    unsure_nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Nodes, by job, on which a rank names no GPU that an agent reports. It may use any GPU there."""
    keys_by_job: Mapping[str, Set[str]] = field(default_factory=dict)
    """GPUs that each job reports, by the key under which it names them."""
    namespace_by_job: Mapping[str, str] = field(default_factory=dict)
    """Kubernetes namespace that each job reports."""

    @classmethod
    def of(cls, details_by_job: Mapping[str, Mapping[str, Any]], agents: AgentTopology) -> JobTopology:
        """What the presences of the jobs say. A GPU that an agent sees as well is found by each of its names."""
        # Both indexes are made here and not when first asked for: for thousands of ranks that takes a tenth of
        # a second, for which the caller has a thread.
        by_node: dict[str, Jobs] = {}
        by_gpu: dict[str, Jobs] = {}
        nodes: dict[str, set[str]] = {}
        gpus: dict[str, set[str]] = {}
        unsure: dict[str, set[str]] = {}
        gpus_by_key = agents.gpus_by_key
        ranks = chain.from_iterable(ranks_in(job, details) for job, details in details_by_job.items())
        names: dict[str, str] = {}
        """Return the agents' names of the nodes that ranks report."""
        alone = {job: frozenset({job}) for job in details_by_job}
        for reported in islice(ranks, MOST_ENTRIES):
            if reported.node not in names:
                names[reported.node] = agents.name_of(reported.node)
            node = names[reported.node]
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
            for name in {key, *(gpus_by_key[key].names() if key in gpus_by_key else ())}:
                # Most GPUs have one job, and all GPUs of a job share its set: a set each would be 100 MB more.
                by_gpu[name] = by_gpu[name] | alone[rank.job] if name in by_gpu else alone[rank.job]
        counts = {job: len(keys) for job, keys in gpus.items()}
        pairs = ((job, _text(details.get("namespace"))) for job, details in details_by_job.items())
        namespaces = {job: namespace for job, namespace in pairs if namespace is not None}
        return cls(by_node, by_gpu, _frozen(nodes), counts, _frozen(unsure), gpus, namespaces)


class ClusterTopology(Struct, frozen=True, dict=True):
    """What the cluster knows. Pods of a large cluster change all the time, and most values are asked nothing or one
    thing: so each index is made when it is first asked for."""

    nodes: Sequence[ClusterNode] = ()
    pods: Mapping[str, Pod] = field(default_factory=dict)
    """By uid."""
    answers: bool = True
    """True if its nodes and pods were listed, and the API server has answered since."""
    listed_names: NodeNames | None = None
    """Names of `nodes`, if they were computed before. Nodes change more rarely than pods."""

    @cached_property
    def names(self) -> NodeNames:
        """Names and addresses of the nodes."""
        return self.listed_names if self.listed_names is not None else names_of(self.nodes)

    @cached_property
    def nodes_by_address(self) -> Mapping[str, str]:
        """Nodes by address. A pod in its node's network has the node's address, which is then the node's. Addresses of
        several nodes are excluded: one of two pods has ended, and nothing says which."""
        of_pods = {address: pod.node for address, pod in self.pods_by_address.items() if pod is not None}
        of_nodes = {alias: next(iter(whose)) for alias, whose in self.names.aliases.items() if len(whose) == 1}
        return {address: node for address, node in of_pods.items() if address not in self.names.aliases} | of_nodes

    @cached_property
    def pods_by_address(self) -> Mapping[str, Pod | None]:
        """Pods by address. None if pods of several nodes have it and none of them is ending."""
        pods: dict[str, Pod | None] = {}
        for pod in sorted(self.pods.values(), key=lambda pod: pod.is_ending):
            for address in pod.addresses:
                before = pods.setdefault(address, pod)
                if before is not None and before.node != pod.node and before.is_ending == pod.is_ending:
                    pods[address] = None
        return pods

    @cached_property
    def pods_by_full_name(self) -> Mapping[str, Pod]:
        """Pods by ``<namespace>/<name>``."""
        return {str(pod): pod for pod in self.pods.values()}

    @cached_property
    def pods_by_name(self) -> Mapping[str, Pod | None]:
        """Pods by the name alone. None if two namespaces have one of the name."""
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
        """The pods whose labels name a job. They are of several namespaces where jobs in these have the same name."""
        pods: dict[str, list[Pod]] = {}
        for pod in self.pods.values():
            if pod.job is not None:
                pods.setdefault(pod.job, []).append(pod)
        return pods


class WrittenTopology(Struct, frozen=True, dict=True):
    """What a person has written down, which ``inventory`` reads. It goes before what the other sources know."""

    nodes_by_address: Mapping[str, str] = field(default_factory=dict)
    jobs_by_pod: JobsByName = field(default_factory=dict)
    reported_by_node: JobsByName = field(default_factory=dict)
    """In place of what the jobs report."""
    reported_by_gpu: JobsByName = field(default_factory=dict)
    observed_by_node: JobsByName = field(default_factory=dict)
    """In place of what the cluster knows."""
    observed_by_gpu: JobsByName = field(default_factory=dict)
    """In place of what the agents see."""

    @cached_property
    def names(self) -> NodeNames:
        """Nodes in the inventory, with their addresses."""
        aliases = {spelled(address): frozenset({node}) for address, node in self.nodes_by_address.items()}
        named = (self.nodes_by_address.values(), self.reported_by_node, self.observed_by_node)
        return NodeNames(frozenset(chain.from_iterable(named)), aliases)


class Topology(Struct, frozen=True, dict=True):
    """All that is known at one moment. Where a source knows nothing the answer is empty, never a guess."""

    written: WrittenTopology = field(default_factory=WrittenTopology)
    jobs: JobTopology = field(default_factory=JobTopology)
    agents: AgentTopology = field(default_factory=AgentTopology)
    cluster: ClusterTopology = field(default_factory=ClusterTopology)
    verdicts: Mapping[str, VerdictsOnJob] = field(default_factory=dict)
    """By job, for those that failed within the last hour, who began it and why."""
    remembered: NodeNames = field(default_factory=NodeNames)
    """Nodes whose agents were connected within the retention."""
    agents_answer: bool = True
    """True if it is known which agents are connected: not before the first reading, nor long after the last."""

    @cached_property
    def known(self) -> KnownNodes:
        """Nodes that any source knows."""
        return known_nodes(self.agents.names, self.cluster.names, self.written.names, self.remembered)

    @property
    def knows_all_nodes(self) -> bool:
        """True if a node that no source knows does not exist: there is a source of nodes, and none fails to answer."""
        if not (self.agents_answer and self.cluster.answers):
            return False
        known = self.known
        return bool(
            known.agents.names or known.remembered.names or known.cluster.names or self.written.nodes_by_address
        )

    @property
    def nodes(self) -> Set[str]:
        """The names of the nodes that the cluster lists or that have an agent."""
        return self.agents.gpus_by_node.keys() | {node.name for node in self.cluster.nodes}

    def node_at(self, address: str) -> str | None:
        """The name of the node with this IP address, or with a pod that has it."""
        nodes = self.known.find(address)
        if not nodes and is_address(address):
            pod = self.cluster.pods_by_address.get(address)
            nodes = frozenset() if pod is None else frozenset({self.known.name_of(pod.node)})
        return next(iter(nodes)) if len(nodes) == 1 else None

    def jobs_of_pod(self, pod: str) -> Jobs:
        """The jobs to which the pod ``<namespace>/<name>`` belongs."""
        return _first(pod, self.written.jobs_by_pod, self.cluster.jobs_by_pod)

    def jobs_on_node(self, node: str) -> JobsBySource:
        """The jobs with ranks or pods on the node of this name."""
        observed = self.written.observed_by_node.get(node)
        return JobsBySource(
            _first(node, self.written.reported_by_node, self.jobs.jobs_by_node),
            self.cluster.jobs_by_node.get(self._listed_as(node), _NO_JOBS) if observed is None else observed,
        )

    def nodes_of_job(self, job: str) -> frozenset[str]:
        """Return the known nodes that the job's ranks report. Empty if a rank is in an unknown place."""
        nodes = self._nodes_by_job.get(job)
        if nodes is None:
            nodes = self._nodes_by_job[job] = self._places(self.jobs.nodes_by_job.get(job, _NO_JOBS))
        return nodes

    @cached_property
    def _nodes_by_job(self) -> dict[str, frozenset[str]]:
        """Earlier results: a job can have thousands of ranks, and many alerts."""
        return {}

    def _places(self, names: frozenset[str]) -> frozenset[str]:
        nodes: set[str] = set()
        for name in names:
            places = self.known.find(name)
            pod = self.cluster.pods_by_name.get(name) if not places else None
            if pod is not None:
                places = frozenset({self.known.name_of(pod.node)})
            if len(places) != 1:
                return frozenset()
            nodes |= places
        return frozenset(nodes)

    def _listed_as(self, node: str) -> str:
        """Return the cluster's name for a node. Its agent's name may differ."""
        names = self.cluster.names
        if node in names.names:
            return node
        called = [name for name in names.called(node) or names.related(node) if self.known.name_of(name) == node]
        return called[0] if len(called) == 1 else node

    def jobs_on_gpu(self, key: str) -> JobsBySource:
        """The jobs with ranks, or with pods that have a process, on the GPU of this key (`gpu_names.key`)."""
        reported = _first(key, self.written.reported_by_gpu, self.jobs.jobs_by_gpu)
        observed = self.written.observed_by_gpu.get(key)
        return JobsBySource(reported, self._jobs_seen_on(key) if observed is None else observed)

    def _jobs_seen_on(self, key: str) -> Jobs:
        gpu = self.agents.gpus_by_key.get(key)
        pods = [self.cluster.pods.get(uid) for uid in gpu.pods] if gpu is not None else []
        return frozenset(pod.job for pod in pods if pod is not None and pod.job is not None)


def names_of(nodes: Sequence[ClusterNode]) -> NodeNames:
    """Return the names of the nodes of a cluster, with their addresses and host names."""
    aliases: dict[str, frozenset[str]] = {}
    for node in nodes:
        for address in node.addresses:
            if address != node.name:
                aliases[address] = aliases.get(address, frozenset()) | {node.name}
    return NodeNames(frozenset(node.name for node in nodes), aliases)


def _frozen(sets: Mapping[str, set[str]]) -> Mapping[str, frozenset[str]]:
    return {key: frozenset(values) for key, values in sets.items()}


def ranks_in(job: str, details: Mapping[str, Any]) -> list[Rank]:
    """The ranks that a job's presence places; an entry without a node places none."""
    return [
        Rank(job, entry.get("rank"), node, _text(entry.get("gpu")))
        for entry in _mappings(details.get("placement"))
        if (node := _text(entry.get("node"))) is not None
    ]


def _gpus_in(node: str, details: Mapping[str, Any]) -> Iterator[Gpu]:
    """The GPUs that an agent's presence lists."""
    for entry in _mappings(details.get("gpus")):
        uuid, index, pods = _text(entry.get("uuid")), entry.get("index"), entry.get("pods")
        if uuid is None:
            continue
        pci = gpu_names.normal_pci(_text(entry.get("pci_bus_id")) or "")
        number = index if isinstance(index, int) and not isinstance(index, bool) and index >= 0 else None
        uids = tuple(uid for uid in pods if isinstance(uid, str)) if isinstance(pods, list) else ()
        yield Gpu(node, uuid, number, pci, uids)


def _first(name: str, *sources: JobsByName) -> Jobs:
    """What the first source says that has the name."""
    return next((source[name] for source in sources if name in source), _NO_JOBS)


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
