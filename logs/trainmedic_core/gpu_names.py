from __future__ import annotations

import re

_PCI = re.compile(r"(?:([0-9a-f]{4}|[0-9a-f]{8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.0)?")
_INDEX = re.compile("[0-9]{1,4}")
_LONGEST_PCI = 16


def normal_pci(text: str) -> str | None:
    """Return a PCI address as ``0000:18:00.0``; None for another text."""
    address = _PCI.fullmatch(text.strip().lower())
    if address is None:
        return None
    domain = int(address[1] or "0", 16)
    return f"{domain:04x}:{address[2]}:{address[3]}.0"


def normal_uuid(text: str) -> str:
    return text.strip().lower().removeprefix("gpu-")


_MIG_NAME_BEFORE_470 = re.compile(r"mig-(gpu-[0-9a-f-]+)/[0-9]+/[0-9]+")


def card_uuid(text: str) -> str:
    """Return the card's UUID from a share's name: ``GPU-…::2`` (time-slicing), ``MIG-GPU-…/7/0`` (drivers before 470).

    Other texts stay.
    """
    name = text.strip().partition("::")[0]
    instance = _MIG_NAME_BEFORE_470.fullmatch(name.lower())
    return instance[1] if instance is not None else name


def is_mig(text: str) -> bool:
    """Check for a MIG UUID without its card's."""
    return card_uuid(text).lower().startswith("mig-")


def uuid_key(text: str) -> str:  # of the card, also for its shares
    return normal_uuid(card_uuid(text))


def is_index(text: str) -> bool:
    return _INDEX.fullmatch(text.strip()) is not None


def is_of_one_node(text: str) -> bool:
    """Check for an index or PCI address, which other nodes have too."""
    stripped = text.strip()
    return len(stripped) <= _LONGEST_PCI and (is_index(stripped) or normal_pci(stripped) is not None)


_UUID = re.compile("(?:gpu|mig)-[0-9a-f-]+|[0-9a-f]{8}-[0-9a-f-]+|[0-9a-f]{32}")  # not ``a100-40``


def may_be_name(text: str) -> bool:
    """Return whether it is an index, PCI address or UUID. Some exporters write models into ``gpu``."""
    return is_of_one_node(text) or _UUID.fullmatch(card_uuid(text).lower()) is not None


def shown(key: str) -> str:
    """Format a lookup key: ``GPU-…``, or ``GPU <node>/<name>``."""
    return f"GPU {key}" if "/" in key or key.startswith("mig-") else f"GPU-{key}"


def key(name: str, node: str | None = None) -> str:
    """Return the UUID without ``GPU-``, or ``<node>/<name>`` for an index or PCI address."""
    text = name.strip()
    if len(text) > _LONGEST_PCI:  # fast path: nearly all names are UUIDs
        return normal_uuid(text)
    number = str(int(text)) if is_index(text) else normal_pci(text)
    return normal_uuid(text) if number is None else f"{node or ''}/{number}"
