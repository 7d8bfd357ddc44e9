"""Credentials for the log store, which the agent reads: their files are closed to the reader's user."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from trainmedic_agent.log_shipping.ship_policy import ShipPolicy
from trainmedic_core.setting_sources import unreadable_file

_LARGEST_FILE = 1024 * 1024  # characters
_LONGEST_PROBLEM = 300  # characters


class StoreAccess(Struct, frozen=True, tag="store"):
    token: str | None = None  # ``user:password`` if it has a colon
    certificates: str | None = None  # PEM form, None for the system's
    problem: str = ""  # why a file cannot be read, otherwise empty


def read_access(ship: ShipPolicy, token: str | None) -> StoreAccess:
    """`token` is used without a token file."""
    try:
        return StoreAccess(
            _text_of("token_file", ship.token_file) if ship.token_file is not None else token,
            _text_of("ca_file", ship.ca_file) if ship.ca_file is not None else None,
        )
    except ValueError as error:
        return StoreAccess(problem=str(error)[:_LONGEST_PROBLEM])


def _text_of(member: str, path: str) -> str:
    """Raises ValueError."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.read(_LARGEST_FILE)
    except (OSError, ValueError) as error:
        raise ValueError(unreadable_file(f"logs.ship.{member}", path, error)) from error
