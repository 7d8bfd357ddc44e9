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


def test_nodes_have_attributes_and_gpus_by_host_lists(tmp_path: Path) -> None:
    """The last bracket of a host list is not that of an IPv6 address."""
    file = tmp_path / "inventory.yaml"
    file.write_text('"attributes:n[1-2]": rack=r1, pool=a\n"gpus:n[1-2]": "2"\n"attributes:m[01-02,7]": rack=r2\n')
    loaded = file_inventory.load(file)
    assert loaded.attributes_by_node["n2"] == {"rack": "r1", "pool": "a"}
    assert loaded.attributes_by_node["m02"] == {"rack": "r2"}
    assert loaded.gpus_by_node == {"n1": ("0", "1"), "n2": ("0", "1")}


def test_an_inventory_may_be_larger_than_a_playbook(tmp_path: Path) -> None:
    """A fleet of 100,000 nodes has more values than any file may that the server is given."""
    file = tmp_path / "inventory.yaml"
    file.write_text("".join(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}: gpu-node-{n}\n" for n in range(30_000)))
    assert len(file_inventory.load(file).nodes_by_address) == 30_000


def test_an_empty_file_maps_nothing(tmp_path: Path) -> None:
    """Which is the same as no inventory."""
    file = tmp_path / "inventory.yaml"
    file.write_text("# none yet\n")
    assert file_inventory.load(file) == WrittenTopology()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 10.0.0.7\n", "must map addresses to node names"),
        ("10.0.0.6: gpu-node-6\n10.0.0.7: 7\n", ":2:11: '10.0.0.7': 7 does not map"),
        ("10.0.0.7: [\n", ":2:1: a '[' or a '{' is not closed"),
        ("7: gpu-node-7\n", ":1:1: the key 7 must be text"),
        ('a: b\n"attributes:n[1-": rack=r1\n', ":2:20: 'attributes:n[1-': has a '['"),
        ('a: b\n"attributes:n1": rack\n', ":2:18: 'attributes:n1': 'rack' is not NAME=VALUE"),
        ('"gpus:n1": "9999"\n', ":1:12: 'gpus:n1': a node has at most"),
        ("10.0.0.7: gpu-node-7\n10.0.0.7: gpu-node-8\n", ":2:1: the key '10.0.0.7' is written twice"),
        ("10.0.0.7: gpu-node-7\n---\n10.0.0.8: gpu-node-8\n", ":3:1: must be in one YAML document"),
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
    with pytest.raises(ConfigurationError, match=r"--inventory: cannot read .*none\.yaml: No such file"):
        file_inventory.load(tmp_path / "none.yaml")
