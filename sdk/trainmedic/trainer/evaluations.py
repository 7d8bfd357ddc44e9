"""The loss and the perplexity of an evaluation, among the metrics that a Trainer tells its callbacks.

Who calls it: the callbacks, which report them. Not here: when an evaluation is.
"""

from __future__ import annotations

import math
import re
from typing import Any, Mapping

_KIND = r"(?:val|valid|validation|eval)[_/.-]"
_LOSS = re.compile(rf"^{_KIND}(?:.*[_/.-])?loss(?:_epoch)?$")
_PERPLEXITY = re.compile(rf"^{_KIND}(?:.*[_/.-])?(?:perplexity|ppl)(?:_epoch)?$")


def loss_and_perplexity(metrics: Mapping[str, Any], is_of_tokens: bool = False) -> tuple[Any, Any]:
    """Both by their usual names, None where there is none. Of several, as of several data sets, the shortest counts.

    ``is_of_tokens`` says that the loss is the mean cross entropy of tokens, whose exponential is the perplexity.
    """
    loss, perplexity = _named(metrics, _LOSS), _named(metrics, _PERPLEXITY)
    if perplexity is None and is_of_tokens and isinstance(loss, (int, float)):
        perplexity = math.exp(loss) if loss < 700 else math.inf  # beyond, it is no float
    return loss, perplexity


def _named(metrics: Mapping[str, Any], pattern: re.Pattern[str]) -> Any:
    names = sorted((name for name in metrics if pattern.match(name)), key=lambda name: (len(name), name))
    return metrics[names[0]] if names else None
