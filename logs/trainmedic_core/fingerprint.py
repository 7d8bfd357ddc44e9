"""Identity of an alert by its labels. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_FNV_OFFSET = 14695981039346656037
_FNV_PRIME = 1099511628211
_64_BITS = (1 << 64) - 1


def fingerprint(labels: Mapping[str, str]) -> str:
    # 64-bit FNV-1a over names and values in name order, each followed by byte 255 (prometheus/common,
    # model/signature.go, labelSetToFingerprint).
    value = _FNV_OFFSET
    for name in sorted(labels):
        for byte in b"%b\xff%b\xff" % (name.encode(), labels[name].encode()):
            value = ((value ^ byte) * _FNV_PRIME) & _64_BITS
    return f"{value:016x}"
