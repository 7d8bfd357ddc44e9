"""What the tests of the framework integrations share: nobody is asked for models, and one thread is enough."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

import trainmedic
from tests.support.command_sender import Commander, Sent

os.environ.update(TRANSFORMERS_OFFLINE="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", OMP_NUM_THREADS="1")


@pytest.fixture(autouse=True, scope="package")
def quick_collection() -> Iterator[None]:
    """The Trainer collects garbage at each start, and looks at the modules of all frameworks for it: not here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def medic(commander: Commander) -> Iterator[trainmedic.Medic]:
    with commander.connect() as connected:
        yield connected


@pytest.fixture
def sent(commander: Commander, medic: trainmedic.Medic) -> Sent:
    return Sent(commander, medic)
