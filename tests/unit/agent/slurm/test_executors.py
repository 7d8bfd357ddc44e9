"""The executors of ``slurm.*``, with a program in the place of scontrol that writes what a test says.

It does not model Slurm: that is ``tests/contract/test_slurm.py``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import make_command
from trainmedic.wire.envelope import utc_now
from trainmedic_agent.errors import CommandFailed, CommandRejected, CommandUnsupported
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.slurm import programs as slurm_programs
from trainmedic_agent.slurm.executors import SlurmChange, SlurmReading
from trainmedic_agent.slurm.policy import SlurmPolicy
from trainmedic_agent.slurm.programs import SlurmPrograms
from trainmedic_logs.domain import log_pages
from trainmedic_server.adapters.slurm_json import API_VERSIONS, FIELDS

SHOWS_N1 = "--all --oneliner show node n1\n"
DRAIN = {"node": "n1", "reason": "hot"}


class Commands:
    """A directory with a scontrol."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls = directory / "calls"
        self.changes("exit 0")

    def answers(self, script: str) -> None:
        path = self.directory / "scontrol"
        path.write_text(f'#!/bin/sh\necho "$*" >> {self.calls}\n{script}\n')
        path.chmod(0o755)

    def changes(self, script: str) -> None:
        """List the node n1, and run the script for changes."""
        self.answers(f'case "$*" in *"show node"*) echo "NodeName=n1 Arch=x86_64"; exit;; esac\n{script}')

    def shows(self, document: Mapping[str, Any], status: int = 0) -> None:
        (self.directory / "document").write_text(json.dumps({"last_update": {"set": True, "number": 7}, **document}))
        versions = "echo data_parser/v0.0.42; echo data_parser/v0.0.45; exit"
        self.answers(f'[ "$1" = --json=list ] && {{ {versions}; }}\ncat {self.directory}/document\nexit {status}')

    def change(self, action: str = "slurm.drain", resumed: bool = False, **params: Any) -> Mapping[str, Any]:
        executor = SlurmChange(action, SlurmPrograms(SlurmPolicy(str(self.directory))), utc_now)
        return executor.perform(AcceptedCommand(make_command(action, params=params or DRAIN), resumed))

    def reading(self, action: str = "slurm.list") -> SlurmReading:
        return SlurmReading(action, SlurmPrograms(SlurmPolicy(str(self.directory))), utc_now)


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


def read(executor: SlurmReading, seconds: float = 30.0, **params: Any) -> Mapping[str, Any]:
    given = {"what": "jobs", "fields": list(FIELDS["jobs"]), "parsers": list(API_VERSIONS), **params}
    return executor.perform(AcceptedCommand(make_command(executor.action, seconds, params=given)))


def test_a_change_is_run_once_with_its_arguments_if_slurm_lists_the_node(commands: Commands) -> None:
    commands.change()
    assert commands.calls.read_text() == f"{SHOWS_N1}update nodename=n1 state=DRAIN reason=hot\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo Node n1 not found; exit 1", "Invalid node name specified: slurmctld lists no node n1; nothing was"),
        (
            "echo Node n1 not found; echo warning: old >&2; exit 1",
            "Invalid node name specified: slurmctld lists no node",
        ),
        ("echo 'NodeName=n12 Arch=x86_64'", "slurmctld lists no node n1; nothing was changed"),
        ("echo Unable to contact slurm controller >&2; exit 1", "^Unable to contact slurm controller; nothing was"),
        ("kill $$", "scontrol did not end in time; nothing was changed"),
    ],
)
def test_a_name_that_slurm_does_not_list_as_a_node_changes_nothing(
    commands: Commands, script: str, reason: str
) -> None:
    """A NodeSet's name would reach all of its nodes."""
    commands.answers(script)
    with pytest.raises(CommandFailed, match=reason) as caught:
        commands.change()
    assert caught.value.output == {"may_be_done": False}
    assert commands.calls.read_text() == SHOWS_N1


def test_excluded_nodes_are_checked_as_nodes_too(commands: Commands) -> None:
    commands.answers("echo NodeName=n1 Arch=x86_64; echo Node pair not found; exit 1")
    with pytest.raises(CommandFailed, match="lists no node pair"):
        commands.change("slurm.update", job="7", excluded_nodes=["n1", "pair"])
    assert commands.calls.read_text() == "--all --oneliner show node n1,pair\n"


def test_a_change_that_an_earlier_process_may_have_run_is_not_repeated(commands: Commands) -> None:
    """The server reads Slurm, and decides."""
    with pytest.raises(CommandFailed) as caught:
        commands.change(resumed=True)
    assert caught.value.output == {"may_be_done": True}
    assert not commands.calls.exists()


def test_a_change_refused_by_slurm_was_not_done(commands: Commands) -> None:
    commands.changes("echo 'slurm_update error: Invalid node name specified' >&2; exit 1")
    with pytest.raises(CommandFailed, match="Invalid node name specified") as caught:
        commands.change()
    assert caught.value.output == {"may_be_done": False}


def test_a_change_that_does_not_end_may_be_done(commands: Commands) -> None:
    """The program is ended in time for the answer."""
    commands.changes("exec sleep 60")
    executor = SlurmChange("slurm.drain", SlurmPrograms(SlurmPolicy(str(commands.directory))), utc_now)
    began = time.monotonic()
    with pytest.raises(CommandFailed, match="did not end in time") as caught:
        executor.perform(AcceptedCommand(make_command("slurm.drain", 2.5, params=DRAIN)))
    assert caught.value.output == {"may_be_done": True}
    assert time.monotonic() - began < 30


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    executor = SlurmChange("slurm.drain", SlurmPrograms(SlurmPolicy(str(tmp_path / "none"))), utc_now)
    with pytest.raises(CommandUnsupported, match=r"cannot run .*/none/scontrol: No such file.*slurm\.commands"):
        executor.perform(AcceptedCommand(make_command("slurm.drain", params=DRAIN)))


def test_a_reading_keeps_the_named_fields_and_uses_the_newest_parser(commands: Commands) -> None:
    """It comes in pages; an unchanged document sends none."""
    commands.shows({"jobs": [{"job_id": 7, "command": "/secret"}], "errors": [], "meta": {"slurm": {"release": "26"}}})
    executor = commands.reading()
    first = read(executor)
    assert first["pages"] == 1
    assert log_pages.unpacked(first["page"]) == {
        "meta": {"slurm": {"release": "26"}},
        "errors": [],
        "jobs": [{"job_id": 7}],
    }
    again = read(executor, known=first["digest"])
    assert again == {"unchanged": True, "digest": first["digest"]}
    lines = commands.calls.read_text().splitlines()
    assert lines == ["--json=list", *["--all --local --details --json=v0.0.45 show jobs"] * 2]


def test_a_large_document_comes_in_pages_of_one_reading(commands: Commands) -> None:
    """Each fits into a reply. A page of a document that has been replaced is refused."""
    jobs = [{"job_id": number, "admin_comment": f"{number * 7919 % 10007:x}{number**3:x}"} for number in range(20_000)]
    commands.shows({"jobs": jobs})
    executor = commands.reading()
    first = read(executor)
    assert first["pages"] > 1
    pieces = list(first["page"])
    for page in range(1, first["pages"]):
        more = read(executor, known=first["digest"], page=page)["page"]
        assert log_pages.fits(more)
        pieces += more
    assert log_pages.unpacked(pieces)["jobs"] == jobs
    assert len(commands.calls.read_text().splitlines()) == 2
    with pytest.raises(CommandFailed, match="read it again"):
        read(executor, known="0" * 16, page=1)


@pytest.mark.parametrize("script", ["echo no JSON", "exit 1", "echo '{\"nodes\": []}'", "echo '{\"jobs\": 3}'"])
def test_an_answer_without_the_records_is_not_an_empty_list(commands: Commands, script: str) -> None:
    """A failure never means that there are none."""
    commands.answers(f'[ "$1" = --json=list ] && {{ echo v0.0.45; exit; }}\n{script}')
    with pytest.raises(CommandFailed):
        read(commands.reading())


@pytest.mark.parametrize(
    ("script", "seconds", "reason"),
    [
        ("echo 'fatal: Could not establish a configuration source' >&2; exit 1", 60.0, "Could not establish"),
        ("exit 1", 60.0, "ended with status 1"),
        ("exec sleep 600", 3.0, "did not end in time"),
    ],
)
def test_an_unreadable_list_of_parsers_is_a_failure(
    commands: Commands, script: str, seconds: float, reason: str
) -> None:
    """slurmctld may be down on a node that gets its slurm.conf from it. A rejection would end the attempts."""
    commands.answers(script)
    with pytest.raises(CommandFailed, match=reason):
        read(commands.reading(), seconds=seconds)


def test_a_scontrol_without_the_servers_parser_is_refused(commands: Commands) -> None:
    commands.answers("echo data_parser/v0.0.30")
    with pytest.raises(CommandRejected, match=r"has the data parsers v0\.0\.30; the server reads"):
        read(commands.reading())


def test_records_with_a_failed_status_are_not_a_list(commands: Commands) -> None:
    """A document that states an error is an exception: the server reads it."""
    commands.shows({"jobs": []}, status=1)
    with pytest.raises(CommandFailed, match="ended with status 1"):
        read(commands.reading())
    commands.shows({"jobs": [], "errors": [{"error_number": 2017}]}, status=1)
    assert log_pages.unpacked(read(commands.reading())["page"])["errors"] == [{"error_number": 2017}]


@pytest.mark.parametrize("what", ["jobs", "nodes"])
def test_an_empty_list_without_its_time_is_not_an_answer(commands: Commands, what: str) -> None:
    """scontrol may exit with 0 and without records while slurmctld is unavailable."""
    fields = {"what": what, "fields": list(FIELDS[what])}
    commands.shows({what: [], "last_update": {"set": True, "number": 0}})
    with pytest.raises(CommandFailed, match="slurmctld has not answered"):
        read(commands.reading(), **fields)
    commands.shows({what: []})
    assert log_pages.unpacked(read(commands.reading(), **fields)["page"])[what] == []


def test_too_much_output_is_refused(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the memory of a login node."""
    monkeypatch.setattr(slurm_programs, "LARGEST_OUTPUT", 1 << 20)
    commands.answers('[ "$1" = --json=list ] && { echo v0.0.45; exit; }\nexec cat /dev/zero')
    with pytest.raises(CommandFailed, match="more than 1 MiB"):
        read(commands.reading())


@pytest.mark.parametrize(
    "params",
    [
        {"what": "config"},
        {"fields": ["command line"]},
        {"fields": "job_id"},
        {"arguments": ["-u", "root"]},
        {"page": -1},
        {"parsers": ["v0.0.30"]},
    ],
)
def test_an_unknown_reading_is_rejected(commands: Commands, params: dict[str, Any]) -> None:
    commands.shows({"jobs": []})
    with pytest.raises(CommandRejected):
        read(commands.reading(), **params)
