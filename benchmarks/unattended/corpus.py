"""The text: this project's documentation, licence and source code in the checkout.

It is the same with the same commit; its digest is printed. The last tenth of every file is held out for validation.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CODE = ("app", "agent", "logs", "sdk/trainmedic")
_SOURCES = ("LICENSE", "README.md", "docs/**/*.md", "sdk/README.md", *(f"{folder}/**/*.py" for folder in _CODE))
_HELD_OUT = 0.1


@dataclass(frozen=True)
class Corpus:
    """Characters as numbers below ``vocabulary``, for training and validation."""

    training: bytes
    validation: bytes
    vocabulary: int
    digest: str


def _paths(root: Path) -> list[Path]:
    return [path for pattern in _SOURCES for path in sorted(root.glob(pattern))]


def keep(directory: Path) -> None:
    """Copy the present text, so that later processes learn the same one."""
    for path in _paths(ROOT):
        kept = directory / path.relative_to(ROOT)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, kept)


def load(root: Path = ROOT) -> Corpus:
    """Return the text, read in a fixed order. Other than ASCII becomes a question mark."""
    paths = _paths(root)
    texts = [path.read_text(encoding="utf-8").encode("ascii", "replace") for path in paths]
    characters = sorted(set(b"".join(texts)))
    codes = bytes(characters.index(code) if code in characters else 0 for code in range(256))
    training, validation = bytearray(), bytearray()
    for text in texts:
        cut = int(len(text) * (1 - _HELD_OUT))
        training += text[:cut].translate(codes)
        validation += text[cut:].translate(codes)
    digest = hashlib.sha256(b"\0".join(texts)).hexdigest()[:12]
    return Corpus(bytes(training), bytes(validation), len(characters), digest)
