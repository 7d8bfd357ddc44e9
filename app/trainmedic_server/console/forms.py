"""Forms, which call the API and answer with a page."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.console import alert_pages, notices, playbook_pages, server_pages
from trainmedic_server.console.app import Parts
from trainmedic_server.console.page_request import PageRequest
from trainmedic_server.console.sign_in import FORM_BYTES, local_path, read_fields
from trainmedic_server.domain.run import Status
from trainmedic_server.http.body import BodyReader
from trainmedic_server.http.limits import MIB
from trainmedic_server.http.problems import HttpProblem

Fields = Mapping[str, str]
_PASTED_BYTES = MIB
_LONGEST_LINK = 4000  # shorter input goes into the address, which can be shared
_MOST_ANSWERS = 50
_ANSWERED = {"approve": "approve_many", "reject": "reject_many"}  # key in `notices.SENTENCES` by answer


class Forms:
    def __init__(self, parts: Parts, bodies: BodyReader) -> None:
        self._parts = parts
        self._bodies = bodies

    async def take(self, request: Request) -> Response:
        self._parts.auth.require(request, TokenRole.VIEWER, acts=True)
        path = request.url.path
        most_bytes = _PASTED_BYTES if path == "/console/explain" else FORM_BYTES
        pairs = await read_fields(self._bodies, request, most_bytes)
        if path == "/console/approvals":  # the only form whose names repeat
            return await _answers(self._parts.page_request(request, {}), pairs)
        for pattern, take in _FORMS:
            if match := re.fullmatch(pattern, path):
                return await take(self._parts.page_request(request, match.groupdict()), dict(pairs))
        raise HttpProblem(HTTPStatus.NOT_FOUND, "There is no such form.")


async def _answers(page: PageRequest, pairs: list[tuple[str, str]]) -> Response:
    fields = dict(pairs)
    chosen = list(dict.fromkeys(value for name, value in pairs if name == "run" and value))
    kind = fields.get("kind", "")
    if kind not in _ANSWERED:
        raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, "Choose approve or reject.")
    if not 0 < len(chosen) <= _MOST_ANSWERS:
        raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, f"Choose 1 to {_MOST_ANSWERS} questions.")
    outcomes = [(run_id, *await _answer(page, run_id, kind, _note(fields))) for run_id in chosen]
    if all(is_done for _, is_done, _ in outcomes):
        return _show("/approvals", _ANSWERED[kind])
    return await page.page("answered.html", title="Answers", path="/approvals", kind=kind, outcomes=outcomes)


async def _answer(page: PageRequest, run_id: str, kind: str, note: str) -> tuple[bool, str]:
    """Return whether the command was taken, and its run, or why not."""
    try:
        run = await page.api.post(f"/runs/{run_id}/{kind}", {"note": note})
    except HttpProblem as problem:
        return False, problem.detail
    return True, f"{run['playbook']} on {run['target'] or 'no target'}"


async def _explain(page: PageRequest, fields: Fields) -> Response:
    given = {name: value for name, value in fields.items() if value}
    if len(address := f"/explain?{urlencode(given)}") <= _LONGEST_LINK:
        return RedirectResponse(address, HTTPStatus.SEE_OTHER)
    return await alert_pages.explain(replace(page, query=given))


async def _channel_test(page: PageRequest, fields: Fields) -> Response:
    sent = await page.api.post(f"/channels/{page.parameters['channel']}/test", {"note": _note(fields)})
    if sent["sent"]:
        return _show("/settings#channels", "channel")
    return await server_pages.settings(page, tested=sent)


async def _order(page: PageRequest, fields: Fields) -> Response:
    kind = page.parameters["kind"]
    body: dict[str, Any] = {"note": _note(fields)}
    if kind in ("reject", "cancel") and fields.get("undo"):
        body["undo"] = True
    await page.api.post(f"/runs/{page.parameters['run']}/{kind}", body)
    return _back(fields, kind)


async def _retry(page: PageRequest, fields: Fields) -> Response:
    return _show_started(await page.api.post(f"/runs/{page.parameters['run']}/retry", {"note": _note(fields)}))


async def _start(page: PageRequest, fields: Fields) -> Response:
    body = playbook_pages.start_body(page.parameters["playbook"], fields) | _given(fields, "note", "key")
    return _show_started(await page.api.post("/runs", body))


async def _mode(page: PageRequest, fields: Fields) -> Response:
    body = _given(fields, "mode", "note", "until", "for")
    await page.api.post(f"/playbooks/{page.parameters['playbook']}/mode", body)
    return _back(fields, "mode")


async def _end_session(page: PageRequest, fields: Fields) -> Response:
    await page.api.ask("DELETE", f"/sessions/{page.parameters['session']}")
    return _back(fields, "session")


async def _pause(page: PageRequest, fields: Fields) -> Response:
    body: dict[str, Any] = _given(fields, "playbook", "node", "job", "for", "note", "starts")
    if labels := fields.get("labels", "").strip():
        body["labels"] = playbook_pages.labels_of(labels)
    await page.api.post("/pause", body)
    return _back(fields, "pause")


async def _resume(page: PageRequest, fields: Fields) -> Response:
    body: dict[str, Any] = _given(fields, "id", "note")
    if fields.get("breaker"):
        body["breaker"] = True
    await page.api.post("/resume", body)
    return _back(fields, "breaker" if fields.get("breaker") else "resume")


def _show(path: str, done: str) -> Response:
    response = RedirectResponse(path, HTTPStatus.SEE_OTHER)
    notices.set_notice(response, done)
    return response


def _back(fields: Fields, done: str) -> Response:
    return _show(local_path(fields.get("next")), done)


def _show_started(done: Mapping[str, Any]) -> Response:
    is_refused = done["run"]["status"] == Status.NOT_STARTED.value
    return _show(f"/runs/{done['run']['run_id']}", "not_started" if is_refused else "started")


def _note(fields: Fields) -> str:
    return fields.get("note", "").strip()


def _given(fields: Fields, *names: str) -> dict[str, str]:
    return {name: value for name in names if (value := fields.get(name, "").strip())}


_RUN = "/console/runs/(?P<run>[0-9A-Za-z_-]{1,64})"
_PLAYBOOK = "/console/playbooks/(?P<playbook>[^/]{1,200})"
_FORMS: tuple[tuple[str, Callable[[PageRequest, Fields], Awaitable[Response]]], ...] = (
    ("/console/explain", _explain),
    ("/console/channels/(?P<channel>[^/]{1,200})/test", _channel_test),
    (f"{_RUN}/(?P<kind>approve|reject|cancel|undo|close_undo)", _order),
    (f"{_RUN}/retry", _retry),
    (f"{_PLAYBOOK}/start", _start),
    (f"{_PLAYBOOK}/mode", _mode),
    (f"{_PLAYBOOK}/test", playbook_pages.run_tests),
    (f"{_PLAYBOOK}/try", playbook_pages.dry_run),
    ("/console/sessions/(?P<session>[0-9a-f-]{36})/end", _end_session),
    ("/console/pause", _pause),
    ("/console/resume", _resume),
)
