"""Static files under names with a content hash, cached permanently."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from starlette.responses import Response

PREFIX = "/static/"
_DIRECTORY = Path(__file__).with_name("static")
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


class Asset(Struct, frozen=True):
    url: str
    media_type: str
    content: bytes
    compressed: bytes


class Assets:
    def __init__(self, directory: Path = _DIRECTORY) -> None:
        self._by_name = {path.name: _asset(path) for path in sorted(directory.iterdir()) if path.suffix in _TYPES}
        self._by_url: Mapping[str, Asset] = {asset.url: asset for asset in self._by_name.values()}

    def url(self, name: str) -> str:
        return self._by_name[name].url

    @property
    def all(self) -> Mapping[str, Asset]:
        return self._by_name

    def response(self, path: str, accepts_gzip: bool) -> Response | None:
        asset = self._by_url.get(path)
        if asset is None:
            return None
        headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
        if accepts_gzip:
            headers["Content-Encoding"] = "gzip"
        return Response(
            asset.compressed if accepts_gzip else asset.content, media_type=asset.media_type, headers=headers
        )


def _asset(path: Path) -> Asset:
    content = path.read_bytes()
    mark = hashlib.sha256(content).hexdigest()[:12]
    url = f"{PREFIX}{path.stem}.{mark}{path.suffix}"
    return Asset(url, _TYPES[path.suffix], content, gzip.compress(content, 9, mtime=0))
