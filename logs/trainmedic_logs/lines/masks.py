"""Masking of secrets before a line leaves its node: common token formats, passwords in URLs, and values after names
such as ``api_key``; not every secret.
"""

from __future__ import annotations

import re2

MASK = "***"
# Every line with a secret that is masked contains one of these.
_HINTS = re2.compile(
    rb"(?i)pass(?:word|wd|phrase)|secret|token|api[-_]?key|access[-_]?key|private[-_]?key|credential|authoriz|bearer|://"
    rb"|gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-|akia|asia|eyj|wandb|aiza|dckr_pat|npm_|nvapi-|sig(?:nature)?=|-----begin"
)
_TOKENS = re2.compile(
    rb"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}"
    rb"|nvapi-[\w-]{20,}|dckr_pat_[\w-]{20,}|npm_[A-Za-z0-9]{30,}|xox[abprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    rb"|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
    rb"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[^-]|-[^-])*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
# Secrets between two groups, which stay.
_AFTER_NAMES = (
    re2.compile(rb"(?i)(authorization[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer|token|digest) )?)[^\s\"',]{4,}()"),
    re2.compile(rb"(?i)(\bbearer )[\w.~+/=-]{8,}()"),
    re2.compile(rb"(\w://[^\s/:@]*:)[^\s/@]+(?:@[^\s/@\"',]*)*(@)"),  # also an unescaped @ in the password
    re2.compile(rb"(?i)([?&](?:sig|signature|x-amz-signature|x-amz-security-token|access_token)=)[^&\s\"']{4,}()"),
    re2.compile(rb"(?i)(\bwandb\b[^\n]{0,60}[ :=])[0-9a-f]{40}\b()"),
)
# Names and their values.
_NAMED = re2.compile(
    rb"(?i)((?:password|passwd|passphrase|secret(?:[-_]?(?:access[-_]?)?key)?|token|api[-_]?key|access[-_]?key(?:[-_]?id)?"
    rb"|private[-_]?key|credentials?)[\"']?\s{0,3}[=:]\s{0,3}[\"']?)([^\s\"',;)}\]]{4,})"
)
# Values that are no secrets.
_HARMLESS = re2.compile(rb"(?i)[-+\d.,]+(?:e[-+]?\d+)?|none|null|true|false|<.*|\*\*\*.*")


def masked(text: str) -> str:
    raw = text.encode(errors="replace")
    if _HINTS.search(raw) is None:
        return text
    raw = _TOKENS.sub(MASK.encode(), raw)
    for pattern in _AFTER_NAMES:
        raw = pattern.sub(rb"\1" + MASK.encode() + rb"\2", raw)
    cleaned: bytes = _NAMED.sub(_named, raw)
    return cleaned.decode("utf-8", "replace")


def _named(match: re2._Match) -> bytes:
    name, value = match.group(1), match.group(2)
    kept: bytes = value if _HARMLESS.fullmatch(value) else MASK.encode()
    return bytes(name) + kept
