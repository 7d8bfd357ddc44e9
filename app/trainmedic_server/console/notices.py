"""Notices about a form's result, shown on the next page."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

COOKIE = "trainmedic_done"  # not in the address, where a link could fake a notice
_SECONDS = 60
SENTENCES: Mapping[str, str] = {  # by key: the only part of a notice in the cookie
    "approve": "Approved.",
    "reject": "Rejected. Check the column Undo for pending undos.",
    "cancel": "Cancelled. Check the column Undo for pending undos.",
    "undo": "The undo is requested.",
    "close_undo": "The obligation to undo is closed.",
    "approve_many": "All chosen questions are approved.",
    "reject_many": "All chosen questions are rejected.",
    "started": "Started. This is its run.",
    "not_started": "Not started. The reason is below.",
    "channel": "The test message is sent. Check that it has arrived.",
    "mode": "Its mode is set.",
    "pause": "Paused.",
    "resume": "Resumed.",
    "breaker": "The breaker is closed. Its count restarts.",
    "session": "The session is ended.",
}


def set_notice(response: Response, done: str) -> None:
    response.set_cookie(COOKIE, done, max_age=_SECONDS, httponly=True, samesite="strict")


def notice_of(request: Request) -> str:
    return SENTENCES.get(request.cookies.get(COOKIE, ""), "")


def clear(response: Response) -> None:
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
