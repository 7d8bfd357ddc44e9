"""Progress of a training, learned from lines that repeat with a growing number.

A form (a line without numbers, times and bars) counts once its integer has grown repeatedly.
"""

from __future__ import annotations

import re

from msgspec import Struct, field

_LONGEST = 400  # characters of a line that are read
_LONGEST_FORM = 96  # characters; further ones, such as other metrics, may differ between a form's lines
_MOST_FORMS = 64
_GROWTHS_TO_LEARN = 2  # consecutive
# Words of lines that count something else, or appear during failures.
_NO_PROGRESS = re.compile(
    r"(?i)\b(?:retry\w*|retries|attempts?|reconnect\w*|wait(?:ing|ed|s)?|timed? ?out|timeout|time-out|heartbeats?|still"
    r"|sleep\w*|elapsed since|ping\w*|uptime|queued?|pending|error\w*|exception|traceback|failed|failure|warn\w*|fatal"
    r"|killed|abort\w*|nccl|watchdog|signal|sigterm|exitcode|exit code|allocated|memory usage|gpu util\w*|cpu util\w*"
    r"|restart\w*|rendezvous|stuck|hang\w*|hung|stalled|no progress|download\w*|fetching|resolving|frame #|File \""
    r"|Thread|loading checkpoint shards|polling|health|status)\b|ProcessGroup|\.(?:cpp|cc|cu):\d|\bpid[= :]"
)
_HAS_NUMBER = re.compile(r"\d")
_TIMES = re.compile(
    r"\d{4}[-/]\d\d[-/]\d\d[ T_]?|\b\d{1,2}[-/]\d\d[-/]\d\d\d?\d?\b"
    r"|\b\d{1,3}(?::\d\d){1,2}(?:[.,]\d{1,9})?Z?|\b[IWEF]\d{4}\b"
    r"|\b\d+ days?,? ?|\b\d{10}(?:\.\d{1,9})\b|<\?|\?(?=it|s/|B/)"
)
_BAR = re.compile(r"[\u2500-\u259f\u2800-\u28ff]+|\|[ #=>.\-\d/]{0,60}\||[#=>.\-]{6,}|(?<=\d%\|)[^|]{0,200}(?=\|)")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|\bnan\b|\binf\b)(?:[KkMGTB]i?B?\b)?|\bN/A\b")
_INTEGER = re.compile(r"\d[\d,]{0,15}\Z")
_EPOCH = re.compile(r"(?i)\bepoch['\"]?\s{0,3}[:=]\s{0,3}\Z")
_FRACTION = re.compile(r"\d{1,6}\.\d{1,12}\Z")
_BLANKS = re.compile(r"\s+")
_PREFIX = re.compile(r"^(?:\[?(?:INFO|DEBUG|SUCCESS|WARNING)\]?[\s:|-]*)+")


class _Form(Struct):
    numbers: tuple[float | None, ...]  # of the last line. None unless an integer or an epoch's fraction.
    grown: list[int] = field(default_factory=list)  # consecutive growths of each number
    is_learned: bool = False


class ProgressReader:
    def __init__(self) -> None:
        self._forms: dict[str, _Form] = {}

    def step_of(self, text: str) -> int | None:
        """Return the line's first grown number without its fraction, if its form is learned."""
        if not len(text) > 2 or not _HAS_NUMBER.search(text[:_LONGEST]) or _NO_PROGRESS.search(text[:_LONGEST]):
            return None
        form, numbers = _form_of(text[:_LONGEST])
        if not numbers or not re.search(r"[A-Za-z%|/]", form):
            return None
        state = self._forms.get(form)
        if state is None or len(state.numbers) != len(numbers):
            self._learn(form, numbers)
            return None
        return _step_if_grown(state, numbers)

    def _learn(self, form: str, numbers: tuple[float | None, ...]) -> None:
        if len(self._forms) >= _MOST_FORMS:
            unlearned = [each for each, state in self._forms.items() if not state.is_learned]
            oldest, *_ = unlearned or self._forms
            del self._forms[oldest]
        self._forms[form] = _Form(numbers, [0] * len(numbers))


def _step_if_grown(state: _Form, numbers: tuple[float | None, ...]) -> int | None:
    step: float | None = None
    for place, (before, now) in enumerate(zip(state.numbers, numbers, strict=True)):
        is_greater = before is not None and now is not None and now > before
        state.grown[place] = state.grown[place] + 1 if is_greater else 0
        if is_greater and step is None and (state.is_learned or state.grown[place] >= _GROWTHS_TO_LEARN):
            step = now
            state.is_learned = True
    state.numbers = numbers
    return None if step is None else int(step)


def _form_of(text: str) -> tuple[str, tuple[float | None, ...]]:
    text = _BAR.sub("~", _TIMES.sub("@", text))
    text = _PREFIX.sub("", text.strip())
    pieces: list[str] = []
    numbers: list[float | None] = []
    at = length = 0
    for match in _NUMBER.finditer(text):
        piece = text[at : match.start()]
        pieces += [piece, "#"]
        length += len(piece) + 1
        at = match.end()
        numbers.append(_counting_number(match[0], piece))
        if length >= _LONGEST_FORM:
            break
    else:
        pieces.append(text[at:])
    return _BLANKS.sub(" ", "".join(pieces))[:_LONGEST_FORM].rstrip(), tuple(numbers)


def _counting_number(text: str, before: str) -> float | None:
    if _INTEGER.match(text):
        return int(text.replace(",", ""))
    return float(text) if _EPOCH.search(before) and _FRACTION.match(text) else None
