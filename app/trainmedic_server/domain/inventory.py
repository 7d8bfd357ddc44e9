"""Inventory in a file or playbook test, as a mapping from text to names.

- an address: its node
- ``pod:<namespace>/<name>``: the pod's job; here and below, one job or a list
- ``node:<node>``: the node's job, according to the cluster
- ``gpu:<GPU>``: the GPU's job, according to its agent; GPU as UUID, ``<node>/<index>`` or ``<node>/<PCI address>``
- ``told:node:<node>``: the node's job, according to the job
- ``told:gpu:<GPU>``: the GPU's job, according to the job
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainmedic_core import gpu_names
from trainmedic_server.domain.topology import Jobs, WrittenTopology

_FIELDS = {
    "pod:": "jobs_by_pod",
    "told:node:": "reported_by_node",
    "told:gpu:": "reported_by_gpu",
    "node:": "observed_by_node",
    "gpu:": "observed_by_gpu",
}


def parse(written: Mapping[str, str | Sequence[str]]) -> WrittenTopology:
    """Parse the inventory. Addresses with several names are ignored."""
    nodes_by_address: dict[str, str] = {}
    jobs: dict[str, dict[str, Jobs]] = {name: {} for name in _FIELDS.values()}
    for key, names in written.items():
        prefix = next((prefix for prefix in _FIELDS if key.startswith(prefix)), None)
        if prefix is not None:
            name = key.removeprefix(prefix)
            name = _gpu_key(name) if prefix.endswith("gpu:") else name
            jobs[_FIELDS[prefix]][name] = frozenset((names,) if isinstance(names, str) else names)
        elif isinstance(names, str):
            nodes_by_address[key] = names
    return WrittenTopology(nodes_by_address, **jobs)


def _gpu_key(name: str) -> str:
    node, _, gpu = name.rpartition("/")
    return gpu_names.key(gpu, node)
