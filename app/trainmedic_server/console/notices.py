"""What a form did, said on the page that it leads to.

The browser carries it there in a cookie, and not in the address: whoever sends a link does not choose what the page of
another says was done.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

COOKIE = "trainmedic_done"
_SECONDS = 60
SENTENCES: Mapping[str, str] = {
    "approve": "Approved.",
    "reject": "Rejected. Given back lists the pending undos.",
    "cancel": "Cancelled. Given back lists the pending undos.",
    "undo": "The undo is ordered.",
    "close_undo": "The duty is closed.",
    "approve_many": "All that were chosen are approved.",
    "reject_many": "All that were chosen are rejected.",
    "started": "Started: this is its run.",
    "not_started": "Not started; why is written here.",
    "channel": "The test message is sent: look whether it has arrived.",
    "mode": "Its mode is set.",
    "pause": "Paused.",
    "resume": "Resumed.",
    "breaker": "The breaker is closed. Its count begins again.",
    "session": "The session is ended.",
}


def leave(response: Response, done: str) -> None:
    """Have the next page say what was `done`, one of `SENTENCES`."""
    response.set_cookie(COOKIE, done, max_age=_SECONDS, httponly=True, samesite="strict")


def left(request: Request) -> str:
    """The sentence that was left for this page; empty where none was."""
    return SENTENCES.get(request.cookies.get(COOKIE, ""), "")


def clear(response: Response) -> None:
    """It is said once."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
