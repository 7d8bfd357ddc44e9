"""The mapping from addresses to node names."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_server.adapters import file_inventory
from trainmedic_server.domain.topology import WrittenTopology
from trainmedic_server.errors import ConfigurationError


def test_addresses_map_to_node_names(tmp_path: Path) -> None:
    """IPv6 addresses may keep the brackets that they have in an instance label."""
    file = tmp_path / "inventory.yaml"
    file.write_text('10.0.0.7: gpu-node-7\n"[fd00::7]": gpu-node-7\n')
    addresses = {"10.0.0.7": "gpu-node-7", "fd00::7": "gpu-node-7"}
    assert file_inventory.load(file) == WrittenTopology(addresses)


def test_an_empty_file_maps_nothing(tmp_path: Path) -> None:
    """Which is the same as no inventory."""
    file = tmp_path / "inventory.yaml"
    file.write_text("# none yet\n")
    assert file_inventory.load(file) == WrittenTopology()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 10.0.0.7\n", "must map addresses to node names"),
        ("10.0.0.7: 7\n", "'10.0.0.7': 7 does not map"),
        ("10.0.0.7: [\n", "not YAML"),
        ("7: gpu-node-7\n", "7: 'gpu-node-7' does not map"),
    ],
)
def test_a_wrong_inventory_is_refused_with_its_file(tmp_path: Path, text: str, message: str) -> None:
    """A wrong node name would send a repair to the wrong machine, so nothing is guessed."""
    file = tmp_path / "inventory.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        file_inventory.load(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_inventory_is_refused(tmp_path: Path) -> None:
    """The setting named a file, so it is meant to be there."""
    with pytest.raises(ConfigurationError, match="cannot be read"):
        file_inventory.load(tmp_path / "none.yaml")
