"""What is wrong with the settings of Prometheus, in words. The calls are tested with a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_server.adapters.prometheus_api import PrometheusApi
from trainmedic_server.errors import MetricsUnavailable


async def test_an_unreadable_token_is_not_blamed_on_prometheus(tmp_path: Path) -> None:
    """It was not asked."""
    prometheus = PrometheusApi("http://127.0.0.1:9", tmp_path / "token")
    with pytest.raises(MetricsUnavailable, match=r"^Prometheus was not asked: .*--prometheus-token"):
        await prometheus.check()
    await prometheus.close()
