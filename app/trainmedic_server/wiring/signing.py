"""The server's signer, from its settings. Who calls it: ``server``."""

from __future__ import annotations

from trainmedic.wire.signing import Signer
from trainmedic_server import telemetry
from trainmedic_server.ports.outside import UNSIGNED
from trainmedic_server.settings.server import ServerSettings

_SHORT_KEY = 16  # bytes

log = telemetry.logger(__name__)


def signer_of(settings: ServerSettings) -> Signer | None:
    """What signs commands and checks who answers; a warning in the log where that is nothing, or little."""
    if settings.signing_key is None:
        log.warning(UNSIGNED)
        return None
    length = len(settings.signing_key.get_secret_value().strip())
    if length < _SHORT_KEY:
        log.warning("the signing key is short enough to be guessed; use 16 random characters or more", length=length)
    return settings.signer
