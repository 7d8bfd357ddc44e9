"""The notice by which a node knows the rules."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from trainmedic.wire.envelope import EnvelopeError
from trainmedic.wire.findings import RulesNotice
from trainmedic.wire.signing import BadSignature, Signer, identity_key, node_identity

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
SHARED = Signer.of(b"shared key")
OWN = Signer.of(identity_key(b"shared key", node_identity("node-1")))
NOTICE = RulesNotice.of(b"the rules", AT)


@pytest.mark.parametrize("reader", [SHARED, OWN], ids=["by the shared key", "by the node's own"])
def test_a_node_reads_its_notice_with_either_key(reader: Signer) -> None:
    """A node that has only its identity key can verify that the server has written the rules."""
    read = RulesNotice.decode(NOTICE.encode("node-1", SHARED), "node-1", reader)
    assert read == NOTICE
    assert read.is_of(b"the rules")
    assert not read.is_of(b"other rules")


@pytest.mark.parametrize(
    "value",
    [
        NOTICE.encode("node-2", SHARED),
        NOTICE.encode("node-1", None),
        NOTICE.encode("node-1", Signer.of(b"other key")),
        NOTICE.encode("node-1", SHARED).replace(b"2026", b"2027"),
    ],
    ids=["of another node", "not signed", "by another key", "changed"],
)
def test_a_notice_that_is_not_the_servers_is_rejected(value: bytes) -> None:
    """Write access to Redis is not enough to give rules to a node."""
    with pytest.raises(BadSignature):
        RulesNotice.decode(value, "node-1", OWN)


@pytest.mark.parametrize("value", [b"", b"[]", b'{"digest":7}', b'{"digest":"%s"}' % (b"a" * 64), b"x" * 5000])
def test_a_malformed_notice_is_rejected(value: bytes) -> None:
    """Whatever is in Redis raises one kind of error."""
    with pytest.raises(EnvelopeError):
        RulesNotice.decode(value, "node-1", None)


def test_without_a_signing_key_a_notice_is_trusted() -> None:
    """Everything is trusted then."""
    assert RulesNotice.decode(NOTICE.encode("node-1", None), "node-1", None) == NOTICE
