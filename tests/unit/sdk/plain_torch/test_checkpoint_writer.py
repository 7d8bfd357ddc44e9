"""What is reported of a checkpoint that is written."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.checkpoints.checkpoint_writer import CheckpointWriter


class Storage:
    """A user's storage that cannot delete."""

    def __init__(self, saved: SavedCheckpoint) -> None:
        self._saved = saved

    def save(self, *_: Any) -> SavedCheckpoint:
        return self._saved

    def prune(self) -> None:
        raise KeyError("bucket")


@pytest.mark.parametrize("prune", [True, False])
def test_a_written_checkpoint_is_not_reported_as_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, prune: bool
) -> None:
    """Whatever a storage raises when it deletes old ones."""
    saved = SavedCheckpoint(7, datetime(2026, 1, 1, tzinfo=UTC), tmp_path)
    reported: list[Any] = []
    medic = SimpleNamespace(
        job="llm-1",
        window=lambda _: nullcontext(),
        saved=reported.append,
        save_failed=lambda *failed: reported.append(failed),
    )
    training: Any = SimpleNamespace(
        medic=medic,
        broken=None,
        storage=Storage(saved),
        current_checkpoint=None,
        global_step=7,
        parts=None,
        loss_log=SimpleNamespace(expect_from=lambda _: None),
        changes=SimpleNamespace(checkpoint_written=lambda _: None, drop_earlier_run=lambda: None),
    )
    monkeypatch.setattr(CheckpointWriter, "_compare_ranks", lambda _: None)
    monkeypatch.setattr(CheckpointWriter, "_run_state", lambda *_: {})
    CheckpointWriter(training).save_or_log(prune)
    assert (reported, training.current_checkpoint) == ([7], saved)
