"""Kubernetes API by the official client, without its generated classes, which lack custom kinds.

Only a list whose continuation has expired is retried here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
import yaml
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, ApiException, Configuration

from trainmedic_server import __version__, errors, telemetry
from trainmedic_server.ports.cluster import Object, Ref, Resource
from trainmedic_server.ports.fence import Fence, no_fence

FIELD_MANAGER: Final = "trainmedic"
TIMEOUT: Final = timedelta(seconds=15)  # The caller retries until the step's timeout.
PAGE: Final = 500  # objects
_NOTHING_DONE: Final = (401, 403, 429)  # Statuses answered before anything is done.
_RIGHTS: Final = " (add the action to kubernetes.actions of the chart, or grant this to the server's account)"
_TWO_BUDGETS: Final = "more than one PodDisruptionBudget"  # in the API server's message
_FAULTS = (aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError)

log = telemetry.logger(__name__)


class KubernetesCluster:
    def __init__(self, client: ApiClient, event_namespace: str = "default", fence: Fence = no_fence) -> None:
        self._client = client
        self._fence = fence
        self._event_namespace = event_namespace  # of Events about objects without a namespace

    @classmethod
    async def opened(cls, kubeconfig: Path | None = None, fence: Fence = no_fence) -> KubernetesCluster:
        """Connect by a kubeconfig file, else by the pod's service account. Raises ConfigurationError."""
        configuration = Configuration()
        if kubeconfig is not None and not await asyncio.to_thread(kubeconfig.is_file):
            raise errors.ConfigurationError(
                f"--kubernetes: cannot read the kubeconfig {kubeconfig}: no such file; name a file, in-cluster or off"
            )
        try:
            if kubeconfig is not None:
                await kube_config.load_kube_config(str(kubeconfig), client_configuration=configuration)
            else:
                kube_config.load_incluster_config(configuration)
        except (kube_config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError) as error:
            where = f"the kubeconfig {kubeconfig}" if kubeconfig else "the pod's service account"
            reason = " ".join(str(error).split())[:300]
            raise errors.ConfigurationError(f"--kubernetes: cannot read {where}: {reason}") from error
        client = ApiClient(configuration)
        client.user_agent = f"trainmedic/{__version__}"
        return cls(client, fence=fence)

    async def close(self) -> None:
        await self._client.close()

    async def get(self, ref: Ref) -> Object:
        return await self._call("GET", path_of(ref), about=str(ref))

    async def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> Sequence[Object]:
        return (await self.list_at(resource, namespace, labels, fields))[0]

    async def list_at(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> tuple[Sequence[Object], str]:
        """Return all objects and the resource version from which to watch. `namespace` None: of all namespaces."""
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(PAGE), "continue": ""}
        path = collection_of(resource, namespace)
        objects: list[Object] = []
        while True:
            try:
                page = await self._call("GET", path, {name: value for name, value in query.items() if value})
            except _Gone as error:
                if not query["limit"]:
                    raise errors.ClusterUnavailable(
                        f"the list of {resource.plural} expires at once: {error}"
                    ) from error
                query["continue"], objects = "", []
                query["limit"] = ""  # in one piece, which cannot expire midway
                continue
            items, metadata = _page(page, resource)
            objects.extend(items)
            query["continue"] = metadata.get("continue") or ""
            if not query["continue"]:
                return objects, str(metadata.get("resourceVersion") or "")

    async def list_some(
        self, resource: Resource, namespace: str, fields: str, most: int
    ) -> tuple[Sequence[Object], bool]:
        page = await self._call(
            "GET", collection_of(resource, namespace), {"fieldSelector": fields, "limit": str(most)}
        )
        items, metadata = _page(page, resource)
        return items, bool(metadata.get("continue"))

    async def watch(self, resource: Resource, version: str, seconds: int) -> AsyncIterator[tuple[str, Object]]:
        """Yield (ADDED, MODIFIED, DELETED or BOOKMARK, object) after `version`, for at most `seconds`.

        Raises ObjectChanged if `version` is too old; ClusterUnavailable, ClusterRefused.
        """
        query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        query["timeoutSeconds"] = str(seconds)
        # The API server ends the watch after `seconds`. Without any data for 15 s longer, it counts as broken.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT.total_seconds(), sock_read=seconds + 15)
        path = collection_of(resource, None)
        response = None
        try:
            response = await self._send("GET", path, query, None, "application/json", timeout)
            if response.status != 200:
                answer = json.loads(await response.read())
                raise _failure_of(response.status, answer if isinstance(answer, dict) else {}, path, response.headers)
            async for line in response.response.content:
                if not line.strip():
                    continue
                change = json.loads(line)
                if change["type"] == "ERROR":
                    raise _failure_of(int(change["object"].get("code") or 500), change["object"], path, {})
                yield change["type"], change["object"]
        except (*_FAULTS, ValueError, KeyError, TypeError) as error:
            raise errors.ClusterUnavailable(f"the watch of {resource.plural} ended: {type(error).__name__}") from error
        finally:
            if response is not None:
                response.response.close()

    async def patch(self, ref: Ref, change: Mapping[str, Any], subresource: str = "") -> Object:
        return await self._call(
            "PATCH",
            path_of(ref, subresource),
            {"fieldManager": FIELD_MANAGER},
            change,
            content_type="application/merge-patch+json",
            about=str(ref),
        )

    async def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        return await self._call(
            "POST", collection_of(resource, namespace), {"fieldManager": FIELD_MANAGER}, body, about=resource.kind
        )

    async def delete(self, ref: Ref, uid: str, grace: timedelta | None = None) -> None:
        try:
            await self._call("DELETE", path_of(ref), None, _deletion(uid, grace), about=str(ref))
        except errors.ObjectMissing:
            return

    async def evict(self, ref: Ref, uid: str, grace: timedelta | None = None) -> None:
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": ref.name, "namespace": ref.namespace},
            "deleteOptions": _deletion(uid, grace),
        }
        try:
            await self._call("POST", path_of(ref, "eviction"), None, body, about=str(ref))
        except errors.ObjectMissing:
            return
        except errors.ClusterUnavailable as error:
            if _TWO_BUDGETS in str(error):  # a 500, which would look like a failing server
                raise errors.EvictionBlocked(str(error)) from error
            raise

    async def record(self, about: Object, reason: str, message: str, warning: bool = False) -> None:
        metadata = about["metadata"]
        namespace = metadata.get("namespace") or self._event_namespace
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{str(metadata['name'])[:200]}.", "namespace": namespace},
            "involvedObject": {
                "apiVersion": about.get("apiVersion"),
                "kind": about.get("kind"),
                "name": metadata["name"],
                "namespace": metadata.get("namespace"),
                "uid": metadata.get("uid"),
            },
            "reason": reason,
            "message": message[:1024],
            "type": "Warning" if warning else "Normal",
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._call("POST", f"/api/v1/namespaces/{quote(namespace, safe='')}/events", None, event)
        except errors.ActionFailure as error:
            log.warning("cannot record Kubernetes Event", reason=reason, error=str(error))

    async def check(self) -> None:
        await self._call("GET", "/version", about="the version")

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        about: str = "",
    ) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT.total_seconds())
        changes = method != "GET"
        if changes:
            self._fence()
        try:
            response = await self._send(method, path, query or {}, body, content_type, timeout)
            raw = await response.read()
            answer = json.loads(raw)
        except (*_FAULTS, ValueError) as error:
            reason = f"the Kubernetes API does not answer correctly: {_fault(error)}"
            raise errors.ClusterUnavailable(reason, may_be_done=changes) from error
        if not isinstance(answer, dict):
            raise errors.ClusterUnavailable("the Kubernetes API's answer is not an object", may_be_done=changes)
        if not 200 <= response.status < 300:
            failure = _failure_of(response.status, answer, about or path, response.headers)
            if isinstance(failure, errors.ClusterUnavailable):
                failure.may_be_done = changes and response.status not in _NOTHING_DONE
            raise failure
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> Any:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        try:
            sent = await self._client.param_serialize(
                method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            url = f"{sent[1]}?{urlencode(query)}" if query else sent[1]
            return await self._client.call_api(method, url, sent[2], sent[3], _request_timeout=timeout)
        except (ApiException, kube_config.ConfigException) as error:
            raise errors.ClusterUnavailable(f"cannot call the Kubernetes API: {type(error).__name__}") from error


def collection_of(resource: Resource, namespace: str | None) -> str:
    root = "/api/v1" if resource.api_version == "v1" else f"/apis/{resource.api_version}"
    where = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"{root}{where}/{resource.plural}"


def path_of(ref: Ref, subresource: str = "") -> str:
    path = f"{collection_of(ref.resource, ref.namespace)}/{quote(ref.name, safe='')}"
    return f"{path}/{subresource}" if subresource else path


def _page(answer: Mapping[str, Any], resource: Resource) -> tuple[Sequence[Object], Mapping[str, Any]]:
    metadata, items = answer.get("metadata"), answer.get("items", "")
    if not isinstance(metadata, Mapping) or not isinstance(items, list | None):
        raise errors.ClusterUnavailable(f"the Kubernetes API's answer is no list of {resource.plural}")
    return items or (), metadata


def _fault(error: Exception) -> str:
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return f"its certificate is not trusted ({error.certificate_error})"
        case aiohttp.ClientSSLError():
            return "no TLS connection could be made"
        case TimeoutError():
            return f"no answer within {TIMEOUT.total_seconds():.0f} seconds"
        case aiohttp.ClientConnectorError():
            return f"{error.host}:{error.port} cannot be reached ({error.os_error.strerror or error.os_error})"
    return type(error).__name__


class _Gone(errors.ObjectChanged):
    """A resourceVersion or a continuation is too old."""


def _failure_of(status: int, answer: Mapping[str, Any], about: str, headers: Mapping[str, str]) -> errors.ActionFailure:
    message = str(answer.get("message") or answer.get("reason") or f"status {status}")[:500]
    reason = answer.get("reason")
    match status:
        case 404:
            return errors.ObjectMissing(f"{about} does not exist: {message}")
        case 409 if reason == "AlreadyExists":
            return errors.ObjectExists(f"{about}: {message}")
        case 409:
            return errors.ObjectChanged(f"{about}: {message}")
        case 410:
            return _Gone(message)
        case 429 if any(cause.get("reason") == "DisruptionBudget" for cause in _causes(answer)):
            # The causes name the budget and its needs; the message does not.
            named = [str(cause["message"]) for cause in _causes(answer) if cause.get("message")]
            return errors.EvictionBlocked("; ".join(named)[:500] or message)
        case 429:
            return errors.ClusterUnavailable(message, _seconds(headers))
        case 401:
            # During a renewal the token may briefly be the old one. It is read again every minute.
            return errors.ClusterUnavailable(
                f"the Kubernetes API does not accept our credentials ({message}): they have expired, or the service "
                "account or the kubeconfig's user is gone"
            )
        case 403 if any(cause.get("reason") == "NamespaceTerminating" for cause in _causes(answer)):
            return errors.ClusterUnavailable(f"{about}: {message}")  # The namespace is being deleted.
        case 403:
            return errors.ClusterRefused(f"{about}: {message}{_RIGHTS if 'cannot' in message else ''}", may_pass=True)
        case status if status >= 500 or status == 408:
            return errors.ClusterUnavailable(f"the Kubernetes API fails: {message}", _seconds(headers))
    return errors.ClusterRefused(f"{about}: {message}")


def _seconds(headers: Mapping[str, str]) -> float | None:
    wait = headers.get("Retry-After", "")
    return float(wait) if wait.isdecimal() and wait.isascii() else None


def _causes(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    details = answer.get("details")
    causes = details.get("causes") if isinstance(details, Mapping) else None
    return [cause for cause in causes or () if isinstance(cause, Mapping)]


def _deletion(uid: str, grace: timedelta | None) -> dict[str, Any]:
    options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
    if grace is not None:
        options["gracePeriodSeconds"] = int(grace.total_seconds())
    return options
