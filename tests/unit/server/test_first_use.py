"""The API's models are built when they are first used, which several threads may do at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec import Struct
from pydantic import create_model

from trainmedic_server.api.view import View

THREADS = 8


class Node(Struct, frozen=True):
    name: str
    gpus: tuple[int, ...]


@pytest.fixture
def hurried_threads() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried_threads")
def test_a_model_that_threads_use_first_at_once_is_whole() -> None:
    """None of them gets a model that another is still building."""
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(20):
            model = create_model("NodeView", __base__=View, name=(str, ...), gpus=(tuple[int, ...], ...))
            assert not model.__pydantic_complete__
            together = threading.Barrier(THREADS)

            def use(model: type[View] = model, together: threading.Barrier = together) -> str:
                together.wait(60)
                return model.model_validate(Node("gpu-1", (0, 1))).model_dump_json()

            answers = [each.result() for each in [pool.submit(use) for _ in range(THREADS)]]
            assert answers == ['{"name":"gpu-1","gpus":[0,1]}'] * THREADS
