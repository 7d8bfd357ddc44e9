"""Minimal client of Docker's and Podman's API, with bounded answers.

All fields exist since Docker 18.09.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from trainmedic.errors import described
from trainmedic_agent.errors import CommandFailed, CommandUnsupported

_LARGEST_ANSWER = 64 * 2**20  # bytes
_LONGEST_MESSAGE = 300  # characters


class EngineAnswer(Exception):
    """The engine refused a request with the HTTP ``status``."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ContainerEngine:
    """A container engine. Each wait for it takes `seconds` at most.

    Methods raise EngineAnswer, CommandFailed, CommandUnsupported.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def info(self, seconds: float) -> Mapping[str, Any]:
        return _mapping(self._ask("GET", "/info", seconds))

    def containers(self, seconds: float) -> list[Mapping[str, Any]]:
        return _listed(self._ask("GET", "/containers/json", seconds, {"all": "true"}))

    def container(self, name: str, seconds: float) -> Mapping[str, Any]:
        return _mapping(self._ask("GET", f"/containers/{quote(name, safe='')}/json", seconds))

    def images(self, seconds: float) -> list[Mapping[str, Any]]:
        return _listed(self._ask("GET", "/images/json", seconds))

    def image(self, name: str, seconds: float) -> Mapping[str, Any]:
        return _mapping(self._ask("GET", f"/images/{quote(name, safe='')}/json", seconds))

    def remove_container(self, name: str, seconds: float) -> None:
        """Remove a stopped container, not its volumes."""
        self._ask("DELETE", f"/containers/{quote(name, safe='')}", seconds)

    def restart_container(self, name: str, seconds: float) -> None:
        """Stop it, by force after its own grace period, and start it. The engine answers once it was started."""
        self._ask("POST", f"/containers/{quote(name, safe='')}/restart", seconds)

    def remove_image(self, name: str, seconds: float) -> None:
        """Remove an image by name or ID, unless it is used."""
        self._ask("DELETE", f"/images/{quote(name, safe='')}", seconds)

    def prune_build_cache(self, min_age_hours: int, seconds: float) -> int:
        """Remove build cache unused for this long; return the freed bytes. Podman refuses."""
        filters = json.dumps({"until": [f"{min_age_hours}h"]})
        freed = _mapping(self._ask("POST", "/build/prune", seconds, {"filters": filters})).get("SpaceReclaimed")
        return freed if isinstance(freed, int) and freed >= 0 else 0

    def _ask(self, method: str, path: str, seconds: float, query: Mapping[str, str] | None = None) -> Any:
        connection = _SocketConnection(self._path, seconds)
        try:
            connection.request(method, f"{path}?{urlencode(query)}" if query else path)
            response = connection.getresponse()
            body = response.read(_LARGEST_ANSWER + 1)
            if len(body) > _LARGEST_ANSWER:
                raise CommandFailed(f"the container engine's answer to {method} {path} is larger than 64 MiB")
            if response.length:  # a fixed-size read does not detect an early end of the connection
                raise http.client.IncompleteRead(body, response.length)
            if response.status >= http.client.BAD_REQUEST:
                raise EngineAnswer(response.status, _message(body))
            return json.loads(body) if body.strip() else None
        except FileNotFoundError as error:
            raise CommandUnsupported(
                f"no container engine listens at {self._path}; name its socket in the policy"
            ) from error
        except PermissionError as error:
            raise CommandUnsupported(
                f"the agent may not use {self._path}; give its user the group of that socket"
            ) from error
        except TimeoutError as error:
            raise CommandFailed(f"the container engine did not answer {method} {path} in {seconds:.0f} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CommandFailed(f"the container engine at {self._path} gave no answer: {described(error)}") from error
        finally:
            connection.close()


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _mapping(answer: object) -> Mapping[str, Any]:
    if not isinstance(answer, Mapping):
        raise CommandFailed("the container engine's answer is no JSON object")
    return answer


def _listed(answer: object) -> list[Mapping[str, Any]]:
    if not isinstance(answer, list) or not all(isinstance(entry, Mapping) for entry in answer):
        raise CommandFailed("the container engine's answer is no list of objects")
    return answer


def _message(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    message = said.get("message") if isinstance(said, dict) else None
    return " ".join(str(message or text).split())[:_LONGEST_MESSAGE]
