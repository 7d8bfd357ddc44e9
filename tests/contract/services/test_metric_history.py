"""`ports.metric_history.MetricHistory`: what comes of answers that are none. What a real Prometheus answers is in
``tests/integration/test_report_of_a_job.py``."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trainmedic_server.adapters.prometheus_api import PrometheusApi
from trainmedic_server.errors import MetricsUnavailable

BEGIN = datetime(2026, 1, 31, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


async def read(api: PrometheusApi):
    try:
        return await api.read('up{a="1"}', BEGIN, BEGIN + 10 * MINUTE, MINUTE)
    finally:
        await api.close()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/status/503", "status 503: said no"),
        ("/status/401", "status 401: said no"),
        ("/status/302", "status 302"),
        ("/json", "cannot be read"),
        ("/list/x", "cannot be read"),
        ("/ok", "cannot be read"),
        ("/zipped", "cannot be read"),
        ("/metrics-warned", r"only in part: receive series from Addr: store-1: unavailable \(and 1 more\)"),
        ("/metrics-partial", "only in part: a part of its cluster"),
    ],
)
async def test_an_invalid_answer_is_reported_as_unavailable(peer, path: str, why: str) -> None:
    """This holds whatever answers at that address."""
    with pytest.raises(MetricsUnavailable, match=why):
        await read(PrometheusApi(peer.url(path)))


@pytest.mark.parametrize("path", ["/metrics-whole", "/metrics-informed"])
async def test_infos_do_not_make_an_answer_partial(peer, path: str) -> None:
    """Unknown members that hint at it do not either."""
    (series,) = await read(PrometheusApi(peer.url(path)))
    assert series.points == ((0.0, 7.0),)


async def test_a_partial_list_of_rules_is_rejected(peer) -> None:
    """Thanos, with its several rulers, may answer with one."""
    api = PrometheusApi(peer.url("/metrics-warned"))
    with pytest.raises(MetricsUnavailable, match="only in part"):
        await api.rules_of("Hot")
    await api.close()


async def test_a_query_is_sent_as_a_form_because_it_may_be_long(peer) -> None:
    """The form has the times in seconds, and a timeout after which Prometheus may stop."""
    with pytest.raises(MetricsUnavailable):
        await read(PrometheusApi(peer.url("/list")))
    (request,) = peer.requests
    assert (request.method, request.path) == ("POST", "/list/api/v1/query_range")
    begin = BEGIN.timestamp()
    assert request.body.decode() == (
        f"query=up%7Ba%3D%221%22%7D&start={begin:.3f}&end={begin + 600:.3f}&step=60.000&timeout=10s"
    )


async def test_a_password_and_a_token_are_sent(peer, tmp_path: Path) -> None:
    """The URL's password is removed from the called address; the token file is read each time."""
    with pytest.raises(MetricsUnavailable):
        await read(PrometheusApi(peer.url("/list").replace("//", "//ann:s%40x@")))
    assert peer.requests[-1].headers["authorization"] == f"Basic {base64.b64encode(b'ann:s@x').decode()}"
    token = tmp_path / "token"
    api = PrometheusApi(peer.url("/list"), token)
    for text in ("first", "second"):
        token.write_text(f"{text}\n")
        with pytest.raises(MetricsUnavailable):
            await api.read("up", BEGIN, BEGIN + MINUTE, MINUTE)
        assert peer.requests[-1].headers["authorization"] == f"Bearer {text}"
    await api.close()


async def test_an_unreadable_token_file_is_not_a_crash(peer, tmp_path: Path) -> None:
    """The file may come back; a report continues without Prometheus."""
    with pytest.raises(MetricsUnavailable, match=r"--prometheus-token: cannot read .*none: No such file"):
        await read(PrometheusApi(peer.url("/list"), tmp_path / "none"))
