"""Whether a node is held to train."""

from __future__ import annotations

import io
import json
import urllib.request
from http.client import HTTPMessage
from typing import Any

import pytest
import torch

from trainmedic.probe import occupancy


@pytest.mark.parametrize(("used", "is_busy"), [(0.5, False), (1.9, False), (2.1, True), (70.0, True)])
def test_memory_that_is_taken_is_somebody_elses(monkeypatch: pytest.MonkeyPatch, used: float, is_busy: bool) -> None:
    """But for what a context of one's own takes. A processor is nobody's."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int((80 - used) * 1e9), int(80e9)))
    reason = occupancy.gpu_in_use(torch.device("cuda", 3))
    assert (reason is not None) == is_busy
    if is_busy:
        assert reason == f"{used:.1f} GB of the memory of GPU 3 are in use"
    assert occupancy.gpu_in_use(torch.device("cpu")) is None


def answering(monkeypatch: pytest.MonkeyPatch, body: bytes) -> list[Any]:
    """A server that answers so; the requests that it gets."""
    requests: list[Any] = []

    def open_url(request: Any, timeout: float) -> io.BytesIO:
        requests.append(request)
        return io.BytesIO(body)

    monkeypatch.setattr(urllib.request, "urlopen", open_url)
    return requests


def test_jobs_on_the_nodes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that only the cluster knows; one elsewhere, or nobody knows where, is none of them."""
    jobs = [
        {"name": "a", "nodes": ["n1", "n2"]},
        {"name": "b", "nodes": ["n3"]},
        {"name": "c"},
        {"name": "d", "nodes": None},
    ]
    requests = answering(monkeypatch, json.dumps({"items": jobs}).encode())
    assert occupancy.jobs_on(["n2", "n9"], "http://trainmedic:8080/", "secret") == ["the job a is on n2"]
    assert requests[0].full_url == "http://trainmedic:8080/jobs?cluster=true"
    assert requests[0].get_header("Authorization") == "Bearer secret"


def test_every_page_of_jobs_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that only the cluster knows are on the last one. A list that never ends is no permission."""
    pages = {
        "http://t/jobs?cluster=true": {"items": [{"name": "a", "nodes": ["n1"]}], "next": "a&b"},
        "http://t/jobs?cluster=true&cursor=a%26b": {"items": [{"name": "b", "nodes": ["n1"]}]},
    }

    def open_url(request: Any, timeout: float) -> io.BytesIO:
        return io.BytesIO(json.dumps(pages[request.full_url]).encode())

    monkeypatch.setattr(urllib.request, "urlopen", open_url)
    assert occupancy.jobs_on(["n1"], "http://t", None) == ["the job a is on n1", "the job b is on n1"]
    answering(monkeypatch, b'{"items": [], "next": "again"}')
    (reason,) = occupancy.jobs_on(["n1"], "http://t", None)
    assert "more than 1000 pages" in reason


def test_the_token_goes_to_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """To which a redirect leads, such as that of a sign-in."""
    requests = answering(monkeypatch, b'{"items": []}')
    assert occupancy.jobs_on(["n1"], "http://t", "secret") == []
    (request,) = requests
    redirected = urllib.request.HTTPRedirectHandler().redirect_request(
        request, io.BytesIO(), 302, "", HTTPMessage(), "http://elsewhere/"
    )
    assert redirected is not None
    assert redirected.get_header("Authorization") is None


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"items": 3}', b'{"items": [3]}', b"<html>", b"[" * 5000, b'{"items": [], "next": 3}']
)
def test_an_answer_that_is_none_is_no_permission(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """Nor is a URL that is none."""
    answering(monkeypatch, body)
    for server in ("http://trainmedic:8080", "file:///etc/passwd"):
        (reason,) = occupancy.jobs_on(["n1"], server, None)
        assert reason.startswith("cannot list the server's jobs")


@pytest.mark.parametrize("password", ["geheim", "geheim\N{ACCOUNT OF}"])
def test_a_password_in_the_url_is_shown_by_no_error(password: str) -> None:
    (reason,) = occupancy.jobs_on(["n1"], f"http://me:{password}@127.0.0.1", None)
    assert reason == "cannot list the server's jobs: the URL has a user or a password; give a token instead"
