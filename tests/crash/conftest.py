"""The stand-in for the Kubernetes API server, for tests that drain a node with a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.api_server import ApiServer


@pytest.fixture
def stand_in() -> Iterator[ApiServer]:
    with ApiServer().running() as server:
        yield server


@pytest.fixture
def kubeconfig(stand_in: ApiServer, tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig.json"
    path.write_text(json.dumps(stand_in.kubeconfig()))
    return path
