"""Inventory in a file or playbook test, as a mapping from text to names.

- an address: its node
- ``pod:<namespace>/<name>``: the pod's job; here and below, one job or a list
- ``node:<node>``, ``gpu:<GPU>``: the job there, as cluster and agents see it; GPU as UUID, ``<node>/<index>`` or
  ``<node>/<PCI address>``
- ``told:node:<node>``, ``told:gpu:<GPU>``: the same, as jobs report it
- ``attributes:<nodes>``: attributes for selectors, as ``rack=r1, pool=h100``; nodes as a host list, ``gpu-[01-16]``
- ``gpus:<nodes>``: the number of GPUs, or their names, of nodes without an agent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainmedic_core import gpu_names
from trainmedic_server.domain import host_lists, selectors
from trainmedic_server.domain.topology import Jobs, WrittenTopology

_FIELDS_BY_PREFIX = {
    "pod:": "jobs_by_pod",
    "told:node:": "reported_by_node",
    "told:gpu:": "reported_by_gpu",
    "node:": "observed_by_node",
    "gpu:": "observed_by_gpu",
}

ATTRIBUTES, GPUS = "attributes:", "gpus:"
_MOST_GPUS = 256


def parse(written: Mapping[str, str | Sequence[str]]) -> WrittenTopology:
    """Parse the inventory, ignoring addresses with several names. Raises ValueError."""
    nodes_by_address: dict[str, str] = {}
    attributes: dict[str, dict[str, str]] = {}
    gpus: dict[str, tuple[str, ...]] = {}
    jobs: dict[str, dict[str, Jobs]] = {name: {} for name in _FIELDS_BY_PREFIX.values()}
    for key, names in written.items():
        prefix = next((prefix for prefix in _FIELDS_BY_PREFIX if key.startswith(prefix)), None)
        if key.startswith(ATTRIBUTES):
            for node in host_lists.expand(key.removeprefix(ATTRIBUTES)):
                attributes.setdefault(node, {}).update(
                    pair for text in _texts(names) for pair in selectors.attribute_pairs(text)
                )
        elif key.startswith(GPUS):
            gpus |= dict.fromkeys(host_lists.expand(key.removeprefix(GPUS)), _gpus(_texts(names)))
        elif prefix is not None:
            name = key.removeprefix(prefix)
            name = _gpu_key(name) if prefix.endswith("gpu:") else name
            jobs[_FIELDS_BY_PREFIX[prefix]][name] = frozenset((names,) if isinstance(names, str) else names)
        elif isinstance(names, str):
            nodes_by_address[key] = names
    return WrittenTopology(nodes_by_address, **jobs, attributes_by_node=attributes, gpus_by_node=gpus)


def _texts(names: str | Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names


def _gpus(texts: Sequence[str]) -> tuple[str, ...]:
    """Return names of GPUs; a number N stands for 0 to N-1."""
    names = [name.strip() for text in texts for name in text.split(",")]
    if len(names) == 1 and names[0].isdigit():
        if int(names[0]) > _MOST_GPUS:
            raise ValueError(f"a node has at most {_MOST_GPUS} GPUs, not {names[0]}")
        return tuple(map(str, range(int(names[0]))))
    return tuple(filter(None, names))


def _gpu_key(name: str) -> str:
    node, _, gpu = name.rpartition("/")
    return gpu_names.key(gpu, node)
