"""The commands of the on-call page, against a real server in mode approve with runs that wait for an answer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from tests.support.command_line import CommandLine
from tests.support.programs import ROOT, start_server

PAGE = (ROOT / "docs" / "on-call.md").read_text(encoding="utf-8")
SITUATIONS = PAGE.partition("## Situations")[2].partition("\n## ")[0]
COMMANDS = sorted(
    {
        command
        for command in re.findall(r"`trainmedic ([^`]+)`", PAGE)
        # These read files, or run on a node; the tests of the agent and of log rules run them.
        if not re.match(r"agent |playbook |logs |diagnose --dir", command)
    }
)
UNKNOWN_JOB, UNFIT = 5, 1
"""Exit statuses: the server knows no such job, agent or finding; the run is not in a state for that."""
EXPECTED = {
    "diagnose": UNKNOWN_JOB,
    "report": UNKNOWN_JOB,
    "jobs end": UNKNOWN_JOB,
    "findings show": UNKNOWN_JOB,
    "runs undo": UNFIT,
    "runs retry": UNFIT,
    "runs close-undo": UNFIT,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A server with the shipped playbooks, without tokens."""
    program, url = start_server(tmp_path_factory.mktemp("on-call"), "--mode", "approve")
    with program:
        yield CommandLine(url)


def test_each_situation_has_its_command() -> None:
    """The command is in the second column."""
    rows = [row for row in SITUATIONS.splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 10
    assert [row for row in rows if not re.match(r"\| [^|`]+ \| `trainmedic [^`|]+` \|", row)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_works(server: CommandLine, command: str) -> None:
    """With RUN, JOB and other placeholders filled in, its flags are known and the server answers it."""
    filled = re.sub(r"\b(JOB|NAME)\b", "llm-1", command).replace("--note TEXT", "--note text")
    filled = filled.replace("findings show ID", "findings show 019c1415-6c05-7c11-9a0d-6f1d2e3c4b5a")
    if "RUN" in filled:
        job = re.sub(r"\W+", "-", command)
        filled = filled.replace("RUN", server.alert(job, "GradientExplosion"))
    words = shlex.split(filled)
    try:
        done = server.run(*words)
    finally:
        if words[0] == "pause":
            server.run("resume")
    names = (" ".join(words[:2]), words[0])
    wanted = next((EXPECTED[name] for name in names if name in EXPECTED and "--fleet" not in words), 0)
    assert done.code == wanted, done.out + done.err
