"""Hosts and ports, as URLs write them: whether there can be such ones. It asks nobody.

Who calls it: ``redis_url_check``, and the server's check of http URLs.
"""

from __future__ import annotations

import ipaddress
import re

_NAME = re.compile(r"(?=.{1,253}\Z)[\w-]{1,63}(\.[\w-]{1,63})*\.?")


def is_host(text: str) -> bool:
    """Whether `text` is a host's name or address; that of IPv6 has no brackets here."""
    if ":" not in text:
        return _NAME.fullmatch(text) is not None
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def is_port(text: str) -> bool:
    """Whether something can listen there."""
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 0 < int(text) <= 65535
