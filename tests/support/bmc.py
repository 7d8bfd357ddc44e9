"""A stand-in for a BMC with Redfish: a service with one or more systems, their power state and their reset.

It models: PowerState with PoweringOff and PoweringOn in between, ResetType@Redfish.AllowableValues, basic
authentication, refusals and lost answers on demand. It does not model: sessions, tasks, ETags, ActionInfo, events,
graceful shutdown, and all other resources. `tests/contract/test_redfish.py` runs on a real service or another emulator
too.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

RESET = "Actions/ComputerSystem.Reset"
_LOOKS_BETWEEN = 1
"""How often a system is read while its power changes."""


@dataclass
class Bmc:
    """``asked`` are the reset types that arrived, in order."""

    systems: Sequence[str] = ("1",)
    page: int = 0
    """Systems on a page of the list; 0: all."""
    next_link: str = ""
    """The address that it gives for the next page instead of its own."""
    password: str | None = None
    allowed: Sequence[str] = ("On", "ForceOff", "ForceRestart")
    power: str = "On"
    stays: bool = False
    refuses: list[int] = field(default_factory=list)
    """Statuses of the next resets, which then have no effect; 0: carried out, and not answered usefully (502)."""
    reset_at: str = ""
    """A path that it gives for the reset instead of its own."""
    turns_after: float = 0.0
    """Least seconds from a reset to its effect."""
    next_password: str | None = None
    """The password after a reset; None: the same."""
    failing_looks: int = 0
    """Readings of a system's state that fail after a reset (503)."""
    padding: int = 0
    """Characters of other members of a system's document."""
    asked: list[str] = field(default_factory=list)
    _coming: str | None = None
    _looks: int = 0
    _turns_at: float = 0.0

    def app(self) -> Starlette:
        base = "/redfish/v1/Systems"
        return Starlette(
            routes=[
                Route(base, self._list),
                Route(f"{base}/{{name}}", self._system),
                Route(f"{base}/{{name}}/{RESET}", self._reset, methods=["POST"]),
            ]
        )

    def _may(self, request: Request) -> bool:
        expected = base64.b64encode(f"medic:{self.password}".encode()).decode()
        return self.password is None or request.headers.get("authorization") == f"Basic {expected}"

    async def _list(self, request: Request) -> Response:
        if not self._may(request):
            return _error(401, "no session, or wrong password")
        begin = int(request.query_params.get("$skip", "0"))
        end = begin + (self.page or len(self.systems))
        members = [{"@odata.id": f"/redfish/v1/Systems/{name}"} for name in self.systems[begin:end]]
        next_link = self.next_link or f"/redfish/v1/Systems?$skip={end}"
        more = {"Members@odata.nextLink": next_link} if end < len(self.systems) else {}
        return JSONResponse({"Members": members, **more})

    async def _system(self, request: Request) -> Response:
        if not self._may(request):
            return _error(401, "no session, or wrong password")
        if self._coming is not None:
            if self._looks == 0 and time.monotonic() >= self._turns_at:
                self.power, self._coming = self._coming, None
            else:
                self._looks = max(self._looks - 1, 0)
        if self.asked and self.failing_looks:
            self.failing_looks -= 1
            return _error(503, "the service starts")
        path = request.url.path
        reset: dict[str, Any] = {
            "target": self.reset_at or f"{path}/{RESET}",
            "ResetType@Redfish.AllowableValues": list(self.allowed),
        }
        document = {"@odata.id": path, "PowerState": self.power, "Actions": {"#ComputerSystem.Reset": reset}}
        return JSONResponse({**document, "Oem": "x" * self.padding})

    async def _reset(self, request: Request) -> Response:
        if not self._may(request):
            return _error(401, "no session, or wrong password")
        kind = (await request.json())["ResetType"]
        self.asked.append(kind)
        status = self.refuses.pop(0) if self.refuses else 204
        if status >= 400:
            return _error(status, "the system is busy")
        self._turns_at = time.monotonic() + self.turns_after
        self.password = self.next_password or self.password
        if not self.stays:
            self._coming, self._looks = ("Off" if kind == "ForceOff" else "On"), _LOOKS_BETWEEN
            self.power = "PoweringOff" if kind == "ForceOff" else "PoweringOn"
        return Response(status_code=status) if status else _error(502, "bad gateway")


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"code": "Base.1.8.GeneralError", "message": message}}, status)
