from __future__ import annotations

import copy
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import torch

from trainmedic.huggingface.batches import UsedBatches


def test_a_trainers_model_is_copied_and_pickled_without_the_trainer() -> None:
    """As by a callback that keeps an average. The lock stands for all that cannot be copied."""
    model = torch.nn.Linear(2, 1)
    trainer: Any = SimpleNamespace(args=None, model=model, training_step=None, compute_loss=None, lock=threading.Lock())
    proof: Any = None
    with UsedBatches(trainer, proof).reporting():
        assert model._forward_pre_hooks
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(torch.ones(2)), model(torch.ones(2)))
    assert not model._forward_pre_hooks
