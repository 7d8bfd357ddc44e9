from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from trainmedic_core.expressions.regexes import SearchPattern
from trainmedic_logs.domain.log_search import LogLevel
from trainmedic_server.console import log_excerpt, log_line, log_view
from trainmedic_server.console.log_excerpt import LogExcerpt
from trainmedic_server.console.log_view import LogPlace, LogView
from trainmedic_server.console.page_request import PageRequest
from trainmedic_server.http.problems import HttpProblem

MOST_FINDINGS = 50
_JOB_FILTERS = ("job", "claimed_job")
_WHAT_TO_DO = {
    HTTPStatus.FORBIDDEN: "Remove that filter, or sign in with a token that permits it.",
    HTTPStatus.NOT_FOUND: "Enter the job's node in the field Node to search that node.",
    HTTPStatus.TOO_MANY_REQUESTS: "Wait a few seconds, and search again.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The page Nodes lists the connected agents. Search again when they respond. If none"
    " responds, check that the agents' policies allow reading logs.",
}


class LogRow(NamedTuple):
    line: log_line.ShownLine
    body: Markup
    finding: Mapping[str, Any] | None
    is_moment: bool  # True for the line nearest to the view's moment


async def log(page: PageRequest) -> Response:
    job, now = page.parameters["job"], page.renderer.now()
    view, wrong = LogView.read(job, page.query, now)
    excerpt, refusal, todo = LogExcerpt([], []), "", ""
    if not wrong:
        try:
            excerpt = await log_excerpt.read(view, lambda query: page.api.documents(f"/jobs/{job}/logs", query), now)
        except HttpProblem as problem:
            if problem.status == HTTPStatus.UNPROCESSABLE_ENTITY:
                wrong = problem.detail
            else:
                refusal, todo = problem.detail, _WHAT_TO_DO.get(HTTPStatus(problem.status), "")
    findings = await findings_of(page, job)
    diagnosis = await _or_none(page, f"/jobs/{job}/diagnosis")
    return await page.page(
        "log.html",
        title=f"Log of {job}",
        status=HTTPStatus.UNPROCESSABLE_ENTITY if wrong else HTTPStatus.OK,
        path=f"/jobs/{job}/logs",
        name=job,
        view=view,
        excerpt=excerpt,
        rows=rows(view, excerpt.lines, findings),
        wrong=wrong,
        refusal=refusal,
        todo=todo,
        findings=findings,
        diagnosis=diagnosis,
        filters=log_view.FILTERS,
        levels=[level.value for level in LogLevel],
        permanent=view.permanent(now),
        behind=excerpt.end or LogPlace(now),  # the follower begins there
        look=page.renderer.base.link + "/approvals",  # the script updates the head from that page: a log search is slow
    )


def rows(view: LogView, lines: list[log_line.ShownLine], findings: list[Mapping[str, Any]]) -> list[LogRow]:
    pattern = pattern_of(view)
    near = _nearest(view, lines)
    return [LogRow(line, line.body(pattern), log_line.finding_of(line, findings), line is near) for line in lines]


def pattern_of(view: LogView) -> SearchPattern | None:
    """Return None without a search, or for an invalid pattern, which the API reports."""
    try:
        return SearchPattern(view.grep) if view.grep else None
    except ValueError:
        return None


async def findings_of(page: PageRequest, job: str, most: int = MOST_FINDINGS) -> list[Mapping[str, Any]]:
    """Return findings of a job, and of log files that only name it, newest first. A refused query adds none."""
    findings: list[Mapping[str, Any]] = []
    for name in _JOB_FILTERS:
        answer = await _or_none(page, "/findings", {name: job, "limit": most})
        findings += answer["items"] if answer else ()
    return sorted(findings, key=lambda each: str(each["heard_first_at"]), reverse=True)[:most]


async def opened(page: PageRequest) -> Response:
    """Redirect from the form on the page Jobs."""
    job = page.query.get("job", "").strip()
    return RedirectResponse(f"/jobs/{quote(job, safe='')}/logs" if job else "/jobs", HTTPStatus.SEE_OTHER)


def _nearest(view: LogView, lines: list[log_line.ShownLine]) -> log_line.ShownLine | None:
    moment = view.moment
    if moment is None or not lines:
        return None
    nearest = min(lines, key=lambda line: abs(line.at - moment))
    return nearest if abs(nearest.at - moment).total_seconds() <= 1 else None


async def _or_none(page: PageRequest, path: str, query: Mapping[str, Any] | None = None) -> Any:
    try:
        return await page.api.get(path, query)
    except HttpProblem:
        return None
