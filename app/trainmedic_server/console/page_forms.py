"""Forms answered with a page."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from urllib.parse import urlencode

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.console import alert_pages, notices, playbook_pages, server_pages
from trainmedic_server.console.page_request import PageRequest
from trainmedic_server.console.sign_in import FORM_BYTES, read_fields
from trainmedic_server.http.body import BodyReader
from trainmedic_server.http.limits import MIB
from trainmedic_server.http.problems import HttpProblem

Fields = list[tuple[str, str]]
"""Names can repeat."""
_PASTED_BYTES = MIB
_LONGEST_LINK = 4000  # shorter input goes into the address, which can be shared
_MOST_ANSWERS = 50
_ANSWERED = {"approve": "approve_many", "reject": "reject_many"}  # key in `notices.SENTENCES` by answer


class PageForms:
    def __init__(
        self, auth: Authenticator, bodies: BodyReader, page_of: Callable[[Request, Mapping[str, str]], PageRequest]
    ) -> None:
        self._auth = auth
        self._bodies = bodies
        self._page_of = page_of

    def takes(self, path: str) -> bool:
        return any(pattern.fullmatch(path) for pattern, _ in _FORMS)

    async def take(self, request: Request) -> Response:
        self._auth.require(request, TokenRole.VIEWER, acts=True)
        is_pasted = request.url.path == "/console/explain"
        fields = await read_fields(self._bodies, request, _PASTED_BYTES if is_pasted else FORM_BYTES)
        for pattern, take in _FORMS:
            if match := pattern.fullmatch(request.url.path):
                return await take(self._page_of(request, match.groupdict()), fields)
        raise HttpProblem(HTTPStatus.NOT_FOUND, "There is no such form.")


async def _explain(page: PageRequest, pairs: Fields) -> Response:
    fields = {name: value for name, value in pairs if value}
    if len(address := f"/explain?{urlencode(fields)}") <= _LONGEST_LINK:
        return RedirectResponse(address, HTTPStatus.SEE_OTHER)
    return await alert_pages.explain(replace(page, query=fields))


async def _answers(page: PageRequest, pairs: Fields) -> Response:
    fields = dict(pairs)
    chosen = list(dict.fromkeys(value for name, value in pairs if name == "run" and value))
    kind = fields.get("kind", "")
    if kind not in _ANSWERED:
        raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, "Choose approve or reject.")
    if not 0 < len(chosen) <= _MOST_ANSWERS:
        raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, f"Choose 1 to {_MOST_ANSWERS} questions.")
    outcomes = [(run_id, *await _answer(page, run_id, kind, fields.get("note", "").strip())) for run_id in chosen]
    if all(is_done for _, is_done, _ in outcomes):
        return _redirect_with_notice("/approvals", _ANSWERED[kind])
    return await page.page("answered.html", title="Answers", path="/approvals", kind=kind, outcomes=outcomes)


async def _answer(page: PageRequest, run_id: str, kind: str, note: str) -> tuple[bool, str]:
    """Return whether the command was taken, and its run, or why not."""
    try:
        run = await page.api.ask(page.principal, "POST", f"/runs/{run_id}/{kind}", body={"note": note})
    except HttpProblem as problem:
        return False, problem.detail
    return True, f"{run['playbook']} on {run['target'] or 'no target'}"


async def _channel_test(page: PageRequest, pairs: Fields) -> Response:
    path = f"/channels/{page.parameters['channel']}/test"
    sent = await page.api.ask(page.principal, "POST", path, body={"note": dict(pairs).get("note", "").strip()})
    if sent["sent"]:
        return _redirect_with_notice("/settings#channels", "channel")
    return await server_pages.settings(page, tested=sent)


async def _playbook_test(page: PageRequest, _: Fields) -> Response:
    return await playbook_pages.run_tests(page)


async def _playbook_try(page: PageRequest, pairs: Fields) -> Response:
    return await playbook_pages.dry_run(page, dict(pairs))


def _redirect_with_notice(path: str, done: str) -> Response:
    response = RedirectResponse(path, HTTPStatus.SEE_OTHER)
    notices.set_notice(response, done)
    return response


_FORMS: tuple[tuple[re.Pattern[str], Callable[[PageRequest, Fields], Awaitable[Response]]], ...] = (
    (re.compile(r"/console/explain"), _explain),
    (re.compile(r"/console/approvals"), _answers),
    (re.compile(r"/console/channels/(?P<channel>[^/]{1,200})/test"), _channel_test),
    (re.compile(r"/console/playbooks/(?P<playbook>[^/]{1,200})/test"), _playbook_test),
    (re.compile(r"/console/playbooks/(?P<playbook>[^/]{1,200})/try"), _playbook_try),
)
