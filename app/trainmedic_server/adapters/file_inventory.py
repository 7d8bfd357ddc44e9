"""Static inventory: a YAML file that maps addresses to node names, and nodes to attributes and GPUs."""

from __future__ import annotations

from pathlib import Path

from trainmedic_core import yaml_text
from trainmedic_core.setting_sources import read_text
from trainmedic_server.domain import inventory
from trainmedic_server.domain.topology import WrittenTopology
from trainmedic_server.errors import ConfigurationError

_MOST_CHARACTERS, _MOST_VALUES = 64 << 20, 2_000_000  # Ten times 100,000 nodes with four addresses each


def load(path: Path) -> WrittenTopology:
    """Raises ConfigurationError with file and entry."""
    documents, problems = yaml_text.read(read_text("--inventory", path), str(path), _MOST_CHARACTERS, _MOST_VALUES)
    if problems:
        raise ConfigurationError(f"inventory {problems[0]}")
    if not documents:
        return WrittenTopology()
    if len(documents) > 1:
        wrong = documents[1].problem((), "must be in one YAML document with what is before it")
        raise ConfigurationError(f"inventory {wrong}")
    document = documents[0]
    if not isinstance(document.value, dict):
        raise ConfigurationError(f"inventory {path}: must map addresses to node names, such as 10.0.0.7: gpu-node-7")
    written: dict[str, str] = {}
    for address, node in document.value.items():
        if not isinstance(node, str) or not address.strip() or not node.strip():
            message = f"{address!r}: {node!r} does not map an address to a node name"
            raise ConfigurationError(f"inventory {document.problem((address,), message)}")
        key = _key(address)
        if key.startswith((inventory.ATTRIBUTES, inventory.GPUS)):
            try:
                inventory.parse({key: node.strip()})
            except ValueError as error:
                message = f"inventory {document.problem((address,), f'{address!r}: {error}')}"
                raise ConfigurationError(message) from error
        written[key] = node.strip()
    return inventory.parse(written)


def _key(written: str) -> str:
    key = written.strip()  # IPv6 addresses may stand in brackets.
    return key[1:-1] if key.startswith("[") and key.endswith("]") else key
