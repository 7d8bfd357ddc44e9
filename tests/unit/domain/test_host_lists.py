"""Host lists as Slurm writes them."""

from __future__ import annotations

import pytest

from trainmedic_server.adapters import slurm_topology
from trainmedic_server.domain import host_lists
from trainmedic_server.domain.host_lists import UnreadableHostList, expand, is_host_list
from trainmedic_server.domain.topology import SlurmTopology
from trainmedic_server.ports.slurm import SlurmJob


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n7", ["n7"]),
        ("n7,n9", ["n7", "n9"]),
        ("n7, n9 n8", ["n7", "n9", "n8"]),
        ("rack-[08-11]", ["rack-08", "rack-09", "rack-10", "rack-11"]),
        ("a[1,3-4,9]b", ["a1b", "a3b", "a4b", "a9b"]),
        ("r[1-2]c[01-02]", ["r1c01", "r1c02", "r2c01", "r2c02"]),
        ("n[1-9:4],login", ["n1", "n5", "n9", "login"]),
        ("n[1-9/4]", ["n1", "n5", "n9"]),
        ("n[1,[3-4]]", ["n1", "n3", "n4"]),
        ("n[5]", ["n5"]),
        ("n1,n1", ["n1"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("n" + "[1]" * 6, ["n111111"]),
        ("n" + "[" * 6 + "1" + "]" * 6, ["n1"]),
    ],
)
def test_a_host_list_is_read(text: str, hosts: list[str]) -> None:
    """Numbers keep their zeros, and each host comes once."""
    assert list(expand(text)) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "n[1-999999999]",
        "n[1-3",
        "n1-3]",
        "n[a-b]",
        "n[3-1]",
        "n[1-9:0]",
        "n[1-900][1-900]",
        "n" + "[1]" * 7,
        "n" + "[" * 7 + "1" + "]" * 7,
        "n" + "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]" * 6,
        "n[1-4000]" + "n" * 60_000,
        "n" * 70_000,
    ],
)
def test_what_cannot_be_read_is_said(text: str) -> None:
    """Whatever stands in a label takes neither time nor memory."""
    with pytest.raises(UnreadableHostList):
        expand(text)


def test_the_largest_list_is_bounded() -> None:
    assert len(expand(f"n[1-{host_lists.MOST_HOSTS}]")) == host_lists.MOST_HOSTS
    for text in ("n[1-4097]", "n[0-999999999999]", "n[0-999999999999]x[0-9]"):
        with pytest.raises(UnreadableHostList, match="more than 4096 hosts"):
            expand(text)


def test_a_job_of_slurm_has_all_of_its_nodes() -> None:
    """It would seem to run nowhere otherwise."""
    job = SlurmJob("7", "llm", "mia", frozenset({"RUNNING"}), "n[1-5000]", False, True, 0)
    topology = slurm_topology.topology_of([], [job], SlurmTopology(answers=True))
    assert topology.jobs_by_node["n5000"] == {"slurm:7"}


@pytest.mark.parametrize(
    ("text", "is_list"), [("n1", False), ("n1,n2", True), ("n[1-2]", True), ("[fd00::7]:9100", False)]
)
def test_what_is_a_list(text: str, is_list: bool) -> None:
    assert is_host_list(text) is is_list
