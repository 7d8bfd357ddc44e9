"""Step and event records from log lines, normalised to the SDK's names (``step``, ``loss``, ``learning_rate`` …).

Formats: JSON, also nested, Python dictionaries, Megatron-LM, torchtitan, and text (``step_lines``).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainmedic_logs.lines import blocks, step_lines
from trainmedic_logs.lines.blocks import HEADING, TRACEBACK

EVENTS = (
    "step",
    "epoch",
    "evaluation",
    "checkpoint",
    "checkpoint_failed",
    "exception",
    "restart",
    "command",
    "detected",
    "end",
)
"""Known events; programs may add others."""
MOST_MEMBERS = 64
_LONGEST_TEXT = 1024  # characters of a member
_LONGEST_TRACEBACK = 6 * 1024  # characters, of the end
_NAMES: Mapping[str, str] = {
    "lr": "learning_rate",
    "train_loss": "loss",
    "lm loss": "loss",
    "lm-loss": "loss",
    "lm_loss": "loss",
    "grad norm": "grad_norm",
    "global_grad_norm": "grad_norm",
    "learning rate": "learning_rate",
    "current_steps": "step",
    "global_step": "step",
    "iteration": "step",
    "iter": "step",
    "memory(GiB)": "gpu_memory_gib",
    "number of nan iterations": "nan_iterations",
    "number of skipped iterations": "skipped_iterations",
    "consumed samples": "consumed_samples",
    "loss scale": "loss_scale",
}
# Rules do not search the words of these.
_NUMERIC_EVENTS = frozenset({"step", "epoch", "evaluation", "detected"})
_STEP_MEMBERS = frozenset({"loss", "grad_norm", "eval_loss"})
_STEP_MEMBER = re.compile("'(?:train_|eval_)?loss'|'grad_norm'")
_NUMBER_MEMBERS = frozenset({*_STEP_MEMBERS, "learning_rate", "epoch"})
_LONGEST_DICTIONARY = 2048
_NON_FINITE = {"nan": "nan", "inf": "inf", "+inf": "inf", "-inf": "-inf", "infinity": "inf", "-infinity": "-inf"}
_PLAIN_MEMBER = r"'[\w ./()%-]{1,60}': ?(?:-?(?:0|[1-9]\d{0,17})(?:\.\d{1,20})?(?:e[+-]?\d{1,3})?|'[\w ./:%+-]{0,60}')"
_PLAIN_DICTIONARY = re.compile(rf"\{{{_PLAIN_MEMBER}(?:, ?{_PLAIN_MEMBER}){{0,63}}\}}", re.ASCII)
_PYTHON_WORD = re.compile(r"(?<=[:\s,\[(])(-?)(nan|inf)(?=[\s,\])}])")
_STEP_OF_TOTAL = re.compile(r"(\d{1,12})/\d{1,12}")
_MEGATRON = re.compile(r"(?:\[[^\]]{1,40}\] )? ?iteration +(\d{1,12}) */ *\d{1,12} \|", re.ASCII)
_MEGATRON_PART = re.compile(
    r"\s*([A-Za-z][A-Za-z0-9 ()/_-]{0,60}?)\s*: *(-?[0-9][0-9.]{0,40}(?:[eE][+-]?\d{1,4})?|-?nan|-?inf)\s*$"
)
_TITAN = re.compile(
    r"(?:\[titan\] \S{10} \S{8},\d{1,3} - root - INFO - |^)step: *(\d{1,12}) +loss: *(\S{1,40})(.*)$", re.ASCII
)
_TITAN_PART = re.compile(r"(grad_norm|memory|tps|tflops|mfu): *(-?[0-9][0-9.,]{0,30}(?:[eE][+-]?\d{1,4})?|-?nan|-?inf)")

_DEEPEST, _MOST_OBJECTS = 5, 64  # levels and objects that are searched for nested metrics
_TEXT_MEMBERS = ("msg", "message", "text", "error")

REPORTS = (rb"\{[\"']", rb"iteration +\d+ */ *\d+ \|", rb"step: *\d+ +loss:", *step_lines.HINTS)
"""Byte patterns, one in every record line."""


class Report(NamedTuple):
    record: dict[str, Any]
    has_words: bool = False
    """As `Line.has_words`."""


def report_of(text: str) -> Report | None:
    """Return the record of a structured line or of a step in words."""
    record = record_of(text)
    if record is None:
        step = step_lines.step_of(text)
        return None if step is None else Report(step, has_words=True)
    has_words = record["event"] in _NUMERIC_EVENTS and any(isinstance(record.get(name), str) for name in _TEXT_MEMBERS)
    return Report(record, has_words and record["event"] != "detected")  # rules do not search a detector's message


def record_of(text: str) -> dict[str, Any] | None:
    """Return a structured line's record. Never raises."""
    begins = text[:1]
    if begins == "{":
        return _braced(text)
    if "iteration" in text[:80] and (match := _MEGATRON.search(text[:120])):
        return _megatron(text, match)
    if "step:" in text[:80] and "loss:" in text and (match := _TITAN.search(text[:1024])):
        return _titan(match)
    return None


def metrics_of(text: str) -> dict[str, Any]:
    report = report_of(text)
    if report is None:
        return step_lines.metrics_of(text)
    metrics = {} if not report.has_words or text.startswith("{") else step_lines.metrics_of(text)
    numbers = {name: value for name, value in report.record.items() if type(value) in (int, float)}
    return {**metrics, **numbers}


def words_of(record: Mapping[str, Any]) -> str:
    """Return a record's error and traceback as text, which rules match."""
    if record.get("event") in _NUMERIC_EVENTS:
        return ""
    error = ": ".join(str(record[name]) for name in ("error", "reason", "message") if record.get(name))
    traceback = str(record.get("traceback") or (TRACEBACK if record.get("event") == "exception" else ""))
    # The SDK's tracebacks end with a call, others with the exception.
    parts = (error, traceback) if blocks.has_ended(traceback.splitlines()) else (traceback, error)
    return "\n".join(each for each in parts if each)


def _braced(text: str) -> dict[str, Any] | None:
    text = text.rstrip()
    if not text.endswith("}"):
        return None
    value: Any = None
    try:
        if text.startswith('{"'):
            value = json.loads(text)
            if isinstance(value, dict) and (HEADING in text or '"exc_type"' in text):
                exception = _exception_members(value)
                # The exception's members come first, before the limit.
                return _normalised(exception | value | exception)
        elif text.startswith("{'") and len(text) <= _LONGEST_DICTIONARY and _STEP_MEMBER.search(text):
            # Python's repr of a dictionary; nan and inf are not literals.
            value = _plain_dictionary(text) or ast.literal_eval(_PYTHON_WORD.sub(r"'\g<1>\g<2>'", text))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    if not isinstance(value, dict):
        return None
    metrics = _metrics_in(value)
    return _normalised(value if metrics is None else {**metrics, **value})


def _metrics_in(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the nested object with a loss or gradient norm; None without one, or if `value` itself has one."""
    level, count = [value], 0
    for _ in range(_DEEPEST):
        inner: list[Mapping[str, Any]] = []
        for each in level:
            if any(_NAMES.get(name, name) in _STEP_MEMBERS and _is_number(each[name]) for name in each):
                return None if each is value else dict(each)
            inner += [member for member in list(each.values())[:MOST_MEMBERS] if isinstance(member, dict)]
        count += len(inner)
        if not inner or count > _MOST_OBJECTS:
            return None
        level = inner
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and value.lower() in _NON_FINITE)


def _exception_members(value: Mapping[str, Any]) -> dict[str, str]:
    traceback = _traceback(value)
    return {"event": str(value.get("event") or "exception"), "traceback": traceback} if traceback else {}


def _traceback(value: Mapping[str, Any], depth: int = 3) -> str:
    """Empty without one."""
    kind = value.get("exc_type")
    if isinstance(kind, str) and kind:  # some loggers write null into every line
        return f"{TRACEBACK}\n{kind}: {value.get('exc_value', '')}"
    for each in list(value.values())[:MOST_MEMBERS]:
        inner = each[0] if isinstance(each, list) and each else each
        if isinstance(inner, dict) and depth and (traceback := _traceback(inner, depth - 1)):
            return traceback
        if isinstance(inner, str) and HEADING in inner:
            cut = len(inner) - _LONGEST_TRACEBACK
            return inner if cut <= 0 else f"{TRACEBACK}\n{inner[cut:]}"
    return ""


def _plain_dictionary(text: str) -> Any:
    return json.loads(text.replace("'", '"')) if _PLAIN_DICTIONARY.fullmatch(text) else None


def _normalised(value: Mapping[Any, Any]) -> dict[str, Any] | None:
    """Return the plain members under their usual names, with an event. None without event, loss and gradient norm."""
    record: dict[str, Any] = {}
    for key, each in list(value.items())[:MOST_MEMBERS]:
        if isinstance(key, str) and (each is None or isinstance(each, (str, int, float, bool))):
            name = _NAMES.get(key, key)
            record[name] = each if name == "traceback" else _number(name, each)
    steps = value.get("global_step/max_steps")
    if isinstance(steps, str) and (match := _STEP_OF_TOTAL.fullmatch(steps)):
        record["step"] = int(match[1])
    if not isinstance(record.get("event"), str):
        if not _STEP_MEMBERS & record.keys():
            return None
        if "train_runtime" in record:
            record["event"] = "end"  # Hugging Face's final summary
        else:
            record["event"] = "step" if {"loss", "grad_norm"} & record.keys() else "evaluation"
    return record


def _number(name: str, value: Any) -> Any:
    if isinstance(value, str):
        word = _NON_FINITE.get(value.lower())
        written = word or (value if name in _NUMBER_MEMBERS else None)
        number = _as_float(written) if written else None
        return value[:_LONGEST_TEXT] if number is None else number
    if isinstance(value, int) and abs(value) > 1 << 63:  # float() would raise for the largest
        return float("inf") if value > 0 else float("-inf")
    return value


def _megatron(text: str, match: re.Match[str]) -> dict[str, Any] | None:
    record: dict[str, Any] = {"event": "step", "step": int(match[1])}
    for part in text[match.end() :].split("|")[:MOST_MEMBERS]:
        if pair := _MEGATRON_PART.match(part[:160]):
            value = _as_float(pair[2])
            if value is not None:
                record[_NAMES.get(pair[1], pair[1].replace(" ", "_"))] = value
    return record if len(record) > 2 else None


def _titan(match: re.Match[str]) -> dict[str, Any] | None:
    loss = _as_float(match[2])
    if loss is None:
        return None
    record: dict[str, Any] = {"event": "step", "step": int(match[1]), "loss": loss}
    for name, number in _TITAN_PART.findall(match[3]):
        value = _as_float(number)
        if value is not None:
            record["tokens_per_s" if name == "tps" else name] = value
    return record


def _as_float(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
