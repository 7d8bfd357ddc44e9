"""Syntax checks of hosts and ports, without resolving."""

from __future__ import annotations

import ipaddress
import re

_NAME = re.compile(r"(?=.{1,253}\Z)[\w-]{1,63}(\.[\w-]{1,63})*\.?")


def is_host(text: str) -> bool:
    """Return whether it is a host name or address; IPv6 without brackets."""
    if ":" not in text:
        return _NAME.fullmatch(text) is not None
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def is_port(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 0 < int(text) <= 65535
