"""Which store of logs a URL names, and what goes with each call to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr, TypeAdapter, ValidationError

from trainmedic_server.adapters.log_stores.loki import Loki
from trainmedic_server.adapters.log_stores.opensearch import OpenSearch
from trainmedic_server.adapters.log_stores.store_http import StoreHttp
from trainmedic_server.adapters.log_stores.victorialogs import VictoriaLogs
from trainmedic_server.errors import ConfigurationError, LogQueryRefused, LogsUnavailable
from trainmedic_server.settings.values import StoreUrl
from trainmedic_server.wiring.log_source import store_at


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("loki+http://loki:3100", Loki),
        ("victorialogs+https://vl:9428/path?tenant=12:3", VictoriaLogs),
        ("opensearch+http://os:9200?tenant=logs-trainmedic", OpenSearch),
    ],
)
async def test_the_beginning_of_a_url_names_the_store(url: str, kind: type) -> None:
    """The rest is where it is, and for whom."""
    assert TypeAdapter(StoreUrl).validate_python(url) == SecretStr(url)
    http, store = store_at(url)
    assert isinstance(store, kind)
    await http.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("elastic+http://x", "'elastic' is no store"),
        ("loki+http://x?tenat=a", "tenat is not known"),
        ("victorialogs+http://x?tenant=team", "number of an account"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, reason: str) -> None:
    """When the server starts, and not when somebody searches."""
    with pytest.raises(ConfigurationError, match=reason):
        store_at(url)


def test_a_plain_url_is_refused_with_the_forms_that_there_are() -> None:
    """It does not say which store answers there."""
    with pytest.raises(ValidationError, match=r"loki\+http://"):
        TypeAdapter(StoreUrl).validate_python("http://loki:3100")


async def asked(
    answer: Any, token: Path | None = None, headers: dict[str, str] | None = None, url: str = "http://store/base"
) -> httpx.Request:
    """The request that one call makes, where it is answered so."""
    made: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        made.append(request)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer, text="why it is so")

    http = StoreHttp(url, headers or {}, token, httpx.MockTransport(handle))
    try:
        await http.post("/path", {"query": "x"})
    finally:
        await http.close()
    return made[0]


async def test_tenant_and_token_go_with_each_call(tmp_path: Path) -> None:
    """The token is read each time, so that it can be renewed."""
    token = tmp_path / "token"
    for content in ("one", "two"):
        token.write_text(f"{content}\n")
        request = await asked(200, token, {"X-Scope-OrgID": "team-a"})
        assert (request.headers["authorization"], request.headers["x-scope-orgid"]) == (f"Bearer {content}", "team-a")
        assert request.url.path == "/base/path"
    request = await asked(200, url="http://user:secret@store")
    assert request.headers["authorization"].startswith("Basic ")


@pytest.mark.parametrize(
    ("answer", "error", "told"),
    [
        (400, LogQueryRefused, "why it is so"),
        (401, LogsUnavailable, "answers 401"),
        (429, LogsUnavailable, "answers 429"),
        (500, LogsUnavailable, "answers 500"),
        (302, LogsUnavailable, "answers 302"),
        (httpx.ConnectError("refused"), LogsUnavailable, "does not answer"),
        (httpx.ReadTimeout("late"), LogsUnavailable, "does not answer"),
    ],
)
async def test_what_a_store_refuses_says_whose_fault_it_is(answer: Any, error: type[Exception], told: str) -> None:
    """The question's, or that it cannot be asked now."""
    with pytest.raises(error, match=told):
        await asked(answer)


async def test_without_its_token_a_store_is_not_asked(tmp_path: Path) -> None:
    """And the reason names its setting."""
    with pytest.raises(LogsUnavailable, match=r"token_file of --log-store: cannot read .*none: No such file"):
        await asked(200, tmp_path / "none")


@pytest.mark.parametrize("store", [Loki, VictoriaLogs, OpenSearch])
@pytest.mark.parametrize("body", ["", "not JSON", "[]", '{"data": 3}', '{"hits": {"hits": [{}]}}'])
async def test_an_answer_of_something_else_is_told_as_that(store: Any, body: str) -> None:
    """A proxy's login page, another program at that port."""
    http = StoreHttp("http://store", {}, None, httpx.MockTransport(lambda _: httpx.Response(200, text=body)))
    if store is VictoriaLogs and not body:
        assert await store(http).page("x", None, 0, 10, 5) == ([], ())  # which is how it says that there are no lines
    else:
        with pytest.raises(LogsUnavailable):
            await store(http).page("[]", None, 0, 10, 5)
    await http.close()


@pytest.mark.parametrize(
    ("store", "part", "answer", "gap"),
    [
        (OpenSearch, "[]", {"timed_out": True, "hits": {"hits": []}}, "the search timed out in the log store"),
        (OpenSearch, "[]", {"_shards": {"total": 5, "failed": 2}, "hits": {"hits": []}}, "2 of 5 shards"),
        (
            OpenSearch,
            "[]",
            {"_clusters": {"total": 2, "skipped": 1}, "hits": {"hits": []}},
            "clusters of the log store",
        ),
        (Loki, "{}", {"warnings": ["x"], "data": {"resultType": "streams", "result": []}}, "the log store warns: x"),
    ],
)
async def test_a_store_that_answers_in_part_is_read_as_that(store: Any, part: str, answer: Any, gap: str) -> None:
    http = StoreHttp("http://store", {}, None, httpx.MockTransport(lambda _: httpx.Response(200, json=answer)))
    page = await store(http).page(part, None, 0, 10, 5)
    assert page.lines == []
    assert len(page.gaps) == 1
    assert page.gaps[0].startswith(gap)
    await http.close()
