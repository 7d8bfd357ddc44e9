"""The access to the store of logs: what the agent reads from files that the reader's user may not open."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from trainmedic_agent.log_shipping.ship_policy import ShipPolicy

_LARGEST_FILE = 1024 * 1024
_LONGEST_PROBLEM = 300


class StoreAccess(Struct, frozen=True, tag="store"):
    """A credential, and the certificates that sign the store's. None for none."""

    token: str | None = None
    """What has a colon in it is ``user:password``."""
    certificates: str | None = None
    """In PEM form. None for the system's."""
    problem: str = ""
    """The reason why a file of the policy cannot be read. Empty if all can."""


def read_access(ship: ShipPolicy, token: str | None) -> StoreAccess:
    """Read the files that the policy names. `token` is used if it names no file of one."""
    try:
        return StoreAccess(
            _text_of(ship.token_file) if ship.token_file is not None else token,
            _text_of(ship.ca_file) if ship.ca_file is not None else None,
        )
    except (OSError, ValueError) as error:
        return StoreAccess(problem=f"{type(error).__name__}: {error}"[:_LONGEST_PROBLEM])


def _text_of(path: str) -> str:
    with Path(path).open(encoding="utf-8") as file:
        return file.read(_LARGEST_FILE)
