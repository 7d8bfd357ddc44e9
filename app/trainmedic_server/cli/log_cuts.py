"""Lines about partly read logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainmedic_core import words
from trainmedic_core.cli.exits import CommandError, NotAllowed, UnknownName
from trainmedic_logs.domain.log_cuts import CutKind
from trainmedic_server.cli.client import Client
from trainmedic_server.presentation import times

_MOST_SHOWN = 5
_MEANS: Mapping[CutKind, str] = {
    CutKind.FILES: "{} log files not followed",
    CutKind.ENTRIES: "{} scans ended before the last directory entry",
    CutKind.JOBS: "{} job directories not scanned",
    CutKind.SECONDS: "{} scans shortened or postponed",
    CutKind.LINES: "{} lines not checked",
    CutKind.FINDINGS: "{} findings not reported",
    CutKind.DUMPS: "{} flight recorder dumps not read",
}


def lines(client: Client, job: str | None = None, node: str | None = None) -> Iterator[str]:
    """Yield nothing if the server lacks this list or the token may not read it."""
    query = {name: value for name, value in (("job", job), ("node", node)) if value is not None}
    try:
        page = client.get("agents/log-cuts", {**query, "limit": str(_MOST_SHOWN)})
    except (UnknownName, NotAllowed):
        return
    except CommandError as error:
        yield f"Unknown which logs agents read only in part: {error.format_message()}"
        return
    for item in page["items"]:
        yield _line(item)
    if page["left_out"]:
        yield f"CUT {page['left_out']} more, see GET /agents/log-cuts"


def _line(item: Mapping[str, Any]) -> str:
    kind = "directory" if str(item["job"]).startswith("/") else "job"
    whose = f"{kind} {words.plain(item['job'])}" if item["job"] else "jobs"
    owner = f" of user {item['uid']}" if item["uid"] is not None else ""
    try:
        what = _MEANS[CutKind(item["what"])].format(f"{item['count']:,}")
    except ValueError:  # from a newer server
        what = f"{item['count']:,} {words.plain(item['what'])}"
    since = times.stamp(item["since"])
    return f"CUT {whose}{owner} on {words.plain(item['node'])}: {what} since {since}, its budget is used up"
