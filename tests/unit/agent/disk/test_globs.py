"""The patterns of a cleaning rule mean what their documentation says."""

from __future__ import annotations

import pytest

from trainmedic_agent.disk.globs import Glob, GlobState


def matches(pattern: str, path: str) -> bool:
    *directories, name = path.split("/")
    state: GlobState | None = GlobState.of([Glob.read(pattern)])
    for directory in directories:
        if state is None or (state := state.below(directory)) is None:
            return False
    return state.accepts(name)


@pytest.mark.parametrize(
    ("pattern", "matched", "not_matched"),
    [
        ("*.log", ["a.log", ".log", ".hidden.log"], ["a.LOG", "b/a.log", "a.log.1", "a.log/b"]),
        ("**", ["a", ".a", "a/b", "a/b/c"], []),
        ("**/*.tmp", ["a.tmp", "b/a.tmp", "b/c/a.tmp"], ["a.tmp/b", "b/a"]),
        ("logs/**", ["logs/a", "logs/a/b"], ["logs", "a", "a/logs/b"]),
        ("**/cache/**", ["cache/a", "b/cache/a", "b/cache/c/a"], ["cache", "b/cache", "b/a"]),
        ("a/**/b", ["a/b", "a/c/b", "a/c/d/b"], ["b", "a/b/c", "a"]),
        ("**/**/b", ["b", "a/b", "a/a/b"], ["a"]),
        ("core.?", ["core.1", "core.\n", "core.\udcff"], ["core.", "core.12"]),
        ("[!a]*", ["b", "bc"], ["a", "ab", ""]),
        ("[*]", ["*"], ["a"]),
        ("run-*/checkpoint-[0-9]*", ["run-1/checkpoint-10"], ["run-1/checkpoint-", "run-1/x/checkpoint-1"]),
    ],
)
def test_a_pattern_matches_whole_paths_part_by_part(pattern: str, matched: list[str], not_matched: list[str]) -> None:
    """Stars stay within a part, ``**`` spans parts, dots and odd bytes are ordinary characters."""
    assert [path for path in matched if not matches(pattern, path)] == []
    assert [path for path in not_matched if matches(pattern, path)] == []


def test_directories_in_which_nothing_can_match_are_not_entered() -> None:
    """`below` returns None there, so that a walk skips what no pattern can match."""
    state = GlobState.of([Glob.read("runs/*/logs/*.log"), Glob.read("tmp/**")])
    assert state.below("data") is None
    runs = state.below("runs")
    assert runs is not None
    run = runs.below("7")
    assert run is not None
    assert run.below("checkpoints") is None


@pytest.mark.parametrize(
    "pattern", ["", "/a", "a//b", "a/", "./a", "a/../b", "..", "a**", "**.log", "a\0b", "a" * 1025]
)
def test_an_invalid_pattern_is_rejected(pattern: str) -> None:
    """The message says what is wrong."""
    with pytest.raises(ValueError, match=r"\w"):
        Glob.read(pattern)
