"""Metrics in text lines: adjacent names and numbers, such as `Step 100: loss=1.234, lr=1e-4, time=0.5s`.

Other losses, such as `policy loss`, are excluded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_LONGEST = 1024
_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,18}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,4})?|\.\d{1,20}|nan|inf(?:inity)?)"
)
_PAIR = re.compile(
    r"(?<![A-Za-z0-9_])(?P<name>[a-z][\w@./]{0,60}(?:[ -][a-z][\w@./]{0,40}){0,2})(?: ?\((?P<of>[a-z]{1,5})\))?"
    rf"['\"]?(?: {{0,8}}[:=] {{0,8}}| {{1,8}})[\[(]{{0,2}}(?:tensor\()? {{0,8}}(?P<number>{_NUMBER})"
    r"(?![\w:]*:\d)(?P<scale>[KMB](?![A-Za-z0-9]))?(?P<unit> ?(?:ms|s|secs?|seconds)\b)?(?!\.?[A-Za-z0-9])",
    re.IGNORECASE,
)
HINTS = (
    rb"(?i:loss)['\"]?[ \t:=\[(]{1,12}(?:tensor\()?[-+.\dnNiI]",
    rb"(?i:data|reader)(?i:[ _](?:time|cost|load(?:ing)?[ _]time))?(?: ?\(\w{1,5}\))?['\"]?[ \t:=]{1,10}\d",
)
"""Byte patterns, one in every line that `step_of` reads."""
_HINT = re.compile(b"|".join(HINTS).decode())
# Place of a logging call, such as `train:main:42 - `, whose number is no metric.
_SOURCE_PLACE = re.compile(r"[\w.<>/-]{1,80}:[\w<>]{1,60}:\d{1,6}(?= [-|] )")
_SPLIT = re.compile(r"[\s_/.-]+")
_MEMORY = re.compile(
    r"\bGPU[ #:]{0,2}(?P<gpu>\d{1,3})\b[ :]{1,3}(?:mem(?:ory)?[ :=]{1,3})?(?P<used>\d{1,7}(?:\.\d{1,6})?) ?"
    r"(?P<unit>[KMGT]i?B) ?/ ?(?P<total>\d{1,7}(?:\.\d{1,6})?) ?(?P<of>[KMGT]i?B)\b",
    re.IGNORECASE,
)
_LOSS = "loss"
_NAMES: Mapping[str, str] = {
    "step": "step",
    "iter": "step",
    "iteration": "step",
    "num updates": "step",
    "epoch": "epoch",
    _LOSS: _LOSS,
    "lr": "learning_rate",
    "learning rate": "learning_rate",
    "grad norm": "grad_norm",
    "gradient norm": "grad_norm",
    "gnorm": "grad_norm",
    "accuracy": "accuracy",
    "acc": "accuracy",
    "acc@1": "accuracy",
    "perplexity": "perplexity",
    "ppl": "perplexity",
    "time": "step_s",
    "step time": "step_s",
    "batch time": "step_s",
    "batch": "step_s",
    "batch cost": "step_s",
    "dt": "step_s",
    "data": "data_s",
    "data time": "data_s",
    "data loading time": "data_s",
    "data load time": "data_s",
    "reader cost": "data_s",
    "tps": "tokens_per_s",
    "tok sec": "tokens_per_s",
    "tok s": "tokens_per_s",
    "tokens sec": "tokens_per_s",
    "tokens s": "tokens_per_s",
    "tokens per sec": "tokens_per_s",
    "tokens per second": "tokens_per_s",
    "samples s": "samples_per_s",
    "samples sec": "samples_per_s",
    "samples per sec": "samples_per_s",
    "samples per second": "samples_per_s",
}
_TRAINING_WORDS = frozenset(
    {"train", "training", "lm", "total", "avg", "average", "mean", "batch", "step", "running", "reduced", "smoothed"}
    | {"info", "debug", "warning", "error", "log", "cur", "current", "rank0", "the"}
)
_EVALUATION_WORDS = frozenset(["val", "valid", "validation", "eval", "evaluation", "test", "dev"])
# Words before `time` that mean another time than the step's.
_OTHER_TIME_WORDS = frozenset(
    {"total", "elapsed", "eta", "remaining", "wall", "start", "end", "last", "max", "min", "data", "load", "queue"}
    | {"compute", "gen"}
)
_COUNTERS = frozenset({"step", "epoch"})
_SECONDS = frozenset({"step_s", "data_s"})
_SCALES = {"K": 1000, "k": 1000, "M": 1_000_000, "B": 1_000_000_000}  # a small m or b can be another unit
_BYTE_EXPONENTS = {"k": 1, "m": 2, "g": 3, "t": 4}
_EVALUATION_TEXT = re.compile(
    r"\b(?:test|val|valid|validation|eval|evaluating|evaluation|inference|predict\w*)\b", re.IGNORECASE
)
# Text about settings or the best loss so far.
_SETTINGS_TEXT = re.compile(
    r"--[a-z]|\b(?:usage|default|defaults|config\w*|argument\w*|args|hparams|hyper-?parameters?|namespace|threshold"
    r"|target|best|lowest|help|example|expected|patience|early ?stopping)\b",
    re.IGNORECASE,
)


def metrics_of(text: str) -> dict[str, Any]:
    """Return metrics: `step_s` and `data_s` in seconds, `gpu_memory_bytes`, `gpu_memory_ratio` from 0 to 1."""
    text = _SOURCE_PLACE.sub("", text[:_LONGEST])
    metrics: dict[str, Any] = {}
    for pair in _PAIR.finditer(text):
        name = _name_of(pair["name"])
        if name and name not in metrics and (value := _value(name, pair)) is not None:
            metrics[name] = value
    if ("GPU" in text or "gpu" in text) and (memory := _MEMORY.search(text)):
        metrics |= _memory(memory)
    return metrics


def step_of(text: str) -> dict[str, Any] | None:
    """Return the record of a line with a loss and a step, epoch or learning rate, or with step and data times."""
    text = text[:_LONGEST]
    lower = text.lower()
    if not ("loss" in lower or "data" in lower or "reader" in lower) or not _HINT.search(text):
        return None
    metrics = metrics_of(text)
    if _SETTINGS_TEXT.search(text):
        return None
    has_times = "data_s" in metrics and "step_s" in metrics and not _EVALUATION_TEXT.search(text)
    if not has_times:
        metrics.pop("data_s", None)
    is_counted = not _COUNTERS.isdisjoint(metrics) or "learning_rate" in metrics
    if (is_counted and _LOSS in metrics) or has_times:
        return {"event": "step", **metrics}
    return {"event": "evaluation", **metrics} if is_counted and "eval_loss" in metrics else None


def _name_of(written: str) -> str:
    """Return the metric's name by the last words, "" for other numbers."""
    words = [word for word in _SPLIT.split(written.lower()) if word]
    for count in (3, 2, 1):
        name = _NAMES.get(" ".join(words[-count:])) if len(words) >= count else None
        if name is None:
            continue
        before = words[-count - 1] if len(words) > count else ""
        if name == _LOSS:
            if before in _EVALUATION_WORDS:
                return "eval_loss"
            return _LOSS if not before or before in _TRAINING_WORDS else ""
        if name == "step_s" and before in _OTHER_TIME_WORDS:
            return ""
        return name
    return ""


def _value(name: str, pair: re.Match[str]) -> float | int | None:
    number = pair["number"].replace(",", "")
    scale = _SCALES.get(pair["scale"] or "", 1)
    if name in _COUNTERS and number.isdecimal():
        return int(number) * scale
    value = float(number) * scale
    if name in _SECONDS:
        # A time has a fraction or unit; `batch 12` is a number.
        unit = (pair["unit"] or pair["of"] or "").strip().lower()
        if not math.isfinite(value) or not (unit or "." in number):
            return None
        return value / 1000 if unit == "ms" else value
    if name == "step" or (name == "epoch" and not math.isfinite(value)):
        return None
    return value


def _memory(memory: re.Match[str]) -> dict[str, Any]:
    used, total = _bytes(memory["used"], memory["unit"]), _bytes(memory["total"], memory["of"])
    ratio = {"gpu_memory_ratio": round(used / total, 4)} if total else {}
    return {"gpu": int(memory["gpu"]), "gpu_memory_bytes": used, "gpu_memory_total_bytes": total, **ratio}


def _bytes(number: str, unit: str) -> int:
    base = 1024.0 if "i" in unit.lower() else 1000.0
    return round(float(number) * math.pow(base, _BYTE_EXPONENTS[unit[0].lower()]))
