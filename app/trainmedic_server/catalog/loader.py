"""Loading of playbooks from texts and files. A file is compiled again only if it, an attached file or a used fragment
changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct

from trainmedic_core import yaml_files, yaml_text
from trainmedic_core.allowance import Allowance
from trainmedic_core.problems import FileProblem
from trainmedic_core.yaml_text import YamlDocument
from trainmedic_server import errors, telemetry
from trainmedic_server.catalog import attachments, fragments
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.catalog.compiler import compile_document
from trainmedic_server.catalog.fragments import FragmentFolders, FragmentPlace
from trainmedic_server.ports.actions import Actions

log = telemetry.logger(__name__)

Attached = Mapping[Path, str | FileProblem]  # Texts of attached files, or why they cannot be read.


class LoadedFile(Struct, frozen=True):
    path: Path
    digest: str
    """SHA-256 of its bytes, attached files and used fragments; "" if unreadable or to be read again."""
    playbooks: tuple[YamlPlaybook, ...] = ()
    problems: tuple[FileProblem, ...] = ()
    fragments: tuple[FragmentPlace, ...] = ()


def load(
    text: str,
    source: str,
    actions: Actions,
    attached: Attached | None = None,
    others: Mapping[str, YamlDocument] = MappingProxyType({}),
) -> tuple[list[YamlPlaybook], list[FileProblem]]:
    """Return the playbooks and the first 100 problems.

    `attached` has the texts of named templates, None if `text` has them, as a stored version does. `others` are
    fragments of other files.
    """
    documents, problems = yaml_text.read(text, source)
    if len(documents) > yaml_files.MOST_DOCUMENTS:
        return [], [
            documents[yaml_files.MOST_DOCUMENTS].problem(
                (), f"a file has at most {yaml_files.MOST_DOCUMENTS} playbooks"
            )
        ]
    playbooks: list[YamlPlaybook] = []
    is_broken, allowance = bool(problems), Allowance()
    own = fragments.in_documents(documents)
    for document in documents:
        if isinstance(document.value, dict) and yaml_files.LOG_RULE in document.value:
            continue  # ``log_rule_library`` reads it from the same folder.
        if fragments.is_fragment(document):
            problems.extend(fragments.check(document, own))
            continue
        made = _compiled(document, actions, attached, allowance, {**others, **own})
        if isinstance(made, list):
            problems.extend(made)
        elif not is_broken:
            # With a YAML error in the file, a document may not mean what it says. Its problems are still reported.
            playbooks.append(made)
    return playbooks, _limited(problems, source)


def _compiled(
    document: YamlDocument,
    actions: Actions,
    attached: Attached | None,
    allowance: Allowance,
    available: Mapping[str, YamlDocument],
) -> YamlPlaybook | list[FileProblem]:
    try:
        expanded = fragments.expand(document, available)
        if isinstance(expanded, list):
            return expanded
        whole = expanded.document if attached is None else attachments.attach(expanded.document, attached)
        if isinstance(whole, list):
            return whole
        return compile_document(whole, actions, allowance, expanded.uses)
    except Exception as error:  # A faulty check, also of another package's action, is a problem of this playbook.
        log.exception("cannot check playbook", file=document.source)
        return [document.problem((), f"cannot be checked: {type(error).__name__}; the log has the place in the code")]


def _limited(problems: list[FileProblem], source: str) -> list[FileProblem]:
    distinct = sorted(set(problems))
    if len(distinct) <= yaml_files.MOST_PROBLEMS:
        return distinct
    return [
        *distinct[: yaml_files.MOST_PROBLEMS],
        FileProblem(source, None, None, f"has more than {yaml_files.MOST_PROBLEMS} errors; the others are not shown"),
    ]


def load_one(text: str, source: str, actions: Actions) -> YamlPlaybook:
    """Raises PlaybookError with all errors."""
    playbooks, problems = load(text, source, actions)
    if problems or len(playbooks) != 1:
        raise errors.PlaybookError(
            "\n".join(map(str, problems)) or f"{source}: expected one playbook, found {len(playbooks)}"
        )
    return playbooks[0]


def load_file(
    path: Path,
    actions: Actions,
    before: LoadedFile | None = None,
    folders: FragmentFolders | None = None,
) -> LoadedFile:
    """Return `before` if nothing has changed. `folders` are shared by files of one reload."""
    raw = yaml_files.read(path)
    if isinstance(raw, FileProblem):
        return LoadedFile(path, "", (), (raw,))
    text = yaml_text.decode(raw, str(path))
    if isinstance(text, FileProblem):
        return LoadedFile(path, hashlib.sha256(raw).hexdigest(), (), (text,))
    others = (folders or FragmentFolders()).named_in(text, path)
    attached = _attached(text, str(path), others.values())
    contents = [raw, *(str(text).encode() for text in attached.values())]
    contents += [f"{each.source}:{each.marks[()].line}\n{each.text}".encode() for each in others.values()]
    digest = hashlib.sha256(b"\0".join(contents)).hexdigest()
    if before is not None and before.digest == digest:
        return before
    playbooks, problems = load(text, str(path), actions, attached, others)
    return LoadedFile(path, digest, tuple(playbooks), tuple(problems), fragments.places(text, str(path)))


def _attached(text: str, source: str, others: Collection[YamlDocument]) -> Attached:
    if attachments.PARAMETER not in text and not any(attachments.PARAMETER in each.text for each in others):
        return {}  # Most files have none; do not parse them twice.
    documents = [*yaml_text.read(text, source)[0], *others]
    texts: dict[Path, str | FileProblem] = {}
    length = 0
    for path in dict.fromkeys(path for document in documents for path in attachments.paths(document)):
        if length > yaml_text.MAX_BYTES:
            message = f"not read: the files that are named have over {yaml_text.MAX_BYTES} characters together"
            texts[path] = FileProblem(str(path), None, None, message)
            continue
        texts[path] = yaml_files.read_text(path)
        length += len(str(texts[path]))
    return texts
