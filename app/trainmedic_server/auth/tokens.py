"""Tokens file: a YAML list of ``{name, sha256, roles}``, optionally with ``groups`` and ``jobs``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import Struct

from trainmedic_core import yaml_text
from trainmedic_core.problems import did_you_mean, shown
from trainmedic_core.setting_sources import read_text
from trainmedic_core.yaml_text import YamlDocument
from trainmedic_server.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_MEMBERS = ("name", "sha256", "roles")
_JOBS = "jobs"
_GROUPS = "groups"
_LONGEST_PATTERN = 253  # characters, as a job's name


class TokenRole(StrEnum):
    """Rights of a token. An operator may do all that a viewer may."""

    WEBHOOK = "webhook"
    VIEWER = "viewer"
    OPERATOR = "operator"


class Token(Struct, frozen=True):
    """``digest`` is the SHA-256 of the token's UTF-8 bytes."""

    name: str
    digest: bytes
    roles: frozenset[TokenRole]
    jobs: tuple[str, ...] | None = None
    """Shell patterns: valid only below ``/jobs/{job}`` of matching jobs. None: no such limit."""
    groups: frozenset[str] = frozenset()  # of approvers in playbooks, to which its owner belongs


def read(path: Path) -> tuple[Token, ...]:
    """Raises ConfigurationError."""
    return parse(read_text("--tokens", path), str(path))


def parse(text: str, source: str) -> tuple[Token, ...]:
    documents, problems = yaml_text.read(text, source)
    if problems:
        # `yaml_text` quotes a value that begins with {{: it may be a token.
        message = re.split(r""": ["']\{\{""", problems[0].message)[0]
        raise ConfigurationError(f"{source}:{problems[0].line or 1}: not YAML: {message}")
    if len(documents) > 1:
        raise ConfigurationError(str(documents[1].problem((), "must be in one YAML document with what is before it")))
    if not documents or not isinstance(documents[0].value, list) or not documents[0].value:
        raise ConfigurationError(f"{source}:1: must be a list of at least one {{name, sha256, roles}}")
    document = documents[0]
    tokens = [_token(entry, _Location(source, document, index)) for index, entry in enumerate(document.value)]
    for member, values in (("name", [token.name for token in tokens]), ("sha256", [token.digest for token in tokens])):
        for index, value in enumerate(values):
            if value in values[:index]:
                raise _Location(source, document, index).error(member, "is the same as an earlier token's")
    return tuple(tokens)


class _Location(Struct, frozen=True):
    source: str
    document: YamlDocument
    index: int

    def error(self, member: str, problem: str) -> ConfigurationError:
        """Return the error for a field, for the whole entry if `member` is empty."""
        line = self.document.problem((self.index, member), problem, at_key=True).line
        field = f"{self.index}.{member}" if member else str(self.index)
        return ConfigurationError(f"{self.source}:{line}: {field} {problem}")


def _token(entry: Any, location: _Location) -> Token:
    if not isinstance(entry, dict):
        raise location.error("", "must be a mapping with name, sha256 and roles")
    for member in entry:
        if member not in (*_MEMBERS, _GROUPS, _JOBS):
            known = f"a token has {', '.join(_MEMBERS)}, and may have {_GROUPS} and {_JOBS}"
            raise location.error(member, f"is not known; {known}")
    for member in _MEMBERS:
        if member not in entry:
            raise location.error(member, "is missing")
    name, digest = entry["name"], entry["sha256"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise location.error("name", "must be 1 to 128 letters, digits, '.', '_', '-' or '@'")
    if name == "anonymous":
        raise location.error("name", "must not be 'anonymous', which the history uses for callers without a token")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise location.error("sha256", "must be 64 hexadecimal digits (quoted if it has only digits)")
    roles = _roles(entry["roles"], location)
    jobs = _jobs(entry[_JOBS], location) if _JOBS in entry else None
    if jobs is not None and TokenRole.WEBHOOK in roles:
        raise location.error(_JOBS, "cannot limit the role webhook: a delivery is not about one job")
    groups = _groups(entry[_GROUPS], location) if _GROUPS in entry else frozenset()
    return Token(name, bytes.fromhex(digest), roles, jobs, groups)


def _roles(value: Any, location: _Location) -> frozenset[TokenRole]:
    roles = ", ".join(TokenRole)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise location.error("roles", f"must be a list of one or more of {roles}")
    for role in value:
        if role not in list(TokenRole):
            hint = did_you_mean(str(role), TokenRole)
            raise location.error("roles", f"must be one of {roles}, not {shown(role)}{hint}")
    return frozenset(TokenRole(role) for role in value)


def _groups(value: Any, location: _Location) -> frozenset[str]:
    names = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not names or not all(isinstance(each, str) and _NAME.fullmatch(each) for each in names):
        raise location.error(
            _GROUPS, "must be a list of one or more names of 1 to 128 letters, digits, '.', '_', '-' or '@'"
        )
    return frozenset(map(str, names))


def _jobs(value: Any, location: _Location) -> tuple[str, ...]:
    patterns = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    is_pattern = [isinstance(each, str) and 0 < len(each) <= _LONGEST_PATTERN for each in patterns]
    if not patterns or not all(is_pattern):
        raise location.error(_JOBS, "must be a list of one or more patterns for names of jobs, such as team-a-*")
    return tuple(map(str, patterns))
