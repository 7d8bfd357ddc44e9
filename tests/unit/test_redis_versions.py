"""Which Redis is old is told by its version alone, branch by branch."""

from __future__ import annotations

import pytest

from trainmedic_server.adapters.embedded_redis import missing_fixes


@pytest.mark.parametrize(
    ("line", "lacking"),
    [
        ("Redis server v=6.2.14 sha=40305114:0 malloc=libc", "Redis 6.2.14 lacks published security fixes"),
        ("Redis server v=6.2.22 sha=0", "which 6.2.23 has"),
        ("Redis server v=7.0.15 sha=0", "Redis 7.0.15 is of a branch that gets no security fixes"),
        ("Redis server v=8.10.1 sha=0", "which 8.10.2 has"),
        ("Valkey server v=8.1.8 sha=0", "Valkey 8.1.8 lacks published security fixes, which 8.1.9 has"),
        ("Valkey server v=7.0.1 sha=0", "no security fixes"),
    ],
)
def test_what_an_old_version_lacks_is_said(line: str, lacking: str) -> None:
    """With the version that has it, as far as the branch still gets fixes."""
    assert lacking in missing_fixes(line)


@pytest.mark.parametrize(
    "line",
    [
        "Redis server v=6.2.23 sha=0",
        "Redis server v=6.2.100 sha=0",
        "Redis server v=7.4.11 sha=0",
        "Redis server v=9.0.0 sha=0",
        "Valkey server v=8.1.9 sha=0",
        "Valkey server v=9.2.0 sha=0",
        "KeyDB server v=6.3.4",
        "",
    ],
)
def test_of_what_is_new_or_unheard_of_nothing_is_said(line: str) -> None:
    """Neither of a branch that is newer than this list, nor of another program."""
    assert missing_fixes(line) == ""
