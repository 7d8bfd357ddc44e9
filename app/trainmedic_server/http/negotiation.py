"""Content negotiation by the Accept header (RFC 9110, section 12.5.1)."""

from __future__ import annotations

from collections.abc import Sequence


def preferred(accept: str | None, offered: Sequence[str]) -> str:
    """Return the media type of `offered` with the highest quality, the earlier of equals; the first if none fits."""
    if not accept:
        return offered[0]
    ranges = [_range(part) for part in accept.split(",")]
    qualities = [_quality(media_type, ranges) for media_type in offered]
    best = max(qualities)
    return offered[qualities.index(best)] if best > 0 else offered[0]


def _range(part: str) -> tuple[str, float]:
    media_range, *parameters = [piece.strip().lower() for piece in part.split(";")]
    quality = 1.0
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                quality = float(value)
            except ValueError:
                quality = 0.0
    return media_range, quality


def _quality(media_type: str, ranges: Sequence[tuple[str, float]]) -> float:
    for covering in (media_type, media_type.partition("/")[0] + "/*", "*/*"):
        for media_range, quality in ranges:
            if media_range == covering:
                return quality
    return 0.0
