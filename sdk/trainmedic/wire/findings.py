"""Transport of log findings to the server and of log rules to the nodes.

The rules are unsigned. A signed *notice of rules* per node states their digest.
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
FIELD = b"finding"
LARGEST_UPDATE = 1024 * 1024  # bytes
MOST_WAITING = 1000  # entries in the stream above which senders wait
RULES = "trainmedic:logrules"  # key of the rules, in RuleSet.encode's format
LARGEST_RULES = 4 * 1024 * 1024  # bytes
NOTICE_SECONDS = 3600  # expiry after the server's last write; readers then keep their rules
_LARGEST_NOTICE = 4096  # bytes
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def notice_of_rules(node: str) -> str:
    return f"{RULES}:{node}"


@dataclass(frozen=True)
class RulesNotice:
    digest: str
    at: datetime  # Time of the rules; readers reject older ones

    @classmethod
    def of(cls, rules: bytes, at: datetime) -> RulesNotice:
        return cls(hashlib.sha256(rules).hexdigest(), at)

    def is_of(self, rules: bytes) -> bool:
        return hashlib.sha256(rules).hexdigest() == self.digest

    def encode(self, node: str, signer: Signer | None) -> bytes:
        raw = json.dumps({"digest": self.digest, "at": envelope.write_time(self.at)}, separators=(",", ":")).encode()
        return raw if signer is None else signer.seal(raw, notice_of_rules(node), node_identity(node))

    @classmethod
    def decode(cls, value: bytes, node: str, signer: Signer | None) -> RulesNotice:
        """Raises BadSignature, EnvelopeError."""
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
