"""The API server: the stand-in, or the real one that TRAINMEDIC_TEST_KUBECONFIG names."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from app.adapters.kubernetes_cluster import KubernetesCluster
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.world import World

REAL = os.environ.get("TRAINMEDIC_TEST_KUBECONFIG")


@pytest.fixture
def stand_in() -> Iterator[ApiServer]:
    """The stand-in itself, for what only it can be told to do."""
    with ApiServer().running() as server:
        yield server


@pytest.fixture
def kubeconfig(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A kubeconfig of the cluster to act on. A test that also asks for `stand_in` gets that one."""
    if REAL and "stand_in" not in request.fixturenames:
        return Path(REAL)
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
async def world(cluster: KubernetesCluster) -> AsyncIterator[World]:
    world = World(cluster)
    await world.start()
    yield world
    await world.clean()
