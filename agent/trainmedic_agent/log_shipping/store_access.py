"""Credentials for the log store, in files closed to the reader's user."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from trainmedic_agent.log_shipping.ship_policy import ShipPolicy

_LARGEST_FILE = 1024 * 1024
_LONGEST_PROBLEM = 300


class StoreAccess(Struct, frozen=True, tag="store"):
    token: str | None = None
    """``user:password`` if it has a colon."""
    certificates: str | None = None
    """PEM form, None for the system's."""
    problem: str = ""  # why a file cannot be read, otherwise empty


def read_access(ship: ShipPolicy, token: str | None) -> StoreAccess:
    """`token` is used without a token file."""
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
