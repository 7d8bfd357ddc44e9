"""The settings of whom a proxy in front vouches for; a part of the server's settings. Who uses it: ``server``."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from trainmedic_core.setting_sources import SettingSource

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _listed(value: Any) -> Any:
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


def _network(value: Any) -> Any:
    if isinstance(value, ipaddress.IPv4Network | ipaddress.IPv6Network):
        return value
    try:
        return ipaddress.ip_network(value)
    except ValueError:
        raise ValueError("must be an address or a network, such as 10.0.3.7 or 10.0.3.0/24") from None


class AccessSettings(BaseModel):
    """Which proxies are believed, and whose users may act."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    trusted_proxies: Annotated[
        tuple[Annotated[Network, BeforeValidator(_network)], ...],
        BeforeValidator(_listed),
        SettingSource("TRAINMEDIC_TRUSTED_PROXIES", "--trusted-proxy", "CIDR", shown_default="none"),
    ] = Field(
        (),
        description="Networks, with commas between, from which X-Forwarded-User and X-Forwarded-Groups are believed: "
        "those of a proxy that signs people in, as oauth2-proxy does. Whoever it names may look. None by default, "
        "because anybody can send these headers.",
    )
    operator_groups: Annotated[
        tuple[str, ...],
        BeforeValidator(_listed),
        SettingSource("TRAINMEDIC_OPERATOR_GROUPS", "--operator-groups", "NAMES", shown_default="none"),
    ] = Field(
        (),
        description="Groups, with commas between, whose members may act where such a proxy names them. None by "
        "default: they may look only.",
    )
