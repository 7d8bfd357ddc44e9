"""Identities that a proxy vouches for: who signed in at it, told in headers, believed from its addresses alone.

oauth2-proxy and its like set ``X-Forwarded-User`` and ``X-Forwarded-Groups``. Anybody can send these, so they count
only on connections from the networks that are set (``--trusted-proxy``).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence

from starlette.requests import HTTPConnection

from trainmedic_server.auth.tokens import TokenRole

USER_HEADER = "x-forwarded-user"
GROUPS_HEADER = "x-forwarded-groups"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,127}")
_OURS = frozenset({"anonymous", "trainmedic"})
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrustedProxies:
    """Whoever they name may look; members of `operator_groups` may act too."""

    def __init__(self, networks: Sequence[Network], operator_groups: Collection[str] = ()) -> None:
        self._networks = tuple(networks)
        self.operator_groups = frozenset(operator_groups)

    @property
    def are_set(self) -> bool:
        return bool(self._networks)

    def speak_for(self, request: HTTPConnection) -> bool:
        """Whether the request came from one of them."""
        if not self._networks or request.client is None:
            return False
        try:
            address = ipaddress.ip_address(request.client.host)
        except ValueError:
            return False
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return any((mapped or address) in network for network in self._networks)

    def user_of(self, request: HTTPConnection) -> tuple[str, frozenset[TokenRole], frozenset[str]] | None:
        """The name, roles and groups of whom a proxy names; None where none does, or the name cannot be one."""
        users = request.headers.getlist(USER_HEADER)
        if len(users) != 1 or not self.speak_for(request):
            return None
        name = users[0].strip()
        if not _NAME.fullmatch(name) or name.lower() in _OURS:
            return None
        given = ",".join(request.headers.getlist(GROUPS_HEADER))
        groups = frozenset(group.strip() for group in given.split(",") if group.strip())
        roles = {TokenRole.VIEWER} | ({TokenRole.OPERATOR} if groups & self.operator_groups else set())
        return name, frozenset(roles), groups
