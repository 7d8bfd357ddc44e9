"""Users authenticated by a proxy, from ``X-Forwarded-User`` and ``X-Forwarded-Groups``.

Any client can send these headers: they count only from ``--trusted-proxy`` networks.
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
_OURS = frozenset({"anonymous", "trainmedic"})  # actors of the history that are no users
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrustedProxies:
    """Users named by these proxies may view. Members of `operator_groups` may also act."""

    def __init__(self, networks: Sequence[Network], operator_groups: Collection[str] = ()) -> None:
        self._networks = tuple(networks)
        self.are_set = bool(self._networks)
        self.operator_groups = frozenset(operator_groups)

    def speak_for(self, request: HTTPConnection) -> bool:
        if not self._networks or request.client is None:
            return False
        try:
            address = ipaddress.ip_address(request.client.host)
        except ValueError:
            return False
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return any((mapped or address) in network for network in self._networks)

    def user_of(self, request: HTTPConnection) -> tuple[str, frozenset[TokenRole], frozenset[str]] | None:
        """Return name, roles and groups. None if no trusted proxy names a user, or the name is invalid."""
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
