"""Validation of `trainmedic.connect`'s arguments. Functions raise ConfigurationError."""

from __future__ import annotations

from typing import Any, Mapping

from trainmedic.errors import ConfigurationError
from trainmedic.job.handlers import LIVE, RESTART, UNSUPPORTED
from trainmedic.settings import Settings
from trainmedic.wire.connection import open_client


def check_options(capabilities: Mapping[str, str], largest_lr_scale: float, layer_norms: int) -> None:
    for action, how in capabilities.items():
        if how not in (LIVE, RESTART, UNSUPPORTED):
            raise ConfigurationError(f"capabilities: {action} is {how!r}; it can be live, restart or unsupported")
    is_number = isinstance(largest_lr_scale, (int, float)) and not isinstance(largest_lr_scale, bool)
    if not (is_number and 1.0 <= largest_lr_scale < float("inf")):
        raise ConfigurationError(f"largest_lr_scale is {largest_lr_scale!r}; it is a number of 1 or more")
    if isinstance(layer_norms, bool) or not isinstance(layer_norms, int) or layer_norms < 0:
        raise ConfigurationError(f"layer_norms is {layer_norms!r}; it is a whole number of layers, or 0 for none")


def check_numbers(metrics_port: Any, **seconds: Any) -> None:
    for name, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigurationError(f"{name} is {value!r}; it is a number of seconds above 0")
    if metrics_port is not None and (isinstance(metrics_port, bool) or not isinstance(metrics_port, int)):
        raise ConfigurationError(f"metrics_port is {metrics_port!r}; it is a port's number, or None")


def check_targets(**targets: Any) -> dict[str, float]:
    for amount, value in targets.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value < float("inf")):
            raise ConfigurationError(f"target_{amount}_per_second is {value!r}; it is a number above 0, or None")
    return {amount: float(value) for amount, value in targets.items() if value is not None}


def check_url(settings: Settings) -> None:
    """Check the URL without connecting; the error shows no password."""
    try:
        if settings.redis_url is not None:
            open_client(settings.redis_url).close()
    except ValueError as error:
        raise ConfigurationError(f"{settings.url_origin}: {error}") from None
