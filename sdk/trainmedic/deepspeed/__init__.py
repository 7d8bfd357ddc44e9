"""Trainmedic in a training loop around a DeepSpeed engine, which owns model, optimizer and checkpoints::

    engine, _, loader, _ = deepspeed.initialize(model=model, training_data=dataset, config=config)
    run = trainmedic.deepspeed.attach(medic, engine, loader=loader, checkpoints="checkpoints", checkpoint_every=100)

    run.resume()
    for batch in run.batches(epochs=3):
        with run.step() as step:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            step.report(loss=loss, grad_norm=engine.get_global_grad_norm())

Loop and commands are those of ``trainmedic.torch``.
"""

from trainmedic.deepspeed.attaching import attach
from trainmedic.deepspeed.run import EngineRun, EngineStep
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.checkpoints.checkpoint_storage import HalfLoaded

__all__ = ["EngineRun", "EngineStep", "HalfLoaded", "SavedCheckpoint", "attach"]
