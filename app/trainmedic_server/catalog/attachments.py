"""Files that playbook steps name by ``template:``.

They become part of the playbook's version under ``files``, so a run keeps its manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from trainmedic_core import yaml_files, yaml_text
from trainmedic_core.problems import DocumentPath as Place
from trainmedic_core.problems import FileProblem
from trainmedic_core.yaml_text import YamlDocument
from trainmedic_server.catalog import written_steps
from trainmedic_server.domain.playbook import EVERY_PHASE, place_of

PARAMETER = "template"
MANIFEST = "manifest"
"""Parameter with the template's content. An action with it accepts ``template``."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}_template\.ya?ml")


def named(document: YamlDocument) -> Iterator[tuple[Place, str]]:  # place of each name, and the name
    for phase in EVERY_PHASE:
        for index, entry in enumerate(written_steps.of(document.value, phase)):
            params = entry.get("with") if isinstance(entry, dict) else None
            if isinstance(params, dict) and isinstance(params.get(PARAMETER), str):
                yield (*place_of(phase), index, "with", PARAMETER), params[PARAMETER]


def paths(document: YamlDocument) -> list[Path]:
    return [Path(document.source).with_name(name) for _, name in named(document) if _NAME.fullmatch(name)]


def attach(document: YamlDocument, texts: Mapping[Path, str | FileProblem]) -> YamlDocument | list[FileProblem]:
    """Add the named files to the document and its text. Return the problems if one is missing."""
    if isinstance(document.value, dict) and "files" in document.value:
        return document  # It contains its files already.
    added: dict[str, str] = {}
    problems: list[FileProblem] = []
    for place, name in named(document):
        if name in added:
            continue
        if not _NAME.fullmatch(name):
            problems.append(
                document.problem(
                    place, f"template: {name!r} is not a file name that ends in {yaml_files.TEMPLATE_SUFFIX}.yaml"
                )
            )
            continue
        text = texts.get(Path(document.source).with_name(name))
        if isinstance(text, str):
            added[name] = text
        else:
            why = text.message if text is not None else "there is no such file next to the playbook"
            problems.append(document.problem(place, f"template: {name}: {why}"))
    if problems or not added:
        return problems or document
    text = with_texts(document, "files", added)
    if isinstance(text, FileProblem):
        return [text]
    return replace(document, value={**document.value, "files": added}, text=text)


def length(document: YamlDocument, name: str) -> int:  # characters of an attached file; 0 if it is missing
    files = document.value.get("files")
    text = files.get(name) if isinstance(files, dict) else None
    return len(text) if isinstance(text, str) else 0


def manifest(document: YamlDocument, place: Place, name: str) -> Mapping[str, Any] | list[FileProblem]:
    """Return the object in an attached file, or problems at `place`."""
    files = document.value.get("files")
    text = files.get(name) if isinstance(files, dict) else None
    if not isinstance(text, str):
        return [document.problem(place, f"template: there is no file {name!r} next to the playbook or in its files")]
    source = str(Path(document.source).with_name(name))
    documents, problems = yaml_text.read(text, source)
    if problems:
        return problems
    if len(documents) != 1 or not isinstance(documents[0].value, dict):
        return [FileProblem(source, 1, 1, "must contain one YAML mapping: the object to create")]
    mapping: Mapping[str, Any] = documents[0].value
    return mapping


def with_texts(document: YamlDocument, key: str, texts: Mapping[str, str]) -> str | FileProblem:
    """Append the texts to the document's, as a mapping under `key`."""
    margin = " " * (document.marks[()].column - 1)
    first = document.text.splitlines()[0] if document.text else ""
    if document.value and first.lstrip().startswith("{"):
        return document.problem((), f"cannot hold its {key}: write the playbook without the outer braces")
    lines = [document.text.rstrip("\n"), f"{margin}{key}:"]
    for name, content in texts.items():
        lines.append(f"{margin}  {name}: |2-")  # with its indentation: the content may begin with spaces
        lines.extend(f"{margin}    {line}" if line else "" for line in content.rstrip("\n").split("\n"))
    text = "\n".join(lines) + "\n"
    if len(text) > yaml_text.MAX_BYTES:
        # A resumed run could not read it again from the store.
        return document.problem((), f"together with its {key} it has over {yaml_text.MAX_BYTES} characters")
    return text
