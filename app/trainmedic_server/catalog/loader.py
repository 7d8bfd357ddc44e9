"""One file of playbooks: what it holds, and everything that is wrong with it.

Callers: ``library``, and ``check`` of the simulation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainmedic_server import errors
from trainmedic_server.catalog import attachments, yaml_text
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.catalog.compiler import compile_document
from trainmedic_server.catalog.problems import FileProblem
from trainmedic_server.domain.target import IdentityLabels
from trainmedic_server.ports.actions import Actions

TEST_SUFFIX = "_test"
"""``<name>_test.yaml`` beside a playbook holds its tests."""
_ENDINGS = (".yaml", ".yml")

Attached = Mapping[Path, str | FileProblem]


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """What a file held."""

    path: Path
    digest: str
    """SHA-256 of its bytes and those of the files that it names; empty where they could not be read."""
    playbooks: tuple[YamlPlaybook, ...] = ()
    problems: tuple[FileProblem, ...] = ()


def load(
    text: str, source: str, actions: Actions, identity: IdentityLabels, attached: Attached | None = None
) -> tuple[list[YamlPlaybook], list[FileProblem]]:
    """Return the playbooks that `text` holds, and the problems of all its documents.

    `attached` are the texts of the files that they name; None where the text is complete.
    """
    documents, problems = yaml_text.read(text, source)
    playbooks: list[YamlPlaybook] = []
    if problems:
        # A document whose YAML is in doubt may not mean what it says; the others' problems are reported too.
        results = [compile_document(document, actions, identity) for document in documents]
        problems.extend(problem for result in results if isinstance(result, list) for problem in result)
        return [], sorted(set(problems))
    for document in documents:
        whole = document if attached is None else attachments.attach(document, attached)
        made = whole if isinstance(whole, list) else compile_document(whole, actions, identity)
        if isinstance(made, YamlPlaybook):
            playbooks.append(made)
        else:
            problems.extend(made)
    return playbooks, problems


def load_one(text: str, source: str, actions: Actions, identity: IdentityLabels = IdentityLabels()) -> YamlPlaybook:
    """Return the one playbook that `text` holds. Raises PlaybookError with everything that is wrong."""
    playbooks, problems = load(text, source, actions, identity)
    if problems or len(playbooks) != 1:
        raise errors.PlaybookError("\n".join(map(str, problems)) or f"{source}: not one playbook, but {len(playbooks)}")
    return playbooks[0]


def load_file(
    path: Path, actions: Actions, identity: IdentityLabels = IdentityLabels(), before: LoadedFile | None = None
) -> LoadedFile:
    """Return the file's content; `before` itself where that has not changed."""
    raw = _read(path)
    if isinstance(raw, FileProblem):
        return LoadedFile(path, "", (), (raw,))
    text = yaml_text.decode(raw, str(path))
    if isinstance(text, FileProblem):
        return LoadedFile(path, hashlib.sha256(raw).hexdigest(), (), (text,))
    attached = _attached(text, str(path))
    contents = [raw, *(str(text).encode() for text in attached.values())]
    digest = hashlib.sha256(b"\0".join(contents)).hexdigest()
    if before is not None and before.digest == digest:
        return before
    playbooks, problems = load(text, str(path), actions, identity, attached)
    return LoadedFile(path, digest, tuple(playbooks), tuple(problems))


def _attached(text: str, source: str) -> Attached:
    """Return the texts of the files that the playbooks in `text` name, or why one cannot be read."""
    if attachments.PARAMETER not in text:
        return {}  # nearly every file; it is not read twice
    documents, _ = yaml_text.read(text, source)
    return {path: read_text(path) for document in documents for path in attachments.paths(document)}


def read_text(path: Path) -> str | FileProblem:
    """Return the text of a file, or why it cannot be read."""
    raw = _read(path)
    return raw if isinstance(raw, FileProblem) else yaml_text.decode(raw, str(path))


def _read(path: Path) -> bytes | FileProblem:
    try:
        if not path.is_file():
            return FileProblem(
                str(path), None, None, "not a regular file" if path.exists() else "there is no such file"
            )
        with path.open("rb") as file:
            # One byte more than is allowed shows that there is more, however large the file is.
            return file.read(yaml_text.MAX_BYTES + 1)
    except OSError as error:
        return FileProblem(str(path), None, None, f"cannot be read: {error.strerror or type(error).__name__}")


def playbook_files(root: Path) -> Iterator[Path]:
    """Yield the playbook files of a directory and of the directories in it, in order; or `root`, if it is a file.

    Names that begin with a dot are left out: editors keep half-written files there, and Kubernetes
    keeps in ``..data`` the files that the names beside it link to.
    """
    yield from (
        path for path in _yaml_files(root) if root.is_file() or not (is_test(path) or attachments.is_template(path))
    )


def test_files(root: Path) -> Iterator[Path]:
    """Yield the files with tests, found as `playbook_files` finds playbooks."""
    yield from (path for path in _yaml_files(root) if root.is_file() or is_test(path))


def is_test(path: Path) -> bool:
    return path.stem.endswith(TEST_SUFFIX)


def _yaml_files(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    for path in _visible(root):
        if path.is_dir():
            yield from (inner for inner in _visible(path) if inner.suffix in _ENDINGS and not inner.is_dir())
        elif path.suffix in _ENDINGS:
            yield path


def _visible(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    except OSError:
        return []
