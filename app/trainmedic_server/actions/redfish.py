"""Actions ``node.power`` and ``node.power_cycle`` by Redfish, on a node's management controller (BMC).

They succeed only if the final state was read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal, cast
from urllib.parse import unquote

from pydantic import AfterValidator, BaseModel, Field, model_validator

from trainmedic.wire.reading import read_json
from trainmedic_core.target import TargetKind
from trainmedic_server.actions.base import (
    ActionParams,
    BasicAction,
    Irreversible,
    check_wanted,
    clearance_of,
    refuse_templates,
)
from trainmedic_server.actions.http import GATEWAY_LOST_ANSWER, MAY_PASS, BasicAuth, HttpRequest, SecretName, safe_url
from trainmedic_server.domain.value_types import TEXT, TEXT_LIST, Shape
from trainmedic_server.errors import OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Action, Call, Services
from trainmedic_server.ports.outside import HttpAccess, HttpReply

_SYSTEMS = "/redfish/v1/Systems"
_RESET = "#ComputerSystem.Reset"
_ALLOWED = "ResetType@Redfish.AllowableValues"
_ON, _OFF = "On", "Off"
_LOOK_EVERY = timedelta(seconds=2)
_CALL_TIME = timedelta(seconds=20)
_LAST_CALL_TIME = timedelta(seconds=5)  # for the last readings, which come after the deadline
_LARGEST_DOCUMENT = 1024 * 1024  # bytes; systems with many links have over 64 KiB
_MOST_PAGES = 16  # of a list
_LONGEST_STATE = 100  # characters
_RESET_TYPES = {_ON: "On", _OFF: "ForceOff"}  # by the state that they lead to


class BmcParams(ActionParams):
    url: Annotated[str, Field(max_length=2048), AfterValidator(safe_url)] | None = Field(
        None, description="The BMC's URL without path. Scheme and host are literal."
    )
    attribute: Annotated[str, Field(pattern=r"^[A-Za-z0-9_./-]{1,100}$")] | None = Field(
        None, description="Instead of `url`: the node's attribute in the inventory that has the BMC's address."
    )
    system: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,200}$")] | None = Field(
        None, description="Id of the system, if the BMC has several."
    )
    basic_auth: BasicAuth | None = Field(None, description="User name, and the variable with the password.")
    ca_from_env: SecretName | None = Field(
        None, description="Variable with the path of a PEM file: the only certificates to trust."
    )

    @model_validator(mode="after")
    def _one_address(self) -> BmcParams:
        if (self.url is None) == (self.attribute is None):
            raise ValueError("give one of url and attribute")
        return self


class PowerParams(BmcParams):
    do: Literal["on", "off"] = Field(description="`off` cuts the power without a shutdown.")


class _Bmc:
    def __init__(self, services: Services, call: Call, base: str) -> None:
        params = cast(BmcParams, call.params)
        basic = params.basic_auth
        self._services = services
        self._call = call
        self._base = base.rstrip("/")
        self._access = HttpAccess(
            user=basic.user if basic else None,
            password=basic.password_from_env if basic else None,
            ca=params.ca_from_env,
            largest_reply=_LARGEST_DOCUMENT,
        )
        self._until = call.deadline
        self._system = self._target = ""  # paths of the system (`find`) and of its reset (`check_offers`)
        self._accepted: list[str] = []  # reset types
        self._states: list[str] = []  # power states in the order seen; equal ones in succession once

    async def find(self, wanted: str | None) -> None:
        """Choose the system. Raises PermanentFailure if it is not unique."""
        ids = await self._systems(wanted)
        chosen = [wanted] if wanted is not None else list(ids)
        if len(chosen) != 1 or chosen[0] not in ids:
            fault = f"has no system {wanted}" if wanted is not None else f"has {len(ids)} systems; name one as system"
            raise PermanentFailure(f"the BMC {self._base} {fault}; there are: {', '.join(sorted(ids)[:8]) or 'none'}")
        self._system = ids[chosen[0]]

    async def _systems(self, wanted: str | None) -> dict[str, str]:
        """Return the systems' paths by ID."""
        ids: dict[str, str] = {}
        page = _SYSTEMS
        for _ in range(_MOST_PAGES):
            document = await self._get(page)
            members, link = document.get("Members"), document.get("Members@odata.nextLink")
            listed = members if isinstance(members, list) else []
            paths = [str(each.get("@odata.id", "")).rstrip("/") for each in listed if isinstance(each, Mapping)]
            ids |= {path.rpartition("/")[2]: path for path in paths if _is_below(path, _SYSTEMS)}
            if not link or wanted in ids:
                return ids
            page = str(link).removeprefix(self._base)
            if page.partition("?")[0].rstrip("/") != _SYSTEMS:
                break
        raise PermanentFailure(f"the BMC {self._base} lists {_SYSTEMS} in pages that cannot be read")

    async def check_offers(self, states: Sequence[str]) -> None:
        """Raise PermanentFailure if the BMC offers no reset to one of `states`."""
        actions = (await self._get(self._system)).get("Actions")
        reset = actions.get(_RESET) if isinstance(actions, Mapping) else None
        offer = reset if isinstance(reset, Mapping) else {}
        target, allowed = offer.get("target"), offer.get(_ALLOWED)
        if not isinstance(target, str) or not _is_below(target, self._system):
            raise PermanentFailure(f"the BMC {self._base} offers no reset of {self._system}")
        kinds = [_RESET_TYPES[state] for state in states]
        if isinstance(allowed, list) and (missing := [kind for kind in kinds if kind not in allowed]):
            listed = ", ".join(map(str, allowed))[:200]
            raise PermanentFailure(f"the BMC {self._base} allows {listed}, not {' and '.join(missing)}")
        self._target = target

    async def read_state(self) -> str:
        system = await self._get(self._system)
        state = system.get("PowerState")
        if not isinstance(state, str) or len(state) > _LONGEST_STATE:
            raise TemporaryFailure(f"the BMC {self._base} does not state the power state of {self._system}")
        if self._states[-1:] != [state]:
            self._states.append(state)
        return state

    async def read_state_after_deadline(self) -> str | None:
        """Wait some seconds for the end of a change in progress. Return the last state, None without an answer."""
        clock = self._services.clock
        self._until = clock.now() + _LAST_CALL_TIME
        try:
            while await self.read_state() not in (_ON, _OFF) and clock.now() + _LOOK_EVERY < self._until:
                await clock.sleep_until(clock.now() + _LOOK_EVERY)
        except (TemporaryFailure, PermanentFailure):
            return None
        return self._states[-1]

    def has_seen(self, states: Sequence[str]) -> bool:
        return set(states) <= set(self._states)

    def output(self) -> dict[str, Any]:
        state = self._states[-1] if self._states else None
        return {"power_state": state, "observed": list(self._states), "accepted": list(self._accepted)}

    async def turn(self, state: str, *, is_turned_off_here: bool) -> None:
        """Request a power state, and wait until it is read. Repeat a failed request if the node was turned off here.

        Raises OutcomeUnknown if it is not read in time, or a failed request's error.
        """
        clock = self._services.clock
        while True:
            try:
                await self._request(state)
                break
            except (TemporaryFailure, PermanentFailure) as error:
                if not is_turned_off_here:
                    raise
                if clock.now() + _LOOK_EVERY >= self._call.deadline:
                    raise OutcomeUnknown(f"the node was not turned {state} again: {error}", self.output()) from error
            await clock.sleep_until(clock.now() + _LOOK_EVERY)
        await self._wait_for(state)

    async def _request(self, state: str) -> None:
        """Return also if the answer was lost: the state that follows decides."""
        kind = _RESET_TYPES[state]
        try:
            reply = await self._ask("POST", self._target, {"ResetType": kind})
        except OutcomeUnknown:
            return
        if reply.status in GATEWAY_LOST_ANSWER:
            return
        self._check_status(reply, f"{kind} of {self._system}")
        self._accepted.append(kind)

    async def _wait_for(self, state: str) -> None:
        clock, problem = self._services.clock, ""
        while clock.now() < self._call.deadline:
            try:
                if await self.read_state() == state:
                    return
                problem = ""
            except (TemporaryFailure, PermanentFailure) as error:
                problem = f"; {error}"
            await clock.sleep_until(min(clock.now() + _LOOK_EVERY, self._call.deadline))
        last = self._states[-1] if self._states else "unknown"
        raise OutcomeUnknown(f"the power was not seen {state} in time; last seen: {last}{problem}", self.output())

    async def _get(self, path: str) -> Mapping[str, Any]:
        try:
            reply = await self._ask("GET", path)
        except OutcomeUnknown as error:
            raise TemporaryFailure(str(error)) from error  # reading changes nothing
        self._check_status(reply, f"GET {path}")
        try:
            document = read_json(reply.body.encode("utf-8", "replace"))
        except ValueError:
            document = None
        if not isinstance(document, Mapping):
            raise TemporaryFailure(f"the BMC {self._base} answered GET {path} with no JSON object")
        return document

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> HttpReply:
        left = min(_CALL_TIME, self._until - self._services.clock.now())
        if left <= timedelta(0):
            raise TemporaryFailure(f"no time was left to ask the BMC {self._base}")
        headers = {"Accept": "application/json", **({"Content-Type": "application/json"} if body is not None else {})}
        raw = json.dumps(body).encode() if body is not None else None
        return await self._services.http.call(method, self._base + path, headers, raw, left, None, self._access)

    def _check_status(self, reply: HttpReply, what: str) -> None:
        if 200 <= reply.status < 300:
            return
        reason = f"the BMC {self._base} answered {reply.status} to {what}{_message(reply.body)}"
        if reply.status >= 500 or reply.status in MAY_PASS:
            raise TemporaryFailure(reason, self.output())
        raise PermanentFailure(reason, self.output())


class _BmcAction(Irreversible, BasicAction):
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.NODE, TargetKind.GPU})
    asks_first: ClassVar[bool] = True
    changes_node: ClassVar[bool] = True
    default_timeout: ClassVar[timedelta] = timedelta(minutes=5)
    outputs: ClassVar[Mapping[str, Shape]] = {"power_state": TEXT, "observed": TEXT_LIST, "accepted": TEXT_LIST}

    def _states_to_reach(self, call: Call, state: str) -> Sequence[str]:
        raise NotImplementedError

    async def perform(self, call: Call) -> Mapping[str, Any]:
        bmc = _Bmc(self.services, call, self._address(call))
        await bmc.find(cast(BmcParams, call.params).system)
        state = await bmc.read_state()
        try:
            states = self._states_to_reach(call, state)
        except OutcomeUnknown as error:
            raise OutcomeUnknown(str(error), bmc.output()) from error
        if not states:
            return bmc.output()
        await bmc.check_offers(states)
        # Once only: a node that was turned off here is turned on in any case.
        check_wanted(await clearance_of(call), output=bmc.output())
        try:
            for place, wanted in enumerate(states):
                await bmc.turn(wanted, is_turned_off_here=place > 0)
        except OutcomeUnknown as error:
            last = await bmc.read_state_after_deadline()
            if last != states[-1] or not bmc.has_seen(states):
                raise OutcomeUnknown(f"{error}. {_advice(last, states)}", bmc.output()) from error
        return bmc.output()

    @classmethod
    def check_template(cls, raw: Mapping[str, Any]) -> None:
        """Raise ValueError if an alert could change where the password goes."""
        refuse_templates(raw, "attribute")
        HttpRequest.check_template(raw)

    def _address(self, call: Call) -> str:
        params, node = cast(BmcParams, call.params), call.target.node
        if params.url is not None:
            return params.url
        value = self.services.inventory_of(node or "").get(params.attribute or "")
        if value is None:
            raise PermanentFailure(f"the inventory has no attribute {params.attribute} of {node}: its BMC's address")
        try:
            return safe_url(value if "://" in value else f"https://{value}")
        except ValueError as error:
            raise PermanentFailure(f"the attribute {params.attribute} of {node} is no address: {error}") from error


class NodePower(_BmcAction):
    name: ClassVar[str] = "node.power"
    summary: ClassVar[str] = "Turn a node on or off by Redfish."
    Params: ClassVar[type[BaseModel]] = PowerParams

    def _states_to_reach(self, call: Call, state: str) -> Sequence[str]:
        wanted = _ON if cast(PowerParams, call.params).do == "on" else _OFF
        return () if state == wanted else (wanted,)


class NodePowerCycle(_BmcAction):
    name: ClassVar[str] = "node.power_cycle"
    summary: ClassVar[str] = "Cut a node's power and turn it on again, by Redfish."
    Params: ClassVar[type[BaseModel]] = BmcParams

    def _states_to_reach(self, call: Call, state: str) -> Sequence[str]:
        if state == _OFF:
            return (_ON,)
        if call.resumed:
            raise OutcomeUnknown("the node may have been power cycled before; its present power state does not show it")
        return (_OFF, _ON)


def _advice(last: str | None, states: Sequence[str]) -> str:
    if last is None:
        return "Its power state cannot be read now: look at the BMC"
    if last == _OFF:
        return "The node is off: turn it on by node.power with do: on, or at its BMC"
    if _OFF in states:
        return f"Read once more, its power state is {last}, and it may still turn off: look again before using the node"
    return f"Read once more, its power state is {last}"


def _is_below(path: str, parent: str) -> bool:
    """Return whether a path of the BMC's stays below `parent`, and so names no other system."""
    return path.startswith(f"{parent}/") and not {".", ".."} & {*unquote(path).split("/")}


def _message(body: str) -> str:
    """Return Redfish's error message, as ``: TEXT``, or ""."""
    try:
        error = read_json(body.encode("utf-8", "replace")).get("error")
        message = error.get("message") if isinstance(error, Mapping) else None
    except (ValueError, AttributeError):
        return ""
    return f": {' '.join(message.split())[:200]}" if isinstance(message, str) else ""


ACTIONS: tuple[type[Action], ...] = (NodePower, NodePowerCycle)
