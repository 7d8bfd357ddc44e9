"""Pictures as SVG, each with a table of the same values behind it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from markupsafe import Markup, escape
from msgspec import Struct

# Sizes are in the units of the view box. Colours are classes of the style sheet, so that both themes fit.
WIDE, TALL = 600, 96
_MARGIN = 6
_MOST_ROWS = 24  # values of a curve in its table
Points = Sequence[tuple[float, float | None]]  # (Seconds since 1970, value); None for an unknown value


class Mark(Struct, frozen=True):
    at: float
    text: str
    kind: str = "act"
    """``act``, ``back`` or ``bad``: a class of the style sheet."""


class Day(Struct, frozen=True):
    day: str
    counts: Mapping[str, int]


def curve(name: str, points: Points, unit: str = "", marks: Iterable[Mark] = (), limit: float | None = None) -> Markup:
    """Gaps stay gaps. Empty with fewer than two values."""
    measured = [(at, value) for at, value in points if value is not None]
    if len(measured) < 2:
        return Markup("")
    begin, end = points[0][0], points[-1][0]
    visible = sorted((mark for mark in marks if begin <= mark.at <= end), key=lambda mark: mark.at)
    values = [value for _, value in measured]
    scale = values if limit is None else [*values, limit]
    low, high = min(scale), max(scale)
    width, height = (end - begin) or 1.0, (high - low) or 1.0

    def across(at: float) -> str:
        return f"{WIDE * (at - begin) / width:.1f}"

    def down(value: float) -> str:
        return f"{TALL - _MARGIN - (TALL - 2 * _MARGIN) * (value - low) / height:.1f}"

    parts = [_line("limit", "0", str(WIDE), down(limit), down(limit))] if limit is not None else []
    parts += [_line(f"mark {mark.kind}", across(mark.at), across(mark.at), "0", str(TALL)) for mark in visible]
    for stretch in _stretches(points):
        parts.append(
            Markup('<polyline class="curve" points="{}"/>').format(
                " ".join(f"{across(at)},{down(value)}" for at, value in stretch)
            )
        )
    first, last = number(values[0]), number(values[-1])
    suffix = f" {unit}" if unit else ""
    label = f"{name}: from {first} to {last}{suffix}, lowest {number(min(values))}, highest {number(max(values))}"
    caption = Markup("<b>{}</b> {} → {}{} <span class=dim>{} to {}{}</span>").format(
        name, first, last, suffix, number(min(values)), number(max(values)),
        f"; the dashed line is {number(limit)}" if limit is not None else "",
    )  # fmt: skip
    rows = [(clock(at), number(value), "") for at, value in _thinned(measured)]
    rows += [(clock(mark.at), "", mark.text) for mark in visible]
    times = Markup("<div class=axis><span>{}</span>{}<span>{}</span></div>").format(
        clock(begin), _legend(visible), clock(end)
    )
    return _figure(label, caption, parts, times, ("Time (UTC)", f"{name}{suffix}", "Event"), rows)


def days(name: str, counted: Sequence[Day]) -> Markup:
    """Empty without any count."""
    kinds = list(dict.fromkeys(kind for day in counted for kind in day.counts))
    highest = max((sum(day.counts.values()) for day in counted), default=0)
    if not highest:
        return Markup("")
    step = WIDE / len(counted)
    parts = []
    for place, day in enumerate(counted):
        top = float(TALL)
        for order, kind in enumerate(kinds):
            tall = (TALL - _MARGIN) * day.counts.get(kind, 0) / highest
            if not tall:
                continue
            top -= tall
            parts.append(
                Markup('<rect class="bar-{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
                    order,
                    f"{place * step + 1:.1f}",
                    f"{top:.1f}",
                    f"{max(step - 2, 1):.1f}",
                    f"{tall:.1f}",
                    f"{day.day}: {day.counts[kind]} {kind}",
                )
            )
    key = Markup(" ").join(
        Markup('<span><svg class="key" viewBox="0 0 9 9" aria-hidden="true"><rect class="bar-{}" width="9" height="9"/>'
               "</svg> {}</span>").format(order, kind)
        for order, kind in enumerate(kinds)
    )  # fmt: skip
    label = f"{name}, {counted[0].day} to {counted[-1].day}, at most {highest} in a day"
    caption = Markup("<b>{}</b> {} <span class=dim>at most {} in a day</span>").format(name, key, highest)
    axis = Markup("<div class=axis><span>{}</span><span>{}</span></div>").format(counted[0].day, counted[-1].day)
    rows = [(day.day, *(str(day.counts.get(kind, 0)) for kind in kinds)) for day in counted]
    return _figure(label, caption, parts, axis, ("Day", *kinds), rows)


def spark(values: Sequence[float], label: str) -> Markup:
    """Values are oldest first. Empty with fewer than two."""
    if len(values) < 2:
        return Markup("")
    low, high = min(values), max(values)
    points = " ".join(
        f"{place * 4},{22 - 20 * (value - low) / ((high - low) or 1):.1f}" for place, value in enumerate(values)
    )
    return Markup(
        '<svg class="spark" viewBox="0 0 {} 24" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<polyline points="{}"/></svg>'
    ).format((len(values) - 1) * 4, label, points)


def gauge(value: float, least: float, most: float, label: str, mark: float | None = None) -> Markup:
    span = (most - least) or 1.0

    def share(amount: float) -> str:
        return f"{100 * max(0.0, min(1.0, (amount - least) / span)):.1f}"

    line = _line("mark", share(mark), share(mark), "0", "8") if mark is not None else Markup("")
    return Markup(
        '<svg class="gauge" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="rest" width="100" height="8"/><rect class="fill" width="{}" height="8"/>{}</svg>'
    ).format(label, share(value), line)


def number(value: float) -> str:
    """Format briefly: ``2.057``, ``1.50e-04``, ``41234``."""
    if value and (abs(value) >= 1e7 or abs(value) < 1e-3):
        return f"{value:.2e}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M")


def _figure(
    label: str,
    caption: Markup,
    parts: Sequence[Markup],
    below: Markup,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> Markup:
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(each) for each in heads)
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(Markup("").join(Markup("<td>{}</td>").format(cell) for cell in row))
        for row in rows
    )
    return Markup(
        '<figure class="picture"><figcaption>{}</figcaption>'
        '<svg viewBox="{}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>{}'
        "<details><summary>As a table</summary><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></details>"
        "</figure>"
    ).format(caption, f"0 0 {WIDE} {TALL}", label, Markup("").join(parts), below, head, body)


def _line(kind: str, x1: str, x2: str, y1: str, y2: str) -> Markup:
    return Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(kind, x1, x2, y1, y2)


def _legend(marks: Sequence[Mark]) -> Markup:
    notes = (Markup('<span class="{}">{} {}</span>').format(mark.kind, clock(mark.at), mark.text) for mark in marks[:4])
    more = f" and {len(marks) - 4} more" if len(marks) > 4 else ""
    return Markup(" ").join(notes) + escape(more)


def _stretches(points: Points) -> Iterable[list[tuple[float, float]]]:
    stretch: list[tuple[float, float]] = []
    for at, value in points:
        if value is not None:
            stretch.append((at, value))
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _thinned(measured: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    step = -(-len(measured) // _MOST_ROWS)
    return [*measured[::step], *([measured[-1]] if (len(measured) - 1) % step else [])]
