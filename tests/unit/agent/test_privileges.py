"""What a process may do, from /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_agent.privileges import capabilities_of, effective_mask


@pytest.mark.parametrize("name", [b"python3", b"\x0bCapEff:\tffffff", b"\xff\x85CapEff:\tfff"])
def test_a_process_cannot_claim_capabilities_by_its_name(name: bytes, tmp_path: Path) -> None:
    """Otherwise any user's process with a lock would count as an agent, or end the agent by an error."""
    (tmp_path / "7").mkdir()
    status = tmp_path / "7" / "status"
    status.write_bytes(b"Name:\t%b\nUmask:\t0022\nCapEff:\t0000000000000000\n" % name)
    assert (effective_mask(7, tmp_path), capabilities_of(7, tmp_path)) == (0, frozenset())
    status.write_bytes(status.read_bytes().replace(b"0000000000000000", b"0000000000200000"))
    assert capabilities_of(7, tmp_path) == {"CAP_SYS_ADMIN"}
    assert effective_mask(8, tmp_path) is None
