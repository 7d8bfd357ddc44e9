"""The names of a GPU, and when two of them mean the same: exporters write UUIDs and PCI addresses in many ways."""

from __future__ import annotations

import re

_PCI = re.compile(r"(?:([0-9a-f]{4}|[0-9a-f]{8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.0)?")
_INDEX = re.compile("[0-9]{1,4}")
_LONGEST_PCI = 16


def normal_pci(text: str) -> str | None:
    """``0000:18:00.0`` for every way of writing that address; None where `text` is none."""
    address = _PCI.fullmatch(text.strip().lower())
    if address is None:
        return None
    domain = int(address[1] or "0", 16)
    return f"{domain:04x}:{address[2]}:{address[3]}.0"


def normal_uuid(text: str) -> str:
    """A GPU's UUID as it is compared: lower case, without the ``GPU-`` that some exporters leave out."""
    return text.strip().lower().removeprefix("gpu-")


_OLD_MIG = re.compile(r"mig-(gpu-[0-9a-f-]+)/[0-9]+/[0-9]+")


def card_uuid(text: str) -> str:
    """Return the UUID of the card in the name of a share of one: ``GPU-…::2`` of time-slicing, ``MIG-GPU-…/7/0`` of MIG
    as drivers before 470 write it. Any other text is returned as it is."""
    name = text.strip().partition("::")[0]
    instance = _OLD_MIG.fullmatch(name.lower())
    return instance[1] if instance is not None else name


def is_mig(text: str) -> bool:
    """Return whether `text` is the UUID of a MIG instance, which does not state its card."""
    return card_uuid(text).lower().startswith("mig-")


def uuid_key(text: str) -> str:
    """Return the key by which the card of a UUID is looked up."""
    return normal_uuid(card_uuid(text))


def is_index(text: str) -> bool:
    """Whether `text` is a GPU's number on its node."""
    return _INDEX.fullmatch(text.strip()) is not None


def is_of_one_node(text: str) -> bool:
    """Whether `text` names a GPU only together with its node: an index or a PCI address."""
    stripped = text.strip()
    return len(stripped) <= _LONGEST_PCI and (is_index(stripped) or normal_pci(stripped) is not None)


def key(name: str, node: str | None = None) -> str:
    """The key by which a GPU is looked up: its UUID, or ``<node>/<name>`` where `name` is an index or PCI address."""
    text = name.strip()
    if len(text) > _LONGEST_PCI:  # as nearly all are, of a hundred thousand
        return normal_uuid(text)
    number = str(int(text)) if is_index(text) else normal_pci(text)
    return normal_uuid(text) if number is None else f"{node or ''}/{number}"
