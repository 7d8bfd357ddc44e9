"""Trainmedic in a plain PyTorch training loop: `attach` it, and write the loop with the `Run` that it returns::

    run = trainmedic.torch.attach(
        medic, model=model, optimizer=optimizer, loader=loader, checkpoints="checkpoints", checkpoint_every=100
    )
    run.resume()
    for batch in run.batches(epochs=3):
        with run.step() as step:
            loss = loss_of(model, batch)
            step.backward(loss)
            norm = step.update(max_norm=1.0)
            step.report(loss=loss, grad_norm=norm)

Needs torch, which ``trainmedic`` itself does not.
"""

from trainmedic.job.interrupt import SIGNAL as INTERRUPT_SIGNAL
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.attaching import attach
from trainmedic.torch.checkpoints.checkpoint_storage import CheckpointDirectory as Directory
from trainmedic.torch.checkpoints.checkpoint_storage import HalfLoaded
from trainmedic.torch.checkpoints.own_checkpoints import OwnCheckpoints
from trainmedic.torch.learning_rate import LearningRate
from trainmedic.torch.memory.memory_start import Memory
from trainmedic.torch.run import Run
from trainmedic.torch.steps import Step

__all__ = [
    "INTERRUPT_SIGNAL",
    "Directory",
    "HalfLoaded",
    "LearningRate",
    "Memory",
    "OwnCheckpoints",
    "Run",
    "SavedCheckpoint",
    "Step",
    "attach",
]
