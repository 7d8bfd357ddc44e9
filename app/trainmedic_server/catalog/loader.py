"""One file of playbooks: what it holds, and everything that is wrong with it.

Callers: ``library``, and ``check`` of the simulation.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from msgspec import Struct

from trainmedic_server import errors, telemetry
from trainmedic_server.catalog import attachments, yaml_text
from trainmedic_server.catalog.allowance import Allowance
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.catalog.compiler import compile_document
from trainmedic_server.catalog.yaml_text import YamlDocument
from trainmedic_server.domain.problems import FileProblem
from trainmedic_server.domain.target import IdentityLabels
from trainmedic_server.ports.actions import Actions

MOST_DOCUMENTS = 500
"""Playbooks in one file."""
MOST_PROBLEMS = 100
"""Of one file that are told."""
MOST_FILES = 1_000
MOST_ENTRIES = 10_000
"""Names in a directory of playbooks; what has more is some other directory."""
TEST_SUFFIX = "_test"
"""``<name>_test.yaml`` beside a playbook holds its tests."""
LOG_RULE = "log_rule"
"""The key that makes a document a log rule, and no playbook."""
_ENDINGS = (".yaml", ".yml")

log = telemetry.logger(__name__)

Attached = Mapping[Path, str | FileProblem]


class LoadedFile(Struct, frozen=True):
    """What a file held."""

    path: Path
    digest: str
    """SHA-256 of its bytes and those of the files that it names; empty where they could not be read."""
    playbooks: tuple[YamlPlaybook, ...] = ()
    problems: tuple[FileProblem, ...] = ()


def load(
    text: str, source: str, actions: Actions, identity: IdentityLabels, attached: Attached | None = None
) -> tuple[list[YamlPlaybook], list[FileProblem]]:
    """Return the playbooks that `text` holds, and the problems of all its documents, or the first hundred.

    `attached` are the texts of the files that they name; None where the text is complete. Raises nothing.
    """
    documents, problems = yaml_text.read(text, source)
    if len(documents) > MOST_DOCUMENTS:
        return [], [documents[MOST_DOCUMENTS].problem((), f"a file has at most {MOST_DOCUMENTS} playbooks")]
    playbooks: list[YamlPlaybook] = []
    in_doubt, allowance = bool(problems), Allowance()
    for document in documents:
        if isinstance(document.value, dict) and LOG_RULE in document.value:
            continue  # of ``log_rule_library``, which reads the same folders
        made = _compiled(document, actions, identity, None if in_doubt else attached, allowance)
        if isinstance(made, list):
            problems.extend(made)
        elif not in_doubt:
            # A document whose YAML is in doubt may not mean what it says; its other problems are reported too.
            playbooks.append(made)
    return playbooks, _first(problems, source)


def _compiled(
    document: YamlDocument, actions: Actions, identity: IdentityLabels, attached: Attached | None, allowance: Allowance
) -> YamlPlaybook | list[FileProblem]:
    try:
        whole = document if attached is None else attachments.attach(document, attached)
        return whole if isinstance(whole, list) else compile_document(whole, actions, identity, allowance)
    except Exception as error:  # what checking it runs into, in an action of another package too, is its own problem
        log.exception("a playbook cannot be checked", file=document.source)
        return [document.problem((), f"cannot be checked: {type(error).__name__}; the log has the place in the code")]


def _first(problems: list[FileProblem], source: str) -> list[FileProblem]:
    """Return the problems in the order of lines, and no more of them than anybody reads."""
    distinct = sorted(set(problems))
    if len(distinct) <= MOST_PROBLEMS:
        return distinct
    return [*distinct[:MOST_PROBLEMS], FileProblem(source, None, None, f"has more mistakes than these {MOST_PROBLEMS}")]


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
    texts: dict[Path, str | FileProblem] = {}
    length = 0
    for path in dict.fromkeys(path for document in documents for path in attachments.paths(document)):
        if length > yaml_text.MAX_BYTES:
            message = f"not read: the files that are named have over {yaml_text.MAX_BYTES} characters together"
            texts[path] = FileProblem(str(path), None, None, message)
            continue
        texts[path] = read_text(path)
        length += len(str(texts[path]))
    return texts


def read_text(path: Path) -> str | FileProblem:
    """Return the text of a file, or why it cannot be read."""
    raw = _read(path)
    return raw if isinstance(raw, FileProblem) else yaml_text.decode(raw, str(path))


def _read(path: Path) -> bytes | FileProblem:
    try:
        # Without blocking, because a named pipe would wait for its writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return FileProblem(str(path), None, None, "not a regular file")
            # One byte more than is allowed shows that there is more, however large the file is.
            return _whole(file, yaml_text.MAX_BYTES + 1)
    except FileNotFoundError:
        return FileProblem(str(path), None, None, "there is no such file")
    except (OSError, ValueError) as error:
        return FileProblem(str(path), None, None, _unreadable(error))


def _whole(file: io.FileIO, most: int) -> bytes:
    raw = b""
    while len(raw) < most and (piece := file.read(most - len(raw))):
        raw += piece
    return raw


def _unreadable(error: Exception) -> str:
    return f"cannot be read: {getattr(error, 'strerror', None) or type(error).__name__}"


def playbook_files(root: Path) -> Iterator[Path | FileProblem]:
    """Yield the playbook files of a directory and of the directories in it, in order; or `root`, if it is a file.

    Names that begin with a dot are left out: editors keep half-written files there, and Kubernetes
    keeps in ``..data`` the files that the names beside it link to. In the place of what is not there,
    or of a directory that cannot be listed, its problem stands.
    """
    for path in _yaml_files(root):
        if isinstance(path, FileProblem) or path == root or not (is_test(path) or attachments.is_template(path)):
            yield path


def test_files(root: Path) -> Iterator[Path]:
    """Yield the files with tests, found as `playbook_files` finds playbooks."""
    yield from (path for path in _yaml_files(root) if isinstance(path, Path) and (path == root or is_test(path)))


def is_test(path: Path) -> bool:
    return path.stem.endswith(TEST_SUFFIX)


def _yaml_files(root: Path) -> Iterator[Path | FileProblem]:
    try:
        is_directory = stat.S_ISDIR(root.stat().st_mode)
    except (OSError, ValueError) as error:
        is_absent = isinstance(error, (FileNotFoundError, NotADirectoryError)) and not root.is_symlink()
        message = "there is no such file or directory" if is_absent else _unreadable(error)
        yield FileProblem(str(root), None, None, message)
        return
    if not is_directory:
        yield root
        return
    for path in _visible(root):
        if isinstance(path, FileProblem) or (path.suffix in _ENDINGS and not _is_directory(path)):
            yield path
        elif _is_directory(path):
            for inner in _visible(path):
                if isinstance(inner, FileProblem) or (inner.suffix in _ENDINGS and not _is_directory(inner)):
                    yield inner


def exists(path: Path) -> bool:
    """Return whether anything is there that can be looked at."""
    try:
        return path.exists()
    except OSError:
        return False


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False  # reading it as a file says why


def _visible(directory: Path) -> list[Path | FileProblem]:
    """Return what a directory holds, in the order of names, or why that cannot be told."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in islice(entries, MOST_ENTRIES + 1)]
    except OSError as error:
        return [FileProblem(str(directory), None, None, _unreadable(error))]
    if len(names) > MOST_ENTRIES:
        return [FileProblem(str(directory), None, None, f"not read: it has over {MOST_ENTRIES} entries")]
    return [directory / name for name in sorted(names) if not name.startswith(".")]
