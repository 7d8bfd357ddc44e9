"""Docstrings and documentation stay short and in plain English.

The limits are those of well-written projects (kopf, structlog, httpx, warehouse), per 1,000 words. A statement that
opens with "What", "Who" or "Where" hides its subject. The private words replace usual terms: "told" stands for
"notified", "ill" for "unhealthy".
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "sdk": ("sdk/trainmedic",),
    "logs": ("logs/trainmedic_core", "logs/trainmedic_logs"),
    "agent": ("agent/trainmedic_agent",),
    "app": ("app/trainmedic_server",),
}
NOT_MANUAL = ("CHANGELOG.md", "tests/")
FIGURES = "benchmarks/"
"""Results of measurements, which grow without making the manual longer."""
PATTERNS = {
    "opens with What, Who or Whose": r"(?:^|(?<=[.!?] )|(?<=\| ))(?:What|Who|Whoever|Whose|Whom) [a-z]",
    "opens with Of, Where, Whether, So much or So many": r"(?:^|(?<=[.!?] ))(?:Of|Where|So much|So many|Whether) [a-z]",
    "has a private word": (
        r"\b(?:told|tells?|telling|heard|anew|ill|beside|whoever|whatever|thereby|owed|misfires?|whereabouts|worth)\b"
    ),
}
MOST_IN_DOCSTRINGS = dict(zip(PATTERNS, (0.3, 0.4, 0.6), strict=True))
MOST_IN_DOCS = dict.fromkeys(PATTERNS, 0.3)
"""Findings per 1,000 words."""
MOST_DOCSTRING_WORDS = 79_700
MOST_DOCS_WORDS = 53_000
SHOWN = 20
_WORD = re.compile(r"[A-Za-z']+")
_GENERATED = re.compile(r"/(?:\.|node_modules/|build/|dist/|vendor/)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`|<!--.*?-->|(?<=\])\([^)\s]*\)", re.DOTALL)
"""Code, comments and the targets of links."""


@dataclass(frozen=True)
class Passage:
    """A paragraph on one line, with the place where it begins."""

    place: str
    text: str

    @property
    def words(self) -> int:
        return len(_WORD.findall(self.text))


def paragraphs(file: str, first_line: int, text: str) -> Iterator[Passage]:
    """Yield the paragraphs of a text. List items, table rows and headings are paragraphs of their own."""
    lines: list[str] = []
    begin = first_line
    for number, line in enumerate(text.split("\n"), first_line):
        stripped = line.strip()
        if lines and (not stripped or stripped[0] in "-|*#" or lines[0][0] in "|#"):
            yield Passage(f"{file}:{begin}", " ".join(lines))
            lines = []
        if stripped:
            begin = begin if lines else number
            lines.append(stripped)
    if lines:
        yield Passage(f"{file}:{begin}", " ".join(lines))


@functools.cache
def docstrings(folders: tuple[str, ...]) -> list[Passage]:
    """Return the paragraphs of all strings that stand alone: docstrings, and descriptions of fields."""
    passages: list[Passage] = []
    for path in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    passages += paragraphs(str(path.relative_to(ROOT)), node.lineno, text)
    return passages


def manual() -> list[Passage]:
    """Return the paragraphs of all pages, without code."""
    passages: list[Passage] = []
    for path in sorted(ROOT.rglob("*.md")):
        name = str(path.relative_to(ROOT))
        if not name.startswith(NOT_MANUAL) and not _GENERATED.search(f"/{name}"):
            blank = _CODE.sub(lambda code: "x" + "\n" * code[0].count("\n"), path.read_text(encoding="utf-8"))
            passages += paragraphs(name, 1, blank)
    return passages


def faults(passages: list[Passage], limits: Mapping[str, float]) -> str:
    """Return the figures over their limit, each with its first places. Empty if all are within."""
    words = max(1, sum(passage.words for passage in passages))
    report = []
    for name, pattern in PATTERNS.items():
        places = [
            f"  {passage.place}: {passage.text[max(0, match.start() - 30) : match.end() + 60]}"
            for passage in passages
            for match in re.finditer(pattern, passage.text)
        ]
        share = 1000 * len(places) / words
        if share > limits[name]:
            report += [f"{name}: {share:.2f} of 1,000 words, at most {limits[name]}", *places[:SHOWN]]
    return "\n".join(report)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_are_plain(package: str) -> None:
    """Sentences start with their subject and use standard terms."""
    if report := faults(docstrings(PACKAGES[package]), MOST_IN_DOCSTRINGS):
        pytest.fail(report, pytrace=False)  # an assertion would cut it


def test_the_manual_is_plain() -> None:
    """The check covers all pages, the README and CONTRIBUTING."""
    if report := faults(manual(), MOST_IN_DOCS):
        pytest.fail(report, pytrace=False)


def test_docstrings_are_short() -> None:
    """The limit holds for all packages together."""
    words = {package: sum(each.words for each in docstrings(folders)) for package, folders in PACKAGES.items()}
    assert sum(words.values()) <= MOST_DOCSTRING_WORDS, words


def test_the_manual_is_short() -> None:
    """A failure shows the longest pages."""
    words: dict[str, int] = {}
    for passage in manual():
        page = passage.place.partition(":")[0]
        if not page.startswith(FIGURES):
            words[page] = words.get(page, 0) + passage.words
    if (total := sum(words.values())) > MOST_DOCS_WORDS:
        longest = sorted(words.items(), key=lambda page: -page[1])[:SHOWN]
        shown = "\n".join(f"  {page}: {count}" for page, count in longest)
        pytest.fail(f"{total} words, at most {MOST_DOCS_WORDS}\n{shown}", pytrace=False)


def test_an_unclear_text_is_found_and_a_plain_one_is_not() -> None:
    """The patterns find odd sentences in paragraphs and tables and report their line."""
    odd = "Return the name.\n\nWhat was told is kept. Where it is\nill, nobody knows.\n\n| a | Whose it is |"
    found = faults(list(paragraphs("page", 10, odd)), dict.fromkeys(PATTERNS, 0.0))
    assert "page:12: What was told" in found
    assert "page:15: | a | Whose it is |" in found
    assert "page:12: What was told is kept. Where it is" in found
    plain = "Return the name of the node. The agent notifies the server.\n\n- `x`: an unhealthy rank"
    assert faults(list(paragraphs("page", 1, plain)), dict.fromkeys(PATTERNS, 0.0)) == ""
