"""The node that an alert is about, from all labels that name one.

Names are resolved among all sources of nodes, then compared. In this order:

1. A GPU UUID that one agent reports is proof.
2. The subject's own labels: ``node`` and similar, ``exported_instance``, host lists. Different known nodes are
   ambiguous. An unknown name is not replaced by a less trusted label, which may be the exporter's host.
3. The exporter's node, if the exporter measures its own, and the node of a measured pod. No other label may name
   another machine then.
"""

# In tests/unit/domain: test_node_evidence, test_target, test_labels_of_strangers (public rules), test_any_labels.

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec import Struct

from trainmedic_core import gpu_names
from trainmedic_core.once import once
from trainmedic_core.target_labels import HOST_LABELS, NODE_LABELS, UUID_LABELS
from trainmedic_server.domain import exporters, host_lists, own_source
from trainmedic_server.domain.alert_labels import EXPORTED, AlertLabels, Label
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.node_names import Nodes, is_address, is_same_spelling, spelled
from trainmedic_server.domain.topology import Pod, Topology

_HOST_AND_PORT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:\d+)?")
_HOST_AND_PORT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*:[a-z0-9-]{1,15}")  # host:port name, of managed collectors
LIST_LABELS = ("nodes", "nodelist", "node_list", "hostlist", "nodeset", "slurm_nodelist")  # may name several nodes
UNKNOWN = "is no node that is known"  # part of a reason, by which `message_texts` recognises it
_SHOWN = 5
_MOST_LOOKED_UP = 20  # hosts of a list; a longer one can name no single node
_NONE: Nodes = frozenset()
_MACHINE = re.compile(  # label names that ask for a machine
    "(exported_)?(.*_)?(host|hostname|host_name|fqdn|machine|server|nodeid|domain|guest|sysname|vm|vm_?name)"
)
_ARCHITECTURE = re.compile("x86_64|amd64|i[3-6]86|aarch64.*|arm.*|ppc64.*|s390x|riscv64")  # ``machine`` of uname
# Their values are no machines that an alert is about, or are judged elsewhere.
_NO_RIVALS = re.compile(
    "alertname|severity|alertgroup|(exported_)?(instance|job|namespace|pod|container|service|uuid|cluster)|monitor|ruler|"
    "receive|(.*_)?replica|.*prometheus.*|trainmedic.*"
)
_LONGEST_NAME = 255  # characters of a label's name
_MOST_RIVALS = 50  # labels that are looked up
_HOST_IN_TEXT = re.compile(r"(?:https?://)?([A-Za-z0-9][A-Za-z0-9._-]{0,252})(?::[0-9]+)?(?:[ /].*)?", re.DOTALL)


class Naming(Struct, frozen=True):
    label: Label
    nodes: Nodes  # empty if the name is unknown, several if ambiguous
    host: str = ""  # name or address in the label, without port

    def described(self, topology: Topology) -> str:
        if not self.nodes:
            if not (counts := topology.known.counts()):
                return f"{self.label} names it; neither agents, cluster nor inventory list any node"
            return f"{self.label} {UNKNOWN} ({counts})"
        nodes = " or ".join(sorted(self.nodes))
        by = topology.known.who_knows(min(self.nodes))
        return f"{self.label} is {nodes} (known by {by})"


class NodeEvidence:
    def __init__(self, labels: AlertLabels, topology: Topology) -> None:
        self._labels = labels
        self._topology = topology

    def node(self) -> str | Unresolved:
        """Return the known node, an unknown name as spelled, or why neither is certain."""
        listed = self._listed
        if isinstance(listed, Unresolved):
            return listed
        by_gpu = self.by_gpu
        if isinstance(by_gpu, Unresolved):
            return by_gpu
        if by_gpu is not None:
            return self._agreeing(by_gpu)
        known_namings = [naming for naming in self.subjects if naming.nodes]
        if known_namings:
            return self._of_known(known_namings)
        return self._unknown() if self.subjects else self._undisputed(self._of_exporter())

    def reasons(self) -> list[str]:
        """Return the evidence as sentences for people."""
        reasons = []
        if isinstance(self.by_gpu, str):
            label = next(iter(self._labels.of(UUID_LABELS)))
            reasons.append(f"{label} is a GPU of {self.by_gpu} (reported by its agent)")
        namings = [*self.subjects, *([self._instance] if self._instance is not None else [])]
        if not self.subjects and not self.by_gpu and isinstance(place := self._of_exporter(), str):
            namings += islice(self._rivals(place), _SHOWN)
        reasons += [naming.described(self._topology) for naming in namings]
        for pod, label in self._exporter_pods(is_behind=bool(self._labels.under("exported_instance"))):
            reasons.append(f"{label} is pod {pod} on {pod.node} (known by the cluster)")
        if self.is_of_central:
            reasons.append("the exporter measures other machines, so where it runs does not count")
        elif exporters.is_unknown(self._labels) and not self._is_of_own_node:
            reasons.append("the exporter may measure other machines, so where it runs does not count")
        return list(dict.fromkeys(reasons))

    def known_subject(self) -> Nodes:
        """Return the nodes on which the subject's labels agree."""
        if isinstance(self.by_gpu, Unresolved) or isinstance(self._listed, Unresolved):
            return _NONE
        if self.by_gpu is not None:
            return frozenset({self.by_gpu})
        return _common([naming for naming in self.subjects if naming.nodes])

    def unknown_subject(self) -> str | None:
        """Return the unknown name; None if the subject's labels name a known node, or none."""
        if isinstance(self._listed, Unresolved) or self.by_gpu is not None:
            return None
        return self.subjects[0].host if self.subjects and not any(each.nodes for each in self.subjects) else None

    @once
    def by_gpu(self) -> str | Unresolved | None:
        """Node whose agent reports the GPU's UUID; None if none does."""
        labels = self._labels.of(UUID_LABELS)
        if not labels:
            return None
        agents, nodes = self._topology.agents, set[str]()
        for label in labels:
            key = gpu_names.uuid_key(label.value)
            if key in agents.contested:
                several = ", ".join(sorted(agents.contested[key]))
                return Unresolved("target_ambiguous", f"{label} is reported by the agents of several nodes: {several}")
            gpu = agents.gpus_by_key.get(key)
            if gpu is not None:
                nodes.add(gpu.node)
        if len(nodes) > 1:
            named = " and ".join(map(str, self._labels.of(UUID_LABELS)))
            return Unresolved("target_ambiguous", f"{named} are GPUs of several nodes: {', '.join(sorted(nodes))}")
        return self._topology.known.name_of(nodes.pop()) if nodes else None

    @once
    def subjects(self) -> Sequence[Naming]:
        """Namings by labels of the alert's subject, not of its exporter."""
        namings = [naming for label in self._naming_labels() if (naming := self._naming(label)) is not None]
        if self._labels.of(HOST_LABELS):
            namings += self._named_if_known()
        return namings

    def _naming_labels(self) -> Iterator[Label]:
        for label in self._labels.of(NODE_LABELS):
            if label not in self._listings:
                yield label
        yield from self._labels.under("exported_instance")
        if isinstance(self._listed, Label):
            yield self._listed

    def _named_if_known(self) -> Iterator[Naming]:
        if self._is_of_lines:
            return
        for label in self._labels.of(HOST_LABELS):
            host = host_of(label.value)
            # A scrape adds the address of the exporter's machine.
            if is_address(host) and self._is_relayed:
                continue
            if nodes := self._topology.known.find(host):
                yield Naming(label, nodes, host)

    def _naming(self, label: Label) -> Naming | None:
        host = host_of(label.value) if _HOST_AND_PORT.fullmatch(label.value) or "[" in label.value else label.value
        if _HOST_AND_PORT_NAME.fullmatch(host) and self._is_known(host_of(host)):
            host = host_of(host)
        nodes = self._topology.known.find(host)
        of_instance = label.name.lower() == "exported_instance"
        if of_instance and exporters.is_central(self._labels, exported=True):
            return None  # where an exporter runs that measures other machines
        if not nodes and of_instance and (pod := self._pod_at(host) or self._pod_of(host)) is not None:
            is_own = exporters.is_on_its_node(pod, self._labels, exported=True)
            nodes = frozenset({self._topology.known.name_of(pod.node)}) if is_own else _NONE
        elif not nodes and self._pod_of(host) is not None:
            return None  # A pod name is the exporter's location: see `_of_exporter`.
        if not nodes and exporters.names_an_exporter(host, self._labels):
            return None  # no node's name
        return Naming(label, nodes, host)

    def _is_known(self, host: str) -> bool:
        return bool(self._topology.known.find(host)) or self._pod_of(host) is not None

    @once
    def _is_of_lines(self) -> bool:
        """True for alerts of log lines, in which only the server's target labels are certain."""
        return self._labels.value(own_source.SOURCE) == own_source.LOG

    # --- several nodes in one label ---------------------------------------------------------------------

    @once
    def _listings(self) -> Sequence[Label]:  # labels with a host list
        of_exporter = (*self._labels.under("exported_instance"), *self._labels.under("instance"))
        named = (*self._labels.of(NODE_LABELS), *of_exporter)
        in_names = [label for label in named if host_lists.is_host_list(label.value)]
        listing = () if self._is_of_lines else self._labels.of(LIST_LABELS)
        return [*(label for label in listing if not label.value.isdigit()), *in_names]

    @once
    def _listed(self) -> Label | Unresolved | None:
        """Label with the one node of all lists; None without lists."""
        hosts: dict[str, Label] = {}
        for label in self._listings:
            try:
                hosts |= dict.fromkeys(host_lists.expand(label.value), label)
            except host_lists.UnreadableHostList as error:
                return Unresolved("target_unknown", f"{label} {error}, so the nodes in it are not known")
        if not hosts:
            return None
        nodes = {host: self._topology.known.find(host_of(host)) for host in list(hosts)[:_MOST_LOOKED_UP]}
        all_nodes = frozenset().union(*nodes.values())
        if len(hosts) > 1 and not (len(all_nodes) == 1 and all(nodes.get(host) == all_nodes for host in hosts)):
            shown = ", ".join(host[:100] for host in list(hosts)[:_SHOWN]) + (", …" if len(hosts) > _SHOWN else "")
            label = next(iter(hosts.values()))
            return Unresolved("target_ambiguous", f"{label} names several nodes ({len(hosts)}): {shown}")
        host, label = next(iter(hosts.items()))
        return Label(label.name, host)

    # --- the subject ----------------------------------------------------------------------------------------

    def _agreeing(self, node: str) -> str | Unresolved:
        """Return the node proven by a GPU UUID, unless a label names another known one."""
        instance = None if self._is_relayed else self._instance
        namings = [*self.subjects, *([instance] if instance is not None else [])]
        others = [naming for naming in namings if naming.nodes and node not in naming.nodes]
        # A GPU is in one machine. A name known only from lost agents is a renamed machine's old name.
        others = [naming for naming in others if not all(map(self._topology.known.is_gone, naming.nodes))]
        unknown = [naming for naming in self.subjects if not naming.nodes]
        # One other unknown name may be an exporter's odd host name; two labels with the same one are not.
        agreeing = [naming for naming in unknown for other in unknown if _agree(naming, other)]
        if not others and not agreeing:
            return node
        uuid = next(iter(self._labels.of(UUID_LABELS)))
        shown = "; ".join(naming.described(self._topology) for naming in (*others, *agreeing)[:_SHOWN])
        return Unresolved("target_ambiguous", f"{uuid} is a GPU of {node} (by its agent), but {shown}")

    def _of_known(self, known: Sequence[Naming]) -> str | Unresolved:
        unknown = [naming for naming in self.subjects if not naming.nodes]
        if len(_common(known)) != 1 and self.is_of_central:
            known = [naming for naming in known if not self._is_of_scrape(naming)]
        common = _common(known)
        if len(common) != 1:
            shown = "; ".join(naming.described(self._topology) for naming in known[:_SHOWN])
            return Unresolved("target_ambiguous", f"the labels disagree on the node: {shown}")
        # The known one may be the exporter's host, and an unknown name the subject, unless a known one is `exported_`.
        has_exported = any(naming.label.is_exported for naming in known)
        rivals = [naming for naming in unknown if naming.label.is_exported or not has_exported]
        if rivals:
            shown = "; ".join(naming.described(self._topology) for naming in (*rivals, *known)[:_SHOWN])
            # If all nodes are known, the unknown one does not exist.
            reason = "target_unknown" if self._topology.knows_all_nodes else "target_ambiguous"
            return Unresolved(reason, f"the labels name more than one node: {shown}")
        (node,) = common
        instance = self._instance
        if instance is not None and instance.nodes and node not in instance.nodes and not self._listings:
            # A central exporter may run on any node, so this is no conflict, unless all that names the other node is a
            # relayed ``exported_instance``.
            is_pushed = all(naming.label.name.lower() == "exported_instance" for naming in known)
            if is_pushed or not self.is_of_central:
                shown = "; ".join(naming.described(self._topology) for naming in (*known, instance)[:_SHOWN])
                return Unresolved("target_ambiguous", f"the alert's subject and its exporter are two nodes: {shown}")
        ambiguous = self._labels.of(HOST_LABELS)
        if all(naming.label in ambiguous for naming in known):  # such as a hypervisor
            others = [naming for naming in self._rivals(node) if naming.nodes]
            if others:
                shown = "; ".join(naming.described(self._topology) for naming in (*known, *others)[:_SHOWN])
                return Unresolved("target_ambiguous", f"the labels name more than one node: {shown}")
        return self._other_node_of_exporter(node) or node

    def _is_of_scrape(self, naming: Naming) -> bool:
        """Return whether the scrape added the label over the metric's own: the node of the exporter's pod."""
        pod = None if self._instance is None else self._pod_at(self._instance.host)
        if pod is None or naming.label.is_exported or self._topology.known.name_of(pod.node) not in naming.nodes:
            return False
        return bool(self._labels.under(f"{EXPORTED}{naming.label.name.lower()}"))

    def _other_node_of_exporter(self, node: str) -> Unresolved | None:
        """Refuse if the exporter's pod measures its own node, which is not `node`."""
        instance = self._instance
        if instance is None or instance.nodes or self._is_relayed:
            return None
        pod = self._pod_at(instance.host)
        if pod is None or self._topology.known.name_of(pod.node) == node:
            return None
        if not exporters.is_on_its_node(pod, self._labels):
            return None
        why = f"{instance.label} is pod {pod} on {pod.node}, which measures its own node, and another label is {node}"
        return Unresolved("target_ambiguous", why)

    def _unknown(self) -> str | Unresolved:
        # An ``exported_instance`` may be an exporter's address, so labels of nodes come first.
        namings = [naming for naming in self.subjects if naming.label.name.lower() != "exported_instance"]
        namings = namings or list(self.subjects)
        if not all(_agree_on_host(naming, namings[0]) for naming in namings):
            return Unresolved("target_ambiguous", f"the labels disagree on the node: {_shown(namings)}")
        naming = namings[0]
        if naming.label.name.lower() == "exported_instance":
            return self._host_in(naming.label)
        others = [other for other in self.subjects if other not in namings and not _agree_on_host(other, naming)]
        if others:
            shown = _shown((naming, *others))
            return Unresolved("target_ambiguous", f"the labels disagree on the node: {shown}")
        return naming.host

    def _host_in(self, label: Label) -> str | Unresolved:
        host = host_of(label.value)
        if is_address(host):
            shared = slurm_nodes_sharing(host, self._topology)
            why = f"that several Slurm nodes have: {shared}" if shared else "that no known node has"
            return Unresolved("target_unknown", f"{label} is an address {why}")
        if not _HOST_AND_PORT.fullmatch(label.value):
            return Unresolved("target_unknown", f"{label} is not a host with a port")
        if exporters.names_an_exporter(host, self._labels):
            return Unresolved("target_unknown", f"{label} is the name of a pod or container, of which no node is known")
        return host

    # --- the exporter -------------------------------------------------------------------------------------

    @once
    def _instance(self) -> Naming | None:  # the exporter's address
        for label in self._labels.under("instance"):
            if label not in self._listings and (host := host_of(label.value)):
                return Naming(label, self._topology.known.find(host), host)
        return None

    def _of_exporter(self) -> str | Unresolved:
        namings, refused = self._places_of_exporter()
        for pod, label in self._workloads():
            namings.append(Naming(label, frozenset({self._topology.known.name_of(pod.node)}), pod.name))
        if namings:
            common = _common(namings)
            if len(common) == 1:
                return next(iter(common))
            shown = "; ".join(naming.described(self._topology) for naming in namings[:_SHOWN])
            return Unresolved("target_ambiguous", f"the labels disagree on the node: {shown}")
        if refused is not None:
            return Unresolved("target_unknown", refused)
        if self._instance is not None:
            return self._host_in(self._instance.label)
        looked = f"looked for {', '.join(NODE_LABELS)}, each also with exported_ before it"
        return Unresolved("target_unknown", f"no label names the node ({looked})")

    def _undisputed(self, node: str | Unresolved) -> str | Unresolved:
        """Return the exporter's node, unless another label seems to name another machine."""
        if isinstance(node, Unresolved) or not (rivals := list(islice(self._rivals(node), _SHOWN))):
            return node
        shown = ", ".join(str(naming.label) for naming in rivals)
        where = f"{self._instance.label} is only its exporter's place" if self._instance is not None else f"not {node}"
        return Unresolved("target_ambiguous", f"the alert may be about another machine: {shown}; {where}")

    def _rivals(self, node: str) -> Iterator[Naming]:
        """Yield labels with another known node, or with an unknown value under a name for machines (`_MACHINE`).

        Unknown values do not count if the exporter measures its own node: they may be virtual hosts.
        """
        if self._is_of_lines:
            return
        is_sure, is_usual = exporters.is_surely_of_own_node(self._labels), self._is_of_own_node
        place = self._instance.host if self._instance is not None else node
        for label in islice(self._labels.others(_NO_RIVALS), _MOST_RIVALS):
            asks = _asks_for_machine(label.name)
            # If the exporter surely measures its own node, only labels that ask for a machine count: others may be of
            # the whole site, and name another node.
            if (is_sure and not asks) or not (host := _host_in_text(label.value)):
                continue
            nodes = self._topology.known.find(host)
            if nodes and node not in nodes:
                yield Naming(label, nodes, host)
            if nodes or not asks or is_usual or is_same_spelling(host, place):
                continue
            if not exporters.names_an_exporter(host, self._labels):
                yield Naming(label, _NONE, host)

    @once
    def _is_of_own_node(self) -> bool:
        if exporters.is_of_own_node(self._labels):
            return True
        pod = self._named_pod("namespace", "pod")
        if pod is None or not pod.is_per_node or self._instance is None:
            return False
        return self._topology.known.name_of(pod.node) in self._instance.nodes

    @once
    def is_of_central(self) -> bool:
        return exporters.is_central(self._labels)

    @once
    def _is_relayed(self) -> bool:
        """True if the exporter is central or relays another, so that ``instance`` is not the measured host."""
        return bool(self._labels.under("exported_instance")) or self.is_of_central

    def _places_of_exporter(self) -> tuple[list[Naming], str | None]:
        """Return its nodes if it measures its own; without any, why it does not."""
        is_behind = bool(self._labels.under("exported_instance"))
        if exporters.is_central(self._labels, exported=is_behind):
            named = next(iter(self._labels.of(("instance", "job"))), "it")
            return [], f"{named} is by port or name an exporter of other machines than its own; no label names the node"
        namings, refused = list[Naming](), None
        instance = self._instance
        if instance is not None and not is_behind and (instance.nodes or not self._topology.knows_all_nodes):
            if exporters.is_unknown(self._labels) and not self._is_of_own_node:
                named = "".join(f" ({label})" for label in self._labels.of(("job", "service"))[:1])
                refused = (
                    f"{instance.label} is where an exporter runs{named} that may measure other machines; "
                    "if it measures its own, give its targets a label node"
                )
            elif instance.nodes:
                namings.append(instance)
        for pod, label in self._exporter_pods(is_behind):
            if exporters.is_on_its_node(pod, self._labels):
                namings.append(Naming(label, frozenset({self._topology.known.name_of(pod.node)}), pod.name))
            else:
                refused = f"{label} is pod {pod}, which is not known to measure the node that it runs on ({pod.node})"
        return namings, refused if not namings else None

    def _exporter_pods(self, is_behind: bool) -> Iterator[tuple[Pod, Label]]:
        """`is_behind`: a gateway or federation relays the exporter, and ``instance`` is the relay's."""
        instance = self._instance
        if instance is not None and not is_behind and not instance.nodes:
            pod = self._pod_at(instance.host) or self._pod_of(instance.host)
            if pod is not None:
                yield pod, instance.label
        for label in self._labels.of(NODE_LABELS):
            if (pod := self._pod_of(label.value)) is not None and not self._topology.known.find(label.value):
                yield pod, label
        if (pod := self.own_pod) is not None and not is_behind:
            yield pod, self._labels.under("pod")[0]

    @once
    def own_pod(self) -> Pod | None:
        """The pod that the labels name, if it is the exporter's."""
        pod = self._named_pod("namespace", "pod")
        if pod is None or self._instance is None:
            return None
        return pod if self._instance.host in (pod.name, *pod.addresses) else None

    def measuring_workload(self) -> Pod | None:
        # The job's pod from which the alert was scraped. None for a pod in the host's network: its address is a node's.
        instance = self._instance
        if instance is None or instance.nodes:
            return None
        pod = self._pod_at(instance.host) or self._pod_of(instance.host)
        is_workload = pod is not None and not pod.is_per_node and (pod.job is not None or pod.gpus > 0)
        return pod if is_workload else None

    def _workloads(self) -> Iterator[tuple[Pod, Label]]:
        exported = self._named_pod("exported_namespace", "exported_pod")
        if exported is not None:
            if not exporters.is_central_name(exported.name):
                yield exported, self._labels.under("exported_pod")[0]
            return
        named = self._named_pod("namespace", "pod")
        if named is None or named is self.own_pod or exporters.is_central_name(named.name):
            return
        # Other pods may be measured or measuring. Without an instance both are on the node, if the exporter measures
        # its own.
        is_measured = named.job is not None or bool(named.gpus) or self.is_of_central
        if is_measured or (self._instance is None and exporters.is_on_its_node(named, self._labels)):
            yield named, self._labels.under("pod")[0]

    def _named_pod(self, namespace: str, name: str) -> Pod | None:
        pod = self._labels.value(name)
        if not pod or not self._topology.cluster.pods:
            return None
        return self._topology.cluster.pods_by_full_name.get(f"{self._labels.value(namespace)}/{pod}")

    def _pod_of(self, host: str) -> Pod | None:
        cluster = self._topology.cluster
        if not cluster.pods:
            return None
        namespaces = self._labels.values("namespace")
        pods = (cluster.pods_by_full_name.get(f"{namespace}/{host}") for namespace in namespaces)
        return next((pod for pod in pods if pod is not None), cluster.pods_by_name.get(host))

    def _pod_at(self, host: str) -> Pod | None:
        return self._topology.cluster.pods_by_address.get(host) if is_address(host) else None


def _common(namings: Sequence[Naming]) -> Nodes:
    common = namings[0].nodes if namings else _NONE
    for naming in namings[1:]:
        common &= naming.nodes
    return common


def _agree(naming: Naming, other: Naming) -> bool:
    return naming.label.name.lower() != other.label.name.lower() and _agree_on_host(naming, other)


def _agree_on_host(naming: Naming, other: Naming) -> bool:
    return is_same_spelling(naming.host, other.host)


def _shown(namings: Sequence[Naming]) -> str:
    return ", ".join(f"{naming.label.name}={naming.label.value[:100]!r}" for naming in namings[:_SHOWN])


@functools.lru_cache(maxsize=2000)
def _asks_for_machine(label_name: str) -> bool:
    return len(label_name) <= _LONGEST_NAME and _MACHINE.fullmatch(label_name.lower()) is not None


def _host_in_text(text: str) -> str:
    """Return the host name or IPv4 address with which the text begins; empty without one."""
    match = _HOST_IN_TEXT.fullmatch(text)
    if match is None or match[1].isdigit() or _ARCHITECTURE.fullmatch(match[1].lower()):
        return ""
    return match[1]


def slurm_nodes_sharing(name: str, topology: Topology) -> str:  # "" if not several have it
    nodes = sorted(topology.slurm.shared.get(spelled(name), ()))
    return ", ".join(nodes[:_SHOWN]) + (", …" if len(nodes) > _SHOWN else "")


def host_of(instance: str) -> str:
    # Without port, and without the brackets of an IPv6 address.
    if instance.startswith("["):
        return instance[1:].partition("]")[0]
    if instance.count(":") > 1:
        return instance
    return instance.partition(":")[0]
