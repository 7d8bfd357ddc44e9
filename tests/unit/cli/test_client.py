"""The server that a command asks."""

from __future__ import annotations

import pytest

from trainmedic_core.cli import exits
from trainmedic_server.cli.client import Client


@pytest.mark.parametrize("url", ["http://", "http://127.0.0.1:99999", "http://a b", "127.0.0.1:8080", "http://[::1"])
def test_a_url_that_leads_nowhere_is_a_wrong_flag(url: str) -> None:
    """And not a server that does not answer, which would be asked again."""
    with pytest.raises(exits.InvalidInput, match="is not a URL such as"):
        Client(url, None)
