"""A stand-in for the Kubernetes API server: real HTTP, in a thread of its own.

Our code and the official client run against it unchanged. It models paths, verbs and Status objects;
resourceVersion with conflicts; merge patches; uid preconditions; selectors; paged lists whose
continuation can expire; watches with bookmarks that can break off; the Eviction API with
PodDisruptionBudgets; bearer tokens and RBAC rules; and, on demand, latency, overload, errors and
an outage. Every request is recorded as RBAC would see it.

Not modelled: admission, defaulting and validation of bodies beyond ``cluster_rules``, other
patch types than JSON merge patch, server-side apply, controllers (no Deployment makes pods), kubelets
(`Kubelet` in ``world`` ends pods through the API), TLS, and streaming logs.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.kubernetes.cluster_rules import Object, Place, Refused
from tests.kubernetes.object_store import DISCOVERY, Objects

_PATH = re.compile(
    r"^/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?$"
)
_SELECTOR = re.compile(r"^(?P<name>[^=!,\s]+)(?:(?P<op>==|=|!=)(?P<value>.*))?$")


_FIELDS = ("metadata.name", "metadata.namespace", "spec.nodeName", "status.phase", "involvedObject.uid")


@dataclass(frozen=True)
class Request:
    """One request in RBAC's words. ``group`` is empty for the core API; ``resource`` has its subresource."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    token: str = ""


@dataclass
class Fault:
    """What befalls the next `times` requests of these verbs (all, where empty) on this resource."""

    status: int
    times: int = 1
    verbs: frozenset[str] = frozenset()
    resource: str = ""
    name: str = ""
    """Of this object alone; of all, where empty."""
    message: str = "the stand-in was told to fail"
    causes: tuple[Mapping[str, str], ...] = ()
    token: str = ""
    """Of this account's requests alone."""
    retry_after: int | None = None
    is_done_first: bool = False
    """The request is carried out, and then answered with the error."""


@dataclass(frozen=True)
class Rule:
    """One permission, as in a Role."""

    group: str
    resource: str
    verbs: frozenset[str]
    namespace: str | None = None


@dataclass
class ApiServer:
    """Start it with ``with ApiServer().running() as server``."""

    token: str = "of-the-service-account"
    objects: Objects = field(default_factory=Objects)
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    rules: Sequence[Rule] | None = None
    """What any token may do; everything, where None."""
    accounts: dict[str, Sequence[Rule]] = field(default_factory=dict)
    """Further tokens, each with all that it may do."""
    latency: float = 0.0
    is_out: bool = False
    url: str = ""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _loop: asyncio.AbstractEventLoop | None = None
    _news: asyncio.Event | None = None
    _watches: set[web.StreamResponse] = field(default_factory=set)

    @contextlib.contextmanager
    def running(self) -> Iterator[ApiServer]:
        ready = threading.Event()
        thread = threading.Thread(daemon=True, target=lambda: asyncio.run(self._serve(ready)), name="api-server")
        thread.start()
        ready.wait(60)
        try:
            yield self
        finally:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._stopping.set)
            thread.join(60)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Nobody answers: connections are cut."""
        self.is_out = True
        self.break_watches()
        try:
            yield
        finally:
            self.is_out = False

    def break_watches(self) -> None:
        """Every open watch loses its connection."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._cut_watches)

    def kubeconfig(self, token: str | None = None) -> dict[str, Any]:
        """By which a client finds this server; with a token of `accounts` it is that account's."""
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "stand-in", "cluster": {"server": self.url}}],
            "users": [{"name": "trainmedic", "user": {"token": token or self.token}}],
            "contexts": [{"name": "stand-in", "context": {"cluster": "stand-in", "user": "trainmedic"}}],
            "current-context": "stand-in",
        }

    # --- serving ----------------------------------------------------------------------------------

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._stopping = asyncio.Event()
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.2, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        ready.set()
        await self._stopping.wait()
        self._cut_watches()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.latency:
            await asyncio.sleep(self.latency)
        if self.is_out:
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=503)
        try:
            if _token(request) != self.token and _token(request) not in self.accounts:
                raise Refused(401, "Unauthorized", "Unauthorized")
            if request.path in ("/version", "/healthz"):
                return web.json_response({"major": "1", "minor": "34", "gitVersion": "v1.34.0-stand-in"})
            if request.path in DISCOVERY:
                return web.json_response(DISCOVERY[request.path])
            matched = _PATH.match(request.rel_url.path)
            if matched is None:
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            return await self._handle(request, matched)
        except Refused as refusal:
            return _refusal(refusal, None)

    async def _handle(self, request: web.Request, matched: re.Match[str]) -> web.StreamResponse:
        place: Place = (matched["core"] or matched["group"], matched["plural"])
        if place not in self.objects.kinds:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        seen = _seen(request, matched, place)
        self.requests.append(seen)
        self._authorize(seen)
        fault = self._fault(seen)
        if fault and not fault.is_done_first:
            return _refusal(_failure(fault), fault.retry_after)
        body = await request.json() if request.can_read_body else {}
        if seen.verb == "watch":
            return await self._watch(request, place)
        with self._lock:
            answer = self._act(seen, place, request, body, matched["sub"] or "")
        assert self._news is not None
        self._news.set()
        if fault:
            return _refusal(_failure(fault), fault.retry_after)
        return web.json_response(answer, status=201 if seen.verb == "create" else 200)

    def _act(self, seen: Request, place: Place, request: web.Request, body: Object, sub: str) -> Object:
        manager = request.query.get("fieldManager", "unknown")
        match seen.verb:
            case "get":
                return self.objects.get(place, seen.namespace, seen.name)
            case "list":
                return self._page(place, matched_namespace(request), request.query)
            case "create" if sub == "eviction":
                self.objects.evict(seen.namespace, seen.name, body.get("deleteOptions") or {})
                return {"apiVersion": "v1", "kind": "Status", "status": "Success"}
            case "create":
                return self.objects.create(place, seen.namespace, body, manager)
            case "patch":
                if request.content_type != "application/merge-patch+json":
                    raise Refused(415, "UnsupportedMediaType", f"not modelled: {request.content_type}")
                return self.objects.patch(place, seen.namespace, seen.name, body, manager)
            case "delete":
                return self.objects.delete(place, seen.namespace, seen.name, body)
        raise Refused(405, "MethodNotAllowed", f"not modelled: {seen.verb}")

    def _page(self, place: Place, namespace: str | None, query: Mapping[str, str]) -> Object:
        found = [
            one
            for one in self.objects.list(place, namespace)
            if _labels_match(query.get("labelSelector", ""), one) and _fields_match(query.get("fieldSelector", ""), one)
        ]
        start, version = 0, self.objects.version
        if query.get("continue"):
            start, version = json.loads(base64.b64decode(query["continue"]))
            if version < self.objects.oldest:
                raise Refused(410, "Expired", "The provided continue parameter is too old")
        limit = int(query.get("limit") or 0) or len(found) + 1
        more = start + limit < len(found)
        token = base64.b64encode(json.dumps([start + limit, version]).encode()).decode() if more else ""
        metadata = {"resourceVersion": str(version), "continue": token}
        return {
            "apiVersion": place[0],
            "kind": f"{self.objects.kinds[place][0]}List",
            "metadata": metadata,
            "items": found[start : start + limit],
        }

    async def _watch(self, request: web.Request, place: Place) -> web.StreamResponse:
        version = int(request.query.get("resourceVersion") or self.objects.version)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self._watches.add(response)
        deadline = asyncio.get_running_loop().time() + float(request.query.get("timeoutSeconds") or 300)
        try:
            while (left := deadline - asyncio.get_running_loop().time()) > 0:
                if version < self.objects.oldest:
                    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                    await _tell(response, "ERROR", status)
                    return response
                with self._lock:
                    changes = self.objects.since(place, version)
                    reached = self.objects.version
                for change in changes:
                    await _tell(response, change.type, change.object)
                if reached > version:
                    version = reached
                    bookmark = {"kind": self.objects.kinds[place][0], "metadata": {"resourceVersion": str(version)}}
                    await _tell(response, "BOOKMARK", bookmark)
                assert self._news is not None
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), min(left, 0.2))
        except ConnectionError:
            pass
        finally:
            self._watches.discard(response)
        return response

    def _cut_watches(self) -> None:
        for response in list(self._watches):
            transport = response._req.transport if response._req is not None else None
            if transport is not None:
                transport.abort()

    def _authorize(self, seen: Request) -> None:
        applied = [rules for rules in (self.rules, self.accounts.get(seen.token)) if rules is not None]
        if all(any(_permits(rule, seen) for rule in rules) for rules in applied):
            return
        where = f' in the namespace "{seen.namespace}"' if seen.namespace else " at the cluster scope"
        raise Refused(
            403,
            "Forbidden",
            f'{seen.resource} "{seen.name}" is forbidden: User "trainmedic" cannot {seen.verb} resource '
            f'"{seen.resource}" in API group "{seen.group}"{where}',
        )

    def _fault(self, seen: Request) -> Fault | None:
        for fault in list(self.faults):
            of_it = fault.resource in ("", seen.resource) and fault.name in ("", seen.name)
            is_meant = of_it and fault.token in ("", seen.token)
            if is_meant and (not fault.verbs or seen.verb in fault.verbs):
                fault.times -= 1
                if fault.times <= 0:
                    self.faults.remove(fault)
                return fault
        return None


def _failure(fault: Fault) -> Refused:
    return Refused(fault.status, "InternalError", fault.message, fault.causes)


def matched_namespace(request: web.Request) -> str | None:
    matched = _PATH.match(request.rel_url.path)
    return matched["namespace"] if matched else None


def _seen(request: web.Request, matched: re.Match[str], place: Place) -> Request:
    name, sub = matched["name"] or "", matched["sub"] or ""
    verbs = {"GET": "get" if name else "list", "POST": "create", "PATCH": "patch", "DELETE": "delete", "PUT": "update"}
    verb = verbs.get(request.method, request.method.lower())
    if verb == "list" and request.query.get("watch") in ("true", "1"):
        verb = "watch"
    group = "" if matched["core"] else place[0].partition("/")[0]
    resource = place[1] + (f"/{sub}" if sub else "")
    return Request(verb, group, resource, matched["namespace"] or "", name, _token(request))


def _token(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _permits(rule: Rule, seen: Request) -> bool:
    return (
        rule.group == seen.group
        and rule.resource == seen.resource
        and seen.verb in rule.verbs
        and rule.namespace in (None, seen.namespace)
    )


def _labels_match(selector: str, found: Object) -> bool:
    labels = found["metadata"].get("labels") or {}
    for term in filter(None, (part.strip() for part in selector.split(","))):
        matched = _SELECTOR.match(term)
        if matched is None or " in " in term:
            raise Refused(400, "BadRequest", f"not modelled: the selector {term!r}")
        value = labels.get(matched["name"])
        if matched["op"] is None and value is None:
            return False
        if matched["op"] in ("=", "==") and value != matched["value"]:
            return False
        if matched["op"] == "!=" and value == matched["value"]:
            return False
    return True


def _fields_match(selector: str, found: Object) -> bool:
    for term in filter(None, selector.split(",")):
        path, _, wanted = term.partition("=")
        if path not in _FIELDS:
            raise Refused(400, "BadRequest", f"field label not supported: {path}")
        value: Any = found
        for part in path.split("."):
            value = (value or {}).get(part)
        if (value or "") != wanted.lstrip("="):
            return False
    return True


async def _tell(response: web.StreamResponse, type_: str, found: Object) -> None:
    await response.write(json.dumps({"type": type_, "object": found}).encode() + b"\n")


def _refusal(refusal: Refused, retry_after: int | None) -> web.Response:
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": str(refusal),
        "reason": refusal.reason,
        "code": refusal.status,
        "details": {"causes": list(refusal.causes)},
    }
    headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}
    return web.json_response(status, status=refusal.status, headers=headers)
