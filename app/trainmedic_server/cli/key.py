"""``trainmedic key``."""

from __future__ import annotations

import os

import click

from trainmedic.wire.signing import identity_key
from trainmedic_core import setting_sources
from trainmedic_core.cli import exits
from trainmedic_core.setting_sources import SettingSource
from trainmedic_server.errors import ConfigurationError

_SHARED = SettingSource("TRAINMEDIC_SIGNING_KEY", secret=True)


@click.command()
@click.argument("identity", metavar="job:NAME|node:NAME")
def key(identity: str) -> None:
    """Print the signing key of one job or node.

    Its owner can read commands for this job or node and answer for it, but for no other. Give a tenant this key instead
    of the shared one. It is derived from TRAINMEDIC_SIGNING_KEY (or _FILE), so the server accepts it already.

    \b
    TRAINMEDIC_SIGNING_KEY_FILE=/etc/trainmedic/signing-key trainmedic key job:llm-1 > llm-1.key
    """
    kind, colon, name = identity.partition(":")
    if kind not in ("job", "node") or not colon or not name or any(char.isspace() for char in name):
        raise exits.InvalidInput(f"{identity!r} is neither job:NAME nor node:NAME, such as job:llm-1")
    try:
        shared = setting_sources.read(_SHARED, None, os.environ)
    except ConfigurationError as error:
        raise exits.InvalidInput(str(error)) from error
    if shared is None or not shared[0].strip():
        raise exits.InvalidInput("set TRAINMEDIC_SIGNING_KEY or TRAINMEDIC_SIGNING_KEY_FILE to the shared key")
    click.echo(identity_key(shared[0].encode().strip(), identity).decode())
