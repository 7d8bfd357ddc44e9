"""The policy's part ``logs.ship``, with few imports because every agent loads it."""

from __future__ import annotations

import re
from datetime import timedelta
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from trainmedic_agent import mapping_reader
from trainmedic_agent.mapping_reader import MappingReader
from trainmedic_core.http_url import check_http_url
from trainmedic_logs.domain.log_sources import fault_of_source

OLDEST = timedelta(days=7)  # loki's default (``reject_old_samples_max_age``)
_NUMBERS = re.compile(r"\d{1,10}(:\d{1,10})?\Z")


class StoreKind(StrEnum):
    """Both have Loki's push API."""

    LOKI = "loki"
    VICTORIALOGS = "victorialogs"


class ShipPolicy(Struct, frozen=True):
    kind: StoreKind = StoreKind.LOKI
    url: str = ""
    tenant: str = ""  # Loki's organisation; VictoriaLogs' ``account`` or ``account:project``
    token_file: str | None = None  # ``user:password`` if it has a colon
    ca_file: str | None = None
    """None for the system's."""
    sources: tuple[str, ...] = ()  # shipped ones; empty for all
    oldest: timedelta = field(default=OLDEST)  # age beyond which lines are not sent


def read_ship(parent: MappingReader, raw: object) -> ShipPolicy | None:
    if raw is None or raw is False:
        return None
    reader = MappingReader((*parent.path, "ship"), raw, ShipPolicy.__struct_fields__, parent.faults)
    kind = reader.optional("kind", mapping_reader.one_of(StoreKind), StoreKind.LOKI)
    policy = ShipPolicy(
        kind=kind,
        url=reader.required("url", _url, ""),
        tenant=reader.optional("tenant", _tenant, ""),
        token_file=reader.optional("token_file", _path, None),
        ca_file=reader.optional("ca_file", _path, None),
        sources=reader.each("sources", _source),
        oldest=reader.optional("oldest", mapping_reader.age, OLDEST),
    )
    if kind is StoreKind.VICTORIALOGS and policy.tenant and not _NUMBERS.match(policy.tenant):
        reader.fault(("tenant",), "must be an account number or account:project for VictoriaLogs")
    return policy


def _url(raw: object) -> str:
    url = mapping_reader.text(raw)
    parts = check_http_url(url)
    if parts.query or parts.fragment:
        raise ValueError("must be the store's URL alone, without ? and #: http://host:3100, or https://…")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must have no password in it: put user:password into the file that token_file names")
    return url.rstrip("/")


def _tenant(raw: object) -> str:
    tenant = str(raw) if isinstance(raw, int) and not isinstance(raw, bool) else mapping_reader.text(raw)
    if not tenant.isprintable() or not tenant.isascii():
        raise ValueError("must be printable ASCII, because it goes into a header")
    return tenant


def _path(raw: Any) -> str | None:
    path = mapping_reader.text(raw)
    if not path.startswith("/"):
        raise ValueError(f"{path!r} must be an absolute path")
    return path


def _source(raw: object) -> str:
    name = mapping_reader.text(raw)
    if fault := fault_of_source(name):
        raise ValueError(fault)
    return name
