"""Executors of ``slurm.*``. Two queues, so that a long list delays no change.

A change that an earlier process of the agent may have begun is not repeated: the server reads Slurm and decides.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct

from trainmedic.wire.envelope import Command
from trainmedic_agent.errors import CommandFailed, CommandRejected
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.slurm import arguments
from trainmedic_agent.slurm.documents import Document, shortened
from trainmedic_agent.slurm.programs import SlurmPrograms
from trainmedic_logs.domain import log_pages

_REPLY_MARGIN = timedelta(seconds=2)  # for the reply before the command expires
_KEPT_DOCUMENTS = 8  # documents whose further pages can be asked for
_PIECES_PER_PAGE = log_pages.MOST_PACKED // log_pages.PIECE  # a page fits into one reply
_NO_END = "scontrol did not end in time"
_PARSER = re.compile(r"v[0-9]+\.[0-9]+\.[0-9]+")
_Records = Mapping[str, tuple[str, Callable[[object], str] | None]]
"""By ``what``: the member of Slurm's JSON, and the check of a name."""
_READ_RECORDS: _Records = {
    "node": ("nodes", arguments.node_name),
    "job": ("jobs", arguments.job_id),
    "reservations": ("reservations", None),
    "ping": ("pings", None),
}
_LISTED_RECORDS: _Records = {"nodes": ("nodes", None), "jobs": ("jobs", None)}
_DATED_RECORDS = frozenset({"nodes", "jobs", "reservations"})  # slurmctld dates empty answers too
_PARAMETERS = ("what", "name", "fields", "parsers", "known", "page")


class SlurmChange(Struct, frozen=True):
    action: str
    programs: SlurmPrograms
    now: Callable[[], datetime]
    queue: str = "slurm"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        """Return what the command wrote. A failure of the command has ``may_be_done``."""
        command = accepted.command
        if command.undo_of is not None:
            raise CommandRejected(f"{self.action} has no undo: the server reverts it by another command")
        argv = arguments.for_change(self.action, command.params)
        if accepted.resumed:
            reason = "the agent was restarted; an earlier process may have run it, so it is not run again"
            raise CommandFailed(reason, {"may_be_done": True})
        self._refuse_unlisted(arguments.named_nodes(command.params), command)
        done = self.programs.run(argv, _seconds_left(command, self.now()))
        if done.code == 0:
            return {"text": done.text}
        if done.code is None or done.code < 0:
            raise CommandFailed(f"{argv[0]} did not end in time", {"may_be_done": True})
        raise CommandFailed(done.text or f"{argv[0]} ended with status {done.code}", {"may_be_done": False})

    def _refuse_unlisted(self, names: Sequence[str], command: Command) -> None:
        """Raise CommandFailed if a name may be a NodeSet's: Slurm would change all of its nodes."""
        if not names:
            return
        done = self.programs.run(arguments.show_nodes(names), _seconds_left(command, self.now()))
        listed = arguments.listed_nodes(done.output)
        unlisted = [name for name in names if name not in listed]
        if done.code is None or done.code < 0:
            reason = _NO_END
        elif unlisted:
            # Slurm's own text for a change of such a node. Without any output slurmctld did not answer; with it, stderr
            # has only warnings.
            missing = f"Invalid node name specified: slurmctld lists no node {', '.join(unlisted)[:300]}"
            reason = missing if done.output.strip() else done.text or missing
        else:
            return
        raise CommandFailed(f"{reason}; nothing was changed", {"may_be_done": False})


class SlurmReading:
    """Reads records of Slurm: one (``slurm.read``) or all of a kind (``slurm.list``), in pages."""

    is_only_reading = True

    def __init__(self, action: str, programs: SlurmPrograms, now: Callable[[], datetime]) -> None:
        self.action = action
        self.queue, self._records = (
            ("slurm", _READ_RECORDS) if action == "slurm.read" else ("slurm_lists", _LISTED_RECORDS)
        )
        self._programs = programs
        self._now = now
        self._parsers: frozenset[str] = frozenset()  # data parsers that scontrol has; empty until it is asked
        self._documents: OrderedDict[str, Sequence[str]] = OrderedDict()  # packed pieces by digest, newest last

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        """Return ``page``, ``pages`` and ``digest`` of the document; ``unchanged`` if it is the ``known`` one."""
        command = accepted.command
        params = command.params
        unknown = sorted(name for name in params if name not in _PARAMETERS)
        if unknown or params.get("what") not in self._records:
            raise CommandRejected(f"{self.action} reads {', '.join(self._records)}, with {', '.join(_PARAMETERS)}")
        page = params.get("page", 0)
        if not isinstance(page, int) or page < 0:
            raise CommandRejected("page must be a number")
        if page:
            return self._page(str(params.get("known")), page)
        document = self._read(command)
        if document.digest == params.get("known"):
            return {"unchanged": True, "digest": document.digest}
        self._documents[document.digest] = log_pages.packed_bytes(document.raw)
        self._documents.move_to_end(document.digest)
        while len(self._documents) > _KEPT_DOCUMENTS:
            self._documents.popitem(last=False)
        return self._page(document.digest, 0)

    def _page(self, digest: str, number: int) -> Mapping[str, Any]:
        """Raises CommandFailed if it is no longer kept."""
        pieces = self._documents.get(digest)
        if pieces is None:
            raise CommandFailed("the document has been replaced; read it again")
        pages = max(1, -(-len(pieces) // _PIECES_PER_PAGE))
        page = list(pieces[number * _PIECES_PER_PAGE : (number + 1) * _PIECES_PER_PAGE])
        return {"digest": digest, "pages": pages, "page": page}

    def _read(self, command: Command) -> Document:
        what, params = command.params["what"], command.params
        kind, name_of = self._records[what]
        names = () if name_of is None else (name_of(params.get("name")),)
        fields = params.get("fields")
        if not isinstance(fields, list) or not all(isinstance(each, str) for each in fields):
            raise CommandRejected("fields must be a list of names")
        parser = self._chosen_parser(params.get("parsers"), _seconds_left(command, self._now()))
        done = self._programs.run(_reading(what, names, parser), _seconds_left(command, self._now()))
        if done.code is None or done.code < 0:
            raise CommandFailed(_NO_END)
        document = shortened(done.output, kind, fields)
        if document is None:
            self._parsers = frozenset()  # an upgrade may have removed this one
            raise CommandFailed(done.text or "scontrol wrote no JSON")
        if done.code != 0 and not document.has_errors:
            raise CommandFailed(done.text or f"scontrol ended with status {done.code}")
        # For a single job scontrol ends with 0 and without records also if slurmctld does not answer.
        if document.is_empty and (done.text or (what in _DATED_RECORDS and not document.is_dated)):
            raise CommandFailed(done.text or "slurmctld has not answered scontrol")
        return document

    def _chosen_parser(self, wanted: object, seconds: float) -> str:
        if not self._parsers:
            done = self._programs.run(("scontrol", "--json=list"), seconds)
            if done.code is None or done.code < 0:
                raise CommandFailed(_NO_END)
            self._parsers = frozenset(_PARSER.findall(f"{done.output[:10_000].decode(errors='replace')}{done.text}"))
            if not self._parsers and done.code != 0:  # without slurm.conf, for example, while slurmctld is down
                raise CommandFailed(done.text or f"scontrol ended with status {done.code}")
        for parser in wanted if isinstance(wanted, list) else ():
            if parser in self._parsers:
                return str(parser)
        offered = ", ".join(sorted(self._parsers)) or "none"
        self._parsers = frozenset()
        raise CommandRejected(f"scontrol has the data parsers {offered}; the server reads {wanted!r:.200}")


def _reading(what: str, names: Sequence[str], parser: str) -> Sequence[str]:
    shown = ("ping",) if what == "ping" else ("show", what, *names)
    # With fed_display, scontrol would list the jobs of all clusters of a federation.
    return "scontrol", "--all", "--local", "--details", f"--json={parser}", *shown


def _seconds_left(command: Command, now: datetime) -> float:
    return max(0.1, (command.expires_at - now - _REPLY_MARGIN).total_seconds())
