"""Forms that call the API and lead back to their page."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from trainmedic_server.auth.auth import Authenticator, Principal
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.console import notices
from trainmedic_server.console.inner_api import InnerApi
from trainmedic_server.console.playbook_pages import labels_of, start_body
from trainmedic_server.console.sign_in import local_path, read_form
from trainmedic_server.domain.run import Status
from trainmedic_server.http.body import BodyReader
from trainmedic_server.http.problems import HttpProblem

Fields = Mapping[str, str]
_RUN = re.compile(r"/console/runs/(?P<run>[0-9A-Za-z_-]{1,64})/(?P<kind>approve|reject|cancel|undo|close_undo|retry)")
_RUN_ENDING_KINDS = ("reject", "cancel")
_PLAYBOOK = re.compile(r"/console/playbooks/(?P<name>[^/]{1,200})/mode")
_START = re.compile(r"/console/playbooks/(?P<name>[^/]{1,200})/start")
_SESSION = re.compile(r"/console/sessions/(?P<session>[0-9a-f-]{36})/end")


class Forms:
    def __init__(self, auth: Authenticator, api: InnerApi, bodies: BodyReader) -> None:
        self._auth = auth
        self._api = api
        self._bodies = bodies

    async def take(self, request: Request) -> Response:
        principal = self._auth.require(request, TokenRole.VIEWER, acts=True)
        fields = await read_form(self._bodies, request)
        path = request.url.path
        done, leads_to = await self._do(principal, path, fields)
        response = RedirectResponse(leads_to or local_path(fields.get("next")), HTTPStatus.SEE_OTHER)
        notices.set_notice(response, done)
        return response

    async def _do(self, principal: Principal, path: str, fields: Fields) -> tuple[str, str]:
        """Return the key of a notice, and the page to show, "" for the form's own."""
        if match := _RUN.fullmatch(path):
            body = _note_body(fields) | (
                {"undo": True} if fields.get("undo") and match["kind"] in _RUN_ENDING_KINDS else {}
            )
            done = await self._api.ask(principal, "POST", f"/runs/{match['run']}/{match['kind']}", body=body)
            return _notice_and_page_of_run(done) if match["kind"] == "retry" else (match["kind"], "")
        if match := _START.fullmatch(path):
            body = start_body(match["name"], fields) | _given(fields, "note", "key")
            return _notice_and_page_of_run(await self._api.ask(principal, "POST", "/runs", body=body))
        if match := _SESSION.fullmatch(path):
            await self._api.ask(principal, "DELETE", f"/sessions/{match['session']}")
            return "session", ""
        if match := _PLAYBOOK.fullmatch(path):
            body = _given(fields, "mode", "note", "until", "for")
            await self._api.ask(principal, "POST", f"/playbooks/{match['name']}/mode", body=body)
            return "mode", ""
        switch_form = _SWITCH_FORMS.get(path)
        if switch_form is None:
            raise HttpProblem(HTTPStatus.NOT_FOUND, "There is no such form.")
        return await switch_form(self._api, principal, fields), ""


async def _pause(api: InnerApi, principal: Principal, fields: Fields) -> str:
    body: dict[str, Any] = _given(fields, "playbook", "node", "job", "for", "note", "starts")
    if labels := fields.get("labels", "").strip():
        body["labels"] = labels_of(labels)
    await api.ask(principal, "POST", "/pause", body=body)
    return "pause"


async def _resume(api: InnerApi, principal: Principal, fields: Fields) -> str:
    body: dict[str, Any] = _given(fields, "id", "note")
    if fields.get("breaker"):
        body["breaker"] = True
    await api.ask(principal, "POST", "/resume", body=body)
    return "breaker" if fields.get("breaker") else "resume"


_SWITCH_FORMS: Mapping[str, Callable[[InnerApi, Principal, Fields], Awaitable[str]]] = {
    "/console/pause": _pause,
    "/console/resume": _resume,
}


def _notice_and_page_of_run(done: Mapping[str, Any]) -> tuple[str, str]:
    is_refused = done["run"]["status"] == Status.NOT_STARTED.value
    return "not_started" if is_refused else "started", f"/runs/{done['run']['run_id']}"


def _note_body(fields: Fields) -> dict[str, Any]:
    return {"note": fields.get("note", "").strip()}


def _given(fields: Fields, *names: str) -> dict[str, str]:
    return {name: value for name in names if (value := fields.get(name, "").strip())}
