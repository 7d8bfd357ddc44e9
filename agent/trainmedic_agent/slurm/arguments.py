"""The argument list of each change: one process of scontrol or scancel, without a shell.

``ALL``, host lists, and lists of jobs are refused: they would reach more than the server has read. A NodeSet's name
looks like a node's; executors ask slurmctld.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainmedic_agent.errors import CommandRejected
from trainmedic_agent.slurm.policy import COMMENT

Params = Mapping[str, Any]
Arguments = Sequence[str]

UNLIMITED = "unlimited"
_NODE = re.compile(r"(?!(?i:all|default)\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_LISTED_NODE = re.compile(r"^NodeName=(\S+)", re.MULTILINE)
_JOB = re.compile(r"[1-9][0-9]{0,9}(_[0-9]{1,10})?")
_USER = re.compile(r"(?!(?i:all)\Z)[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,255}")
"""A minus before it would mean all other users."""
_RESERVATION = re.compile(r"trainmedic-[A-Za-z0-9-]{1,100}")  # only the server's own
_SIGNAL = re.compile(r"USR1|USR2|HUP|INT|TERM|CONT|STOP")
_LONGEST_REASON, _LONGEST_COMMENT = 1000, 16_000  # characters
_MOST_NAMES = 2000
_NUMBER_LIMIT = 2**32  # Slurm's numbers are below it


def for_change(action: str, params: Params) -> Arguments:
    """Return a change's arguments. Raises CommandRejected, naming the invalid parameter."""
    make, names = _CHANGES[action]
    unknown = sorted(name for name in params if name not in names)
    if unknown:
        raise CommandRejected(f"{action} does not know {', '.join(map(repr, unknown))[:300]}")
    return make(params)


def named_nodes(params: Params) -> Sequence[str]:
    """Return the nodes in parameters that `for_change` has accepted."""
    return [*([params["node"]] if "node" in params else []), *params.get("excluded_nodes", ())]


def show_nodes(names: Sequence[str]) -> Arguments:
    return "scontrol", "--all", "--oneliner", "show", "node", ",".join(names)


def listed_nodes(output: bytes) -> frozenset[str]:
    return frozenset(_LISTED_NODE.findall(output.decode(errors="replace")))


def node_name(raw: object) -> str:
    return _matching("node", raw, _NODE)


def job_id(raw: object) -> str:
    job = _matching("job", raw, _JOB)
    if any(int(number) >= _NUMBER_LIMIT for number in job.split("_")):
        # Slurm's commands take it modulo 2**32, so it would be another job.
        raise CommandRejected(f"job is {job}, and Slurm's numbers end below {_NUMBER_LIMIT}")
    return job


def _drain(params: Params) -> Arguments:
    end = params.get("resume_after")  # seconds; -1 removes an earlier end
    seconds = "-1" if end == UNLIMITED else None if end is None else str(_positive("resume_after", end))
    until = () if seconds is None else (f"resumeafter={seconds}",)
    return (*_node(params), "state=DRAIN", f"reason={_reason(params)}", *until)


def _resume(params: Params) -> Arguments:
    if "reason" in params:  # the node stays drained for others
        return (*_node(params), f"reason={_reason(params)}")
    return (*_node(params), "state=RESUME" if params.get("is_down") is True else "state=UNDRAIN")


def _reboot(params: Params) -> Arguments:
    # Never nextstate=RESUME: jobs would start on a node whose GPUs no one has checked.
    return "scontrol", "reboot", "ASAP", "nextstate=DOWN", f"reason={_reason(params)}", node_name(params.get("node"))


def _reserve(params: Params) -> Arguments:
    name = _matching("reservation", params.get("reservation"), _RESERVATION)
    if params.get("is_end") is True:
        if params.keys() > {"reservation", "is_end"}:  # `named_nodes` passes on a node that is not checked here
            raise CommandRejected("the end of a reservation takes only its name")
        return "scontrol", "delete", f"reservationname={name}"
    node = node_name(params.get("node"))
    users = _names("users", params.get("users"), _USER)
    if not users:
        raise CommandRejected("users must not be empty")
    given = (f"reservationname={name}", f"nodes={node}", f"users={users}", "starttime=now", "flags=IGNORE_JOBS,OVERLAP")
    return "scontrol", "create", "reservation", *given, f"duration={_positive('minutes', params.get('minutes'))}"


def _requeue(params: Params) -> Arguments:
    if params.get("ends_delay") is True:
        return (*_job(params), "starttime=now")
    return "scontrol", "requeuehold" if params.get("hold") is True else "requeue", job_id(params.get("job"))


def _update(params: Params) -> Arguments:
    new = []
    if "excluded_nodes" in params:
        new.append(f"excnodelist={_names('excluded_nodes', params['excluded_nodes'], _NODE)}")
    if "priority" in params:
        new.append(f"priority={_positive('priority', params['priority'])}")
    if "time_limit" in params:
        limit = params["time_limit"]  # minutes
        new.append(f"timelimit={'UNLIMITED' if limit == UNLIMITED else _positive('time_limit', limit)}")
    if not new:
        raise CommandRejected("slurm.update needs excluded_nodes, priority or time_limit")
    return (*_job(params), *new)


def _signal(params: Params) -> Arguments:
    whole = ("--full",) if params.get("with_batch") is True else ()
    sent = f"--signal={_matching('signal', params.get('signal'), _SIGNAL)}"
    return "scancel", *whole, sent, job_id(params.get("job"))


def _comment(params: Params) -> Arguments:
    if params.get("only_asks") is True:
        # Slurm looks for the job and checks rights before it refuses the partition, so nothing is changed.
        return (*_job(params), "partition=trainmedic:none")
    return (*_job(params), f"admincomment={_text('text', params.get('text'), _LONGEST_COMMENT)}")


def _node(params: Params) -> Arguments:
    return "scontrol", "update", f"nodename={node_name(params.get('node'))}"


def _job(params: Params) -> Arguments:
    return "scontrol", "update", f"jobid={job_id(params.get('job'))}"


def _reason(params: Params) -> str:
    reason = _text("reason", params.get("reason"), _LONGEST_REASON)
    if not reason or not reason.isprintable():
        raise CommandRejected("reason must be one line of text")
    return reason


_CHANGES: Mapping[str, tuple[Callable[[Params], Arguments], tuple[str, ...]]] = {
    "slurm.drain": (_drain, ("node", "reason", "resume_after")),
    "slurm.resume": (_resume, ("node", "reason", "is_down")),
    "slurm.reboot": (_reboot, ("node", "reason")),
    "slurm.reserve": (_reserve, ("reservation", "node", "users", "minutes", "is_end")),
    "slurm.hold": (lambda params: ("scontrol", "hold", job_id(params.get("job"))), ("job",)),
    "slurm.release": (lambda params: ("scontrol", "release", job_id(params.get("job"))), ("job",)),
    "slurm.requeue": (_requeue, ("job", "hold", "ends_delay")),
    "slurm.update": (_update, ("job", "excluded_nodes", "priority", "time_limit")),
    "slurm.signal": (_signal, ("job", "signal", "with_batch")),
    "slurm.cancel": (lambda params: ("scancel", job_id(params.get("job"))), ("job",)),
    COMMENT: (_comment, ("job", "text", "only_asks")),
}
ACTIONS = tuple(_CHANGES)


def _matching(name: str, raw: object, pattern: re.Pattern[str]) -> str:
    if not isinstance(raw, str) or not pattern.fullmatch(raw):
        raise CommandRejected(f"{name} is {raw!r:.100}, which is not one name that may be given to Slurm")
    return raw


def _names(name: str, raw: object, pattern: re.Pattern[str]) -> str:
    if not isinstance(raw, list) or len(raw) > _MOST_NAMES:
        raise CommandRejected(f"{name} must be a list of at most {_MOST_NAMES} names")
    return ",".join(_matching(name, each, pattern) for each in raw)


def _positive(name: str, raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 1 <= raw < _NUMBER_LIMIT:
        raise CommandRejected(f"{name} must be a whole number from 1, not {raw!r:.100}")
    return raw


def _text(name: str, raw: object, longest: int) -> str:
    if not isinstance(raw, str) or len(raw) > longest or "\0" in raw:
        raise CommandRejected(f"{name} must be text of at most {longest} characters")
    return raw
