"""Tools. `Reader` can change nothing, even if the token could."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote

from msgspec import Struct, field

from trainmedic_core.cli import exits
from trainmedic_logs.domain.log_search import LogLevel
from trainmedic_server.cli import why
from trainmedic_server.cli.client import Client
from trainmedic_server.cli.mcp_results import bounded
from trainmedic_server.domain.run import FindableDecision

Arguments = Mapping[str, Any]
_LONGEST_TEXT = 1_000
_MOST_LABELS = 64


class Reader:
    def __init__(self, client: Client) -> None:
        self._client = client

    def get(self, path: str, params: Arguments | None = None) -> Any:
        return self._client.get(path, params)

    def lines(self, path: str, params: Arguments, most: int) -> list[Any]:
        read: list[Any] = []
        with closing(self._client.lines(path, params)) as lines:
            for answer in map(json.loads, filter(None, lines)):
                most -= "note" not in answer  # the note on a cut comes after the last line
                if most < 0:
                    break
                read.append(answer)
        return read

    def post(self, path: str, body: Any = None) -> Any:
        """Raise Failure for all paths but ``explain``."""
        if path != "explain":
            raise exits.Failure(f"POST /{path} is not available to tools: they change nothing")
        return self._client.post(path, body)


class Parameter(Struct, frozen=True):
    description: str
    type: str = "string"
    """``string``, ``integer``, ``boolean``, or ``labels``: an object with text values."""
    is_required: bool = False
    choices: tuple[str, ...] = ()
    least: int = 0
    most: int = 1_000_000_000  # Largest integer, or most labels

    def schema(self) -> dict[str, Any]:
        match self.type:
            case "labels":
                form: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
                form["maxProperties"] = min(self.most, _MOST_LABELS)
            case "integer":
                form = {"type": "integer", "minimum": self.least, "maximum": self.most}
            case "string":
                form = {"type": "string", "minLength": 1, "maxLength": _LONGEST_TEXT}
            case _:
                form = {"type": self.type}
        return {**form, **({"enum": list(self.choices)} if self.choices else {}), "description": self.description}

    def problem(self, value: Any) -> str | None:
        """Return the valid form for an invalid value, else None."""
        match self.type:
            case "integer":
                is_fine = type(value) is int and self.least <= value <= self.most
                right_form = f"a whole number from {self.least} to {self.most}"
            case "boolean":
                is_fine, right_form = isinstance(value, bool), "true or false"
            case "labels":
                most = min(self.most, _MOST_LABELS)
                is_fine = (
                    isinstance(value, dict) and len(value) <= most and all(map(_is_text, [*value, *value.values()]))
                )
                right_form = f"an object of at most {most} labels and their values"
            case _:
                is_fine = _is_text(value) and value != "" and value in (self.choices or (value,))
                right_form = " or ".join(self.choices) or f"a text of 1 to {_LONGEST_TEXT} characters"
        return None if is_fine else right_form


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


class Tool(Struct, frozen=True):
    name: str
    description: str
    answer: Callable[[Reader, Arguments], Any]
    source: str  # API call, named in the result
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def listed(self) -> dict[str, Any]:
        required = [name for name, parameter in self.parameters.items() if parameter.is_required]
        return {
            "name": self.name,
            "title": self.name.replace("_", " ").capitalize(),
            "description": self.description,
            "inputSchema": {
                "type": "object",
                "properties": {name: parameter.schema() for name, parameter in self.parameters.items()},
                **({"required": required} if required else {}),
                "additionalProperties": False,
            },
            "annotations": {"readOnlyHint": True, "destructiveHint": False, "openWorldHint": False},
        }

    def checked(self, arguments: Any) -> Arguments:
        if not isinstance(arguments, dict):
            raise exits.InvalidInput("the arguments must be an object")
        for name, value in arguments.items():
            if name not in self.parameters:
                names = ", ".join(self.parameters) or "none"
                raise exits.InvalidInput(f"{self.name} has no argument {name[:100]!r}; its arguments are: {names}")
            if right_form := self.parameters[name].problem(value):
                raise exits.InvalidInput(f"{name} must be {right_form}")
        for name, parameter in self.parameters.items():
            if parameter.is_required and name not in arguments:
                raise exits.InvalidInput(f"{self.name} needs {name}: {parameter.description}")
        return arguments


def _path_segment(name: str) -> str:
    if name in (".", ".."):
        raise exits.InvalidInput(f"{name!r} is not a name")
    return quote(name, safe="")


def _query_of(arguments: Arguments, *names: str, **defaults: Any) -> dict[str, Any]:
    chosen = {name: arguments[name] for name in names if name in arguments}
    written = {name: str(value).lower() if isinstance(value, bool) else value for name, value in chosen.items()}
    return {**defaults, **written}


def _page(reader: Reader, path: str, arguments: Arguments, query: Arguments) -> Any:
    """Return a page that fits in one result. If it were cut, ``next`` would skip the rest."""
    limit = arguments.get("limit", 20)
    while True:
        document = reader.get(path, {**query, **_query_of(arguments, "cursor"), "limit": limit})
        if limit == 1 or not bounded(document)[1]:
            return document
        limit //= 2


def _why(reader: Reader, arguments: Arguments) -> Any:
    since = arguments.get("since")
    return why.history_and_forecast(
        reader, arguments["alert"], arguments.get("labels", {}), since, arguments.get("limit", 5)
    )


def _explain(reader: Reader, arguments: Arguments) -> Any:
    labels = {**arguments.get("labels", {}), "alertname": arguments["alert"]}
    return reader.post("explain", {"labels": labels})


def _alerts(reader: Reader, arguments: Arguments) -> Any:
    query = _query_of(arguments, "status", "since", "until", "reacted")
    pairs = [f"{name}={value}" for name, value in arguments.get("labels", {}).items()]
    named = {"alertname": arguments["alert"]} if "alert" in arguments else {}
    return _page(reader, "alerts", arguments, {**query, **named, **({"label": pairs} if pairs else {})})


_HISTORY = ("playbook", "status", "decision", "job", "node", "target", "by", "open", "owes_undo", "since", "until")


def _history(reader: Reader, arguments: Arguments) -> Any:
    named = {"alertname": arguments["alert"]} if "alert" in arguments else {}
    return _page(reader, "history", arguments, _query_of(arguments, *_HISTORY) | named)


def _report(reader: Reader, arguments: Arguments) -> Any:
    path = f"jobs/{_path_segment(arguments['job'])}/report" if "job" in arguments else "report"
    return reader.get(path, _query_of(arguments, "since", "until"))


def _logs(reader: Reader, arguments: Arguments) -> Any:
    most = arguments.get("limit", 100)
    names = ("rank", "node", "attempt", "since", "until", "grep", "level", "kernel")
    path = f"jobs/{_path_segment(arguments['job'])}/logs"
    return reader.lines(path, _query_of(arguments, *names, limit=most), most)


def _playbook(reader: Reader, arguments: Arguments) -> Any:
    return reader.get(f"playbooks/{_path_segment(arguments['name'])}" if "name" in arguments else "playbooks")


_SINCE = Parameter("Start: an RFC 3339 time, or a duration before now, such as 90m or 7d.")
_UNTIL = Parameter("End: an RFC 3339 time, or a duration before now.")
_LIMIT = Parameter("Most items.", "integer", least=1, most=100)
_PAGE = {"limit": _LIMIT, "cursor": Parameter("`next` of the page before, with all other arguments unchanged.")}
_ALERT = Parameter("The alert's name, such as GPUTemperatureHigh.")
_NAMED_ALERT = Parameter(_ALERT.description, is_required=True)
_LABELS = Parameter('Some of its labels, such as {"job_name": "llm-1"}.', "labels")
_FILTERED_LABELS = Parameter(_LABELS.description, "labels", most=20)
_JOB = Parameter("The training job's name.")
_NAMED_JOB = Parameter(_JOB.description, is_required=True)
_LEVELS = tuple(map(str, LogLevel))

TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "now",
            "Current state: mode, pauses and breaker; pending approvals; active changes (from, to, and when they are "
            "reverted); open runs and their next step; lost agents and jobs. Begin here.",
            lambda reader, _: reader.get("now"),
            "GET /now",
        ),
        Tool(
            "why",
            "Why something, or nothing, happened for an alert: each time it was received, what each playbook did, and "
            "what would happen if it fired now.",
            _why,
            "GET /alerts and POST /explain",
            {"alert": _NAMED_ALERT, "labels": _LABELS, "since": _SINCE, "limit": _LIMIT},
        ),
        Tool(
            "explain",
            "What would be done if an alert with these labels fired now: playbooks, guards, target, steps with their "
            "parameters. Changes nothing.",
            _explain,
            "POST /explain",
            {"alert": _NAMED_ALERT, "labels": _LABELS},
        ),
        Tool(
            "alerts",
            "Received alerts, newest first, with each playbook's reaction. reacted=false: those without a reaction.",
            _alerts,
            "GET /alerts",
            {"alert": _ALERT, "labels": _FILTERED_LABELS,
             "status": Parameter("Only this status.", choices=("firing", "resolved")),
             "reacted": Parameter("Whether a playbook reacted.", "boolean"), "since": _SINCE, "until": _UNTIL, **_PAGE},
        ),
        Tool(
            "history",
            "Runs, and decisions not to start one, newest first: what was done, on what, how it ended.",
            _history,
            "GET /history",
            {"alert": _ALERT, "playbook": Parameter("The playbook's name."), "job": _JOB,
             "status": Parameter("Such as succeeded, failed, waiting, awaiting_approval, not_started."),
             "decision": Parameter("Whether a run started, or why not.", choices=tuple(map(str, FindableDecision))),
             "node": Parameter("The node's name."), "target": Parameter("As in items, such as job:llm-1."),
             "by": Parameter("Who approved, rejected, cancelled or undid it."),
             "open": Parameter("Whether it is open.", "boolean"),
             "owes_undo": Parameter("Closed, with a pending undo.", "boolean"),
             "since": _SINCE, "until": _UNTIL, **_PAGE},
        ),
        Tool(
            "run",
            "One run in full: alerts, decision, each step with parameters, attempts and output, undo, what comes next, "
            "measured effect.",
            lambda reader, arguments: reader.get(f"history/{_path_segment(arguments['run'])}"),
            "GET /history/{run_id}",
            {"run": Parameter("Its ID, or a beginning or end of it of at least 4 characters.", is_required=True)},
        ),
        Tool(
            "approvals",
            "Pending approvals: question, steps that follow, who may answer, until when. You cannot answer; a person "
            "does by the link, the command line or a chat.",
            lambda reader, _: reader.get("approvals"),
            "GET /approvals",
        ),
        Tool(
            "jobs",
            "Connected training jobs by name, in pages: step, nodes, GPUs, capabilities.",
            lambda reader, arguments: _page(reader, "jobs", arguments, _query_of(arguments, "name", "cluster")),
            "GET /jobs",
            {"name": Parameter("Only the job of this name."),
             "cluster": Parameter("Also jobs that only Kubernetes knows, on the last page.", "boolean"), **_PAGE},
        ),
        Tool(
            "agents",
            "Connected node agents and their GPUs by node name, in pages.",
            lambda reader, arguments: _page(reader, "agents", arguments, _query_of(arguments, "name")),
            "GET /agents",
            {"name": Parameter("Only the agent of this node."), **_PAGE},
        ),
        Tool("playbooks", "Loaded playbooks and their outcomes in 30 days; with a name, its text.",
             _playbook, "GET /playbooks", {"name": Parameter("One playbook's name.")}),
        Tool(
            "report",
            "With a job, the use of its time: efficiency, goodput, bottleneck, failures. Without, for all jobs: causes "
            "of failures, GPU-hours, benefit of repairs, nodes that fail repeatedly.",
            _report,
            "GET /report",
            {"job": _JOB, "since": _SINCE, "until": _UNTIL},
        ),
        Tool(
            "diagnose",
            "Cause of a job's failure: ranks, node, evidence, advice.",
            lambda reader, arguments: reader.get(
                f"jobs/{_path_segment(arguments['job'])}/diagnosis", _query_of(arguments, "attempt")
            ),
            "GET /jobs/{job}/diagnosis",
            {"job": _NAMED_JOB,
             "attempt": Parameter("Attempt; by default the newest.", "integer", least=1, most=1_000_000)},
        ),
        Tool(
            "logs",
            "Lines of a job's logs, oldest first; by default of the last ten minutes.",
            _logs,
            "GET /jobs/{job}/logs",
            {"job": _NAMED_JOB, "grep": Parameter("RE2 regular expression."),
             "level": Parameter("Lines of at least this level.", choices=_LEVELS),
             "rank": Parameter("Only this rank.", "integer"), "node": Parameter("Only this node."),
             "attempt": Parameter("Only this attempt.", "integer", least=1),
             "kernel": Parameter("Also kernel lines of the job's nodes.", "boolean"),
             "since": _SINCE, "until": _UNTIL, "limit": Parameter("Lines.", "integer", least=1, most=500)},
        ),
    )
}  # fmt: skip
