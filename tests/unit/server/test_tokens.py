"""The tokens file: what it may hold, and how precisely a mistake in it is told."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from trainmedic_server.auth.tokens import TokenRole, parse, read
from trainmedic_server.errors import ConfigurationError

HASH = hashlib.sha256(b"secret").hexdigest()


def test_a_token_has_a_name_a_hash_and_roles() -> None:
    """The file is a YAML list; hashes in upper case are fine."""
    (token,) = parse(f"- {{name: alertmanager, sha256: '{HASH.upper()}', roles: [webhook, viewer]}}", "t.yaml")
    assert (token.name, token.digest.hex(), token.roles) == (
        "alertmanager",
        HASH,
        {TokenRole.WEBHOOK, TokenRole.VIEWER},
    )


def test_a_token_can_be_for_some_jobs_alone() -> None:
    """By shell patterns for their names."""
    (token,) = parse(f"- {{name: x, sha256: {HASH}, roles: [viewer], jobs: [team-a-*, llm-1]}}", "t.yaml")
    assert token.jobs == ("team-a-*", "llm-1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.yaml:1: must be a list"),
        ("[]", "t.yaml:1: must be a list"),
        ("name: x", "t.yaml:1: must be a list"),
        ("- [", "t.yaml:1: not YAML: a '['"),
        (f"- {{name: x, sha256: {HASH}, roles: [viewer]}}\n- name: y\n  name: z", "t.yaml:3: not YAML: the key 'name'"),
        (f"- {{name: x, sha256: {HASH}, roles: [viewer]}}\n---\n[]", "t.yaml:3:1: must be in one YAML document"),
        ("- name: x\n  sha256: {{secret}}", "t.yaml:2: not YAML: text that begins with {{ must be in quotes"),
        ('- name: x\n  sha256: {{"secret"}}', "t.yaml:2: not YAML: text that begins with {{ must be in quotes"),
        ('- name: x\n  sha256: "secret', "t.yaml:2: not YAML: the quote that begins here is not closed"),
        ("- just-a-token", "t.yaml:1: 0 must be a mapping"),
        ("- name: x\n  sha265: y", "t.yaml:2: 0.sha265 is not known; a token has name, sha256, roles"),
        ("- name: x\n  roles: [viewer]", "t.yaml:1: 0.sha256 is missing"),
        (f"- name: a b\n  sha256: {HASH}\n  roles: [viewer]", "t.yaml:1: 0.name must be"),
        (f"- name: anonymous\n  sha256: {HASH}\n  roles: [viewer]", "t.yaml:1: 0.name must not be"),
        ("- name: x\n  sha256: secret\n  roles: [viewer]", "t.yaml:2: 0.sha256 must be 64 hexadecimal digits"),
        (f"- name: x\n  sha256: {HASH}\n  roles: viewer", "t.yaml:3: 0.roles must be a list"),
        (f"- name: x\n  sha256: {HASH}\n  roles: []", "t.yaml:3: 0.roles must be a list"),
        (
            f"- name: x\n  sha256: {HASH}\n  roles: [root]",
            "t.yaml:3: 0.roles must be one of webhook, viewer, operator, not 'root'",
        ),
        (
            f"- name: x\n  sha256: {HASH}\n  roles: [webhok]",
            "t.yaml:3: 0.roles must be one of webhook, viewer, operator, not 'webhok'; did you mean 'webhook'?",
        ),
        (f"- name: x\n  sha256: {HASH}\n  roles: [viewer]\n  jobs: a-*", "t.yaml:4: 0.jobs must be a list"),
        (f"- name: x\n  sha256: {HASH}\n  roles: [viewer]\n  jobs: []", "t.yaml:4: 0.jobs must be a list"),
        (f"- name: x\n  sha256: {HASH}\n  roles: [webhook]\n  jobs: [a]", "t.yaml:4: 0.jobs cannot limit"),
        (
            f"- {{name: x, sha256: {HASH}, roles: [viewer]}}\n- {{name: x, sha256: {'0' * 63}a, roles: [viewer]}}",
            "t.yaml:2: 1.name is the same",
        ),
        (
            f"- {{name: x, sha256: {HASH}, roles: [viewer]}}\n- {{name: y, sha256: {HASH}, roles: [viewer]}}",
            "t.yaml:2: 1.sha256 is the same",
        ),
    ],
)
def test_a_mistake_is_told_with_file_line_and_field(text: str, message: str) -> None:
    """Never with the value, which may be a token put in the wrong place."""
    with pytest.raises(ConfigurationError) as caught:
        parse(text, "t.yaml")
    assert str(caught.value).startswith(message)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_bytes(b"\xff\xfe")])
def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path: Path, make: object) -> None:
    """Absent or not UTF-8: the message names the file."""
    path = tmp_path / "tokens.yaml"
    make(path)  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match=r"tokens\.yaml"):
        read(path)
