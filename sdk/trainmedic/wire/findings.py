"""How what rules find in logs comes to the server, and how the rules come to whoever reads the logs.

A finding travels as an entry of one stream, signed as a reply is; its form is the server's (``domain.finding_codec``).

The rules are one value that all read, so they are not signed for anybody. What is signed is a node's own *notice of
rules*, a small value that names the rules by their digest, in the key of that node: a holder of the shared key or of
this node's identity key can check it. Whoever follows the rules looks at its notice every few seconds, and reads the
rules where the digest is not that of those it has.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import datetime

from trainmedic.wire import envelope
from trainmedic.wire.envelope import EnvelopeError
from trainmedic.wire.reading import read_object
from trainmedic.wire.signing import Signer, node_identity, unseal

FINDINGS = "trainmedic:findings"
"""The stream of findings to the server."""
FIELD = b"finding"
"""The field of an entry."""
LARGEST_UPDATE = 1024 * 1024
"""Bytes of an entry, with its signatures; what is larger is not read."""
MOST_WAITING = 1000
"""Entries in the stream from which on nobody adds one, but keeps it until the server has taken some."""
RULES = "trainmedic:logrules"
"""The key of the rules, as ``logs.rule.RuleSet.encode`` writes them."""
LARGEST_RULES = 4 * 1024 * 1024
"""Bytes of the rules."""
NOTICE_SECONDS = 3600
"""The notice of a node vanishes so long after the server has written it last. Who has rules keeps them."""
_LARGEST_NOTICE = 4096
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def notice_of_rules(node: str) -> str:
    """The key of a node's notice of rules."""
    return f"{RULES}:{node}"


@dataclass(frozen=True)
class RulesNotice:
    """Which rules count now."""

    digest: str
    """The SHA-256 of the rules' bytes, hexadecimal."""
    at: datetime
    """Since when they have been the rules, aware and in UTC: a reader takes none that are older than its own."""

    @classmethod
    def of(cls, rules: bytes, at: datetime) -> RulesNotice:
        """The notice of these rules."""
        return cls(hashlib.sha256(rules).hexdigest(), at)

    def is_of(self, rules: bytes) -> bool:
        """Whether these are the rules that are meant."""
        return hashlib.sha256(rules).hexdigest() == self.digest

    def encode(self, node: str, signer: Signer | None) -> bytes:
        """The value of the node's key."""
        raw = json.dumps({"digest": self.digest, "at": envelope.write_time(self.at)}, separators=(",", ":")).encode()
        return raw if signer is None else signer.seal(raw, notice_of_rules(node), node_identity(node))

    @classmethod
    def decode(cls, value: bytes, node: str, signer: Signer | None) -> RulesNotice:
        """The notice in the value of the node's key. Raises BadSignature, EnvelopeError."""
        if len(value) > _LARGEST_NOTICE:
            raise EnvelopeError("notice of rules: too large")
        sealed = unseal(value)
        if signer is not None:
            signer.verify_sealed(sealed, notice_of_rules(node), node_identity(node))
        try:
            fields = read_object(sealed.raw)
        except ValueError as error:
            raise EnvelopeError("notice of rules: not a JSON object") from error
        digest = fields.get("digest")
        if not isinstance(digest, str) or not _DIGEST.match(digest):
            raise EnvelopeError("notice of rules: digest is not a SHA-256")
        return cls(digest, envelope.read_time(str(fields.get("at"))))
