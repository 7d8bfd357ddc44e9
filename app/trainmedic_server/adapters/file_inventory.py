"""The static inventory: a YAML file that maps addresses to node names, or whatever else ``domain.inventory`` reads.

Who calls it: ``wiring``, once when the server starts, and ``playbook explain``.
"""

from __future__ import annotations

from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from trainmedic_server.domain import inventory
from trainmedic_server.domain.topology import WrittenTopology
from trainmedic_server.errors import ConfigurationError


def load(path: Path) -> WrittenTopology:
    """What the file says. Raises ConfigurationError, naming the file and the entry.

    Addresses may be written as they stand in an ``instance`` label without the port, IPv6 ones
    with or without their brackets.
    """
    try:
        document = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"inventory {path}: cannot be read: {error}") from error
    except YAMLError as error:
        raise ConfigurationError(f"inventory {path}: not YAML: {error}") from error
    if document is None:
        return WrittenTopology()
    if not isinstance(document, dict):
        raise ConfigurationError(f"inventory {path}: must map addresses to node names, such as 10.0.0.7: gpu-node-7")
    written: dict[str, str] = {}
    for address, node in document.items():
        if not isinstance(address, str) or not isinstance(node, str) or not address.strip() or not node.strip():
            raise ConfigurationError(f"inventory {path}: {address!r}: {node!r} does not map an address to a node name")
        written[address.strip().removeprefix("[").removesuffix("]")] = node.strip()
    return inventory.parse(written)
