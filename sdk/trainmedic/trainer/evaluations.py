"""Metrics of an evaluation in a framework's log values."""

from __future__ import annotations

import math
import re
from typing import Any, Mapping

_PREFIX = r"(?:val|valid|validation|eval)[_/.-]"
_ANY_METRIC = re.compile(rf"^{_PREFIX}(.+)$")
_NO_RESULT = re.compile(r"(?:^|[_/.-])(?:runtime|(?:samples|steps|tokens)_per_second|time|epoch|step|steps|samples)$")
_ARGUMENTS = ("loss", "perplexity", "step")  # of `Medic.report_evaluation`, no names of metrics
_LOSS = re.compile(rf"^{_PREFIX}(?:.*[_/.-])?loss(?:_epoch)?$")
_PERPLEXITY = re.compile(rf"^{_PREFIX}(?:.*[_/.-])?(?:perplexity|ppl)(?:_epoch)?$")


def loss_and_perplexity(metrics: Mapping[str, Any], is_of_tokens: bool = False) -> tuple[Any, Any]:
    """Return both by their usual names; None if missing.

    ``is_of_tokens``: the loss is tokens' mean cross entropy, whose exponential is the perplexity.
    """
    loss, perplexity = _shortest_named(metrics, _LOSS), _shortest_named(metrics, _PERPLEXITY)
    if perplexity is None and is_of_tokens and isinstance(loss, (int, float)):
        perplexity = math.exp(loss) if loss < 700 else math.inf  # larger values overflow
    return loss, perplexity


def other_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics other than loss, perplexity and times, by name without prefix."""
    others: dict[str, Any] = {}
    for name, value in metrics.items():
        match = _ANY_METRIC.match(name)
        is_value = (isinstance(value, (int, float)) and not isinstance(value, bool)) or hasattr(value, "detach")
        if match and is_value and not (_LOSS.match(name) or _PERPLEXITY.match(name) or _NO_RESULT.search(match[1])):
            others[match[1]] = value
    return {name: value for name, value in others.items() if name not in _ARGUMENTS}


def _shortest_named(metrics: Mapping[str, Any], pattern: re.Pattern[str]) -> Any:
    names = sorted((name for name in metrics if pattern.match(name)), key=lambda name: (len(name), name))
    return metrics[names[0]] if names else None
