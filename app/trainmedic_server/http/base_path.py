"""Path of the external URL, in links, redirects and cookies."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

OWN_NAMES = frozenset(
    {
        *("agents", "alerts", "approvals", "audit", "channels", "console", "docs", "events", "explain", "findings"),
        *("health", "history", "jobs", "kept", "login", "logout", "logs", "metrics", "nodes", "now", "openapi"),
        *("pause", "pauses", "playbooks", "r", "ready", "report", "resume", "runs", "sessions", "settings", "static"),
        *("webhook", "why"),
    }
)
"""First words of this server's paths."""

_FIRST_WORD = re.compile(r"/*([A-Za-z0-9_-]*)")


class BasePath:
    """Path of `external_url`, removed from requests unless a proxy has stripped it."""

    def __init__(self, external_url: str = "") -> None:
        self.external_url = external_url
        self.link = urlsplit(external_url).path.rstrip("/")
        """Prefix for links, such as ``/trainmedic``. May be empty."""
        self._decoded = unquote(self.link)
        # With a base such as /jobs, /jobs/llm-1 is a job's page if the proxy strips the base.
        self._is_ambiguous = _first_word(self._decoded) in OWN_NAMES

    def strip(self, scope: MutableMapping[str, Any]) -> None:
        if not self.link:
            return
        stripped = self.within(scope["path"], self._decoded)
        if stripped == scope["path"]:
            return
        raw = scope.get("raw_path") or b""
        scope["path"] = stripped
        base = self.link.encode()
        scope["raw_path"] = (raw.removeprefix(base) or b"/") if raw.startswith(base) else quote(stripped).encode()

    def within(self, path: str, base: str | None = None) -> str:
        """Remove the base (by default the encoded one) from a path, unless a proxy has."""
        base = self.link if base is None else base
        if not base or not (path == base or path.startswith((f"{base}/", f"{base}?", f"{base}#"))):
            return path
        rest = path.removeprefix(base)
        if self._is_ambiguous and _first_word(rest) not in {"", *OWN_NAMES}:
            return path
        return rest if rest.startswith("/") else f"/{rest}"

    def over(self, path: str) -> str:
        """Return a path of this server as a browser requests it; other addresses unchanged."""
        return self.link + path if path.startswith("/") else path


def _first_word(path: str) -> str:
    match = _FIRST_WORD.match(path)
    assert match is not None
    return match[1]
