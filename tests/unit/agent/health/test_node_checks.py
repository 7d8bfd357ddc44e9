"""Checks of links, disks and file systems, on directories in the kernel's format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.node_tree import PORT, NodeTree
from trainmedic_agent.health.checks import CheckResults, HealthCheck, HealthVerdict
from trainmedic_agent.health.disk_checks import disk_checks
from trainmedic_agent.health.network_checks import network_checks, rate_checks
from trainmedic_agent.health.sysfs import NodeRoots


@pytest.fixture
def node(tmp_path: Path) -> NodeTree:
    return NodeTree(tmp_path)


def found(node: NodeTree) -> CheckResults:
    result = network_checks(node.sys)
    result.add(disk_checks(NodeRoots(node.sys, node.proc)))
    return result


def bad(node: NodeTree) -> list[tuple[str, str, HealthVerdict]]:
    return [(each.name, each.part, each.verdict) for each in found(node).checks if each.verdict is not HealthVerdict.OK]


def amounts(node: NodeTree) -> dict[str, float]:
    return {value.key: value.amount for value in found(node).values}


def test_a_healthy_node_passes_every_check(node: NodeTree) -> None:
    """Each part in use has its checks, with observations. Virtual devices and IPoIB have none."""
    checks = {(each.name, each.part): each for each in found(node).checks}
    assert bad(node) == []
    assert sorted(checks) == [
        ("disk", "md0"),
        ("disk", "nvme0n1"),
        ("disk", "sda"),
        ("filesystem", "0d1c/1"),
        ("filesystem", "loop1"),
        ("filesystem", "nvme0n1p2"),
        ("link", "eth0"),
        ("link", PORT),
        ("pcie_speed", "eth0"),
        ("pcie_speed", "mlx5_0"),
        ("pcie_speed", "nvme0n1"),
        ("pcie_width", "eth0"),
        ("pcie_width", "mlx5_0"),
        ("pcie_width", "nvme0n1"),
    ]
    assert checks["link", PORT] == HealthCheck(
        "link", PORT, HealthVerdict.OK, "4: ACTIVE, 400 Gb/sec (4X NDR)", "4: ACTIVE"
    )
    assert checks["link", "eth0"].observed == "up, 100000 Mb/s"


def test_values_are_read_for_the_record(node: NodeTree) -> None:
    """The values are rates, counters, and one entry per local file system, by its own options, not its mount's."""
    node.count(symbol_error=4, port_rcv_errors=2, link_downed=1)
    assert amounts(node) == {
        "link_rate eth0": 100000,
        "link_downs eth0": 1,
        "link_errors eth0": 0,
        f"port_rate {PORT}": 400,
        f"link_downs {PORT}": 1,
        f"link_errors {PORT}": 6,
        "disk_errors sda": 2,
        "mount_writable /": 1,
        "mount_writable /scratch disk": 1,
    }


def test_a_slot_narrower_than_the_card_sets_the_maximum(node: NodeTree) -> None:
    """The disk's card could use 16 lanes, and its slot has 4."""
    assert ("pcie_width", "nvme0n1", HealthVerdict.DEGRADED) not in bad(node)
    node.write(f"{node.nvme}/current_link_width", 2)
    assert bad(node) == [("pcie_width", "nvme0n1", HealthVerdict.DEGRADED)]


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        (lambda node: node.write(f"{node.ethernet}/current_link_width", 8), ("pcie_width", "eth0", "degraded")),
        (
            lambda node: node.write(f"{node.infiniband}/current_link_speed", "2.5 GT/s PCIe"),
            ("pcie_speed", "mlx5_0", "degraded"),
        ),
        (
            lambda node: node.write(f"{node.infiniband}/current_link_speed", "Unknown"),
            ("pcie_speed", "mlx5_0", "unknown"),
        ),
        (lambda node: node.port(state="2: INIT"), ("link", PORT, "degraded")),
        (lambda node: node.port(state="garbage"), ("link", "mlx5_0", "unknown")),
        (lambda node: node.write(f"{node.nvme}/nvme/nvme0/state", "dead"), ("disk", "nvme0n1", "failed")),
        (lambda node: node.write(f"{node.nvme}/nvme/nvme0/state", "resetting"), ("disk", "nvme0n1", "degraded")),
        (lambda node: node.write("sys/block/sda/device/state", "offline"), ("disk", "sda", "failed")),
        (lambda node: node.write("sys/block/md0/md/degraded", 1), ("disk", "md0", "degraded")),
        (lambda node: node.write("sys/fs/ext4/nvme0n1p2/errors_count", 3), ("filesystem", "nvme0n1p2", "degraded")),
        (
            lambda node: node.write("sys/fs/btrfs/0d1c/devinfo/1/error_stats", "write_errs 0\nread_errs 5"),
            ("filesystem", "0d1c/1", "degraded"),
        ),
        (lambda node: (node.proc / "self/mountinfo").unlink(), ("filesystem", "", "unknown")),
    ],
)
def test_each_fault_is_found_at_its_part(
    node: NodeTree, happens: Callable[[NodeTree], None], expected: tuple[str, str, str]
) -> None:
    """No other part has a fault."""
    happens(node)
    assert bad(node) == [expected]


def test_a_link_that_is_down_is_left_to_the_record(node: NodeTree) -> None:
    """It may never have been used. Its rate is 0; one that an administrator switched off has none."""
    node.interface(operstate="down")
    (node.sys / "class/net/eth0/speed").unlink()
    node.port(state="1: DOWN", phys_state="2: Polling")
    assert bad(node) == []
    assert (amounts(node)["link_rate eth0"], amounts(node)[f"port_rate {PORT}"]) == (0, 0)
    node.interface(flags="0x1002")
    node.port(phys_state="3: Disabled")
    assert not {"link_rate eth0", f"port_rate {PORT}"} & amounts(node).keys()


def rates(node: NodeTree, least: float) -> list[tuple[str, HealthVerdict]]:
    checks = rate_checks(network_checks(node.sys).values, least)
    assert {check.name for check in checks} == {"min_gbps"}
    return [(check.part, check.verdict) for check in checks]


def test_each_active_rdma_port_must_reach_the_rate(node: NodeTree) -> None:
    """A 100 Gb/s Ethernet port next to it does not count; without any active port, the node fails."""
    assert rates(node, 400) == [(PORT, HealthVerdict.OK)]
    node.port(rate="200 Gb/sec (4X HDR)")
    assert rates(node, 400) == [(PORT, HealthVerdict.FAILED)]
    node.port(state="1: DOWN", phys_state="2: Polling")
    assert rates(node, 1) == [("", HealthVerdict.FAILED)]


def test_without_rdma_the_fastest_interface_must_reach_the_rate(node: NodeTree) -> None:
    """An interface without a speed, such as a virtual machine's, does not reach it."""
    node.port(phys_state="3: Disabled")
    assert rates(node, 100) == [("eth0", HealthVerdict.OK)]
    assert rates(node, 101) == [("eth0", HealthVerdict.FAILED)]
    (node.sys / "class/net/eth0/speed").unlink()
    assert rates(node, 0.001) == [("", HealthVerdict.FAILED)]


def test_a_read_only_file_system_is_left_to_the_record(node: NodeTree) -> None:
    """Some file systems are read-only on purpose."""
    node.remount_read_only()
    assert amounts(node)["mount_writable /"] == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_unknown(node: NodeTree) -> None:
    (node.sys / "block/sda/device/state").chmod(0)
    assert bad(node) == [("disk", "sda", HealthVerdict.UNKNOWN)]


def test_a_mount_point_of_any_bytes_is_stored_as_text(node: NodeTree) -> None:
    """Invalid UTF-8 must not prevent the record of all others."""
    (node.proc / "self" / "mountinfo").write_bytes(b"30 1 8:1 / /data\xff rw - ext4 /dev/sda1 rw\n")
    assert amounts(node)["mount_writable /data\\xff"] == 1
    assert all(key.encode() for key in amounts(node))


def test_a_directory_in_place_of_a_file_is_unknown(node: NodeTree) -> None:
    """It is treated as any file that exists and cannot be read."""
    (node.sys / "block/sda/device/state").unlink()
    (node.sys / "block/sda/device/state").mkdir()
    assert bad(node) == [("disk", "sda", HealthVerdict.UNKNOWN)]


def test_a_machine_without_these_parts_has_nothing_to_check(tmp_path: Path) -> None:
    assert network_checks(tmp_path).checks == []
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text("22 1 0:20 / / rw - overlay overlay rw\n")
    assert disk_checks(NodeRoots(tmp_path, tmp_path)) == CheckResults()
