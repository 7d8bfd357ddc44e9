"""The inventory as people write it, in a file or in a playbook's test: a mapping from text to names.

==========================  ===========================================================================
key                         value
==========================  ===========================================================================
an address                  the name of its node
``pod:<namespace>/<name>``  the job of the pod; like the rest, one job or a list of several
``node:<node>``             the job on the node, as the cluster knows it
``gpu:<GPU>``               the job on the GPU, as its agent sees it; the GPU by any of its names: its UUID,
                            ``<node>/<index>`` or ``<node>/<PCI address>``
``told:node:<node>``        the same two, as the jobs report it themselves
``told:gpu:<GPU>``
==========================  ===========================================================================

Who calls it: ``adapters.file_inventory``, and the simulation for the ``inventory`` of a test.
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
"""The field of `WrittenTopology` for each way in which a key begins."""


def parse(written: Mapping[str, str | Sequence[str]]) -> WrittenTopology:
    """Read the inventory. An address that is mapped to several names is ignored."""
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
