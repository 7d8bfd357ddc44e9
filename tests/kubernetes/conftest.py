"""The API server: the stand-in, or the real one that TRAINMEDIC_TEST_KUBECONFIG names."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.helm import charts
from tests.kubernetes import accounts
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.world import World
from trainmedic_server.adapters.kubernetes_cluster import KubernetesCluster

REAL = os.environ.get("TRAINMEDIC_TEST_KUBECONFIG")


def pytest_report_header() -> str:
    return f"Kubernetes: the API server of {REAL}" if REAL else "Kubernetes: the stand-in for its API server"


@pytest.fixture(autouse=True)
def brief_refusal_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal counts as final sooner, for the sake of the tests of permissions."""
    monkeypatch.setattr("trainmedic_server.actions.retrying.REFUSAL_GRACE", timedelta(seconds=0.5))


@pytest.fixture
def stand_in() -> Iterator[ApiServer]:
    """The stand-in itself, for what only it can be told to do."""
    with ApiServer().running() as server:
        yield server


def is_real(request: pytest.FixtureRequest) -> bool:
    """Whether the test is for the real API server. One that also asks for `stand_in` gets that one."""
    return bool(REAL) and "stand_in" not in request.fixturenames


@pytest.fixture
def kubeconfig(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A kubeconfig of the cluster to act on."""
    if is_real(request):
        return Path(str(REAL))
    server: ApiServer = request.getfixturevalue("stand_in")
    path = tmp_path / "kubeconfig.json"
    path.write_text(json.dumps(server.kubeconfig()))
    return path


@pytest.fixture
async def cluster(kubeconfig: Path) -> AsyncIterator[KubernetesCluster]:
    opened = await KubernetesCluster.opened(kubeconfig)
    yield opened
    await opened.close()


@pytest.fixture
async def world(
    request: pytest.FixtureRequest, kubeconfig: Path, cluster: KubernetesCluster, tmp_path: Path
) -> AsyncIterator[World]:
    """Each action works by an account that has what the chart grants for it."""
    world = World(cluster)
    if is_real(request):
        issue = accounts.of_a_real_server(world, kubeconfig, tmp_path)
    else:
        issue = accounts.of_the_stand_in(request.getfixturevalue("stand_in"), tmp_path)
    kept = accounts.Accounts(issue, charts.rules_of)
    world.by = kept.of
    try:
        await world.start()
        yield world
    finally:
        await kept.close()
        await world.clean()
