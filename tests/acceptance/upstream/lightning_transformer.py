"""A script of the shape of Lightning's examples/pytorch/basics/transformer.py, which it stands for.

Its model and its data set are Lightning's own, from ``lightning.pytorch.demos``. As there: ``seed_everything``, a
``random_split``, a shuffled loader, one for validation, clipped gradients and SGD. What is not as there are the lines
that docs/how-to/protect-a-training.md names, smaller sizes, a text that was made on the spot, and the fault.
``lightning_transformer.py FAULT PORT TEXT DIRECTORY``
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L  # as the example does
import torch
import torch.nn.functional as F  # as the example does
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos import Transformer, WikiText2
from torch.utils.data import DataLoader, random_split

import trainmedic
import trainmedic.lightning

PACE = 0.05  # seconds
NOISE = 0.7
_fault: list[int] = []
"""The step after which the weights are spoiled. A rollback does not bring it back, as it would an attribute."""


class LanguageModel(L.LightningModule):
    def __init__(self, vocab_size: int, fault: int) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size, ninp=32, nhid=32)
        _fault.append(fault)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(PACE)
        if _fault and self.global_step == _fault[0]:
            _fault.clear()
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.add_(torch.randn_like(parameter) * NOISE)
        input, target = batch
        output = self.model(input, target)
        loss = F.nll_loss(output, target.view(-1))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        input, target = batch
        self.log("val_loss", F.nll_loss(self.model(input, target), target.view(-1)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main() -> None:
    fault, port, text, directory = sys.argv[1:]
    L.seed_everything(42)
    dataset = WikiText2(Path(text).parent, block_size=16, download=False)
    n = len(dataset)
    train_dataset, val_dataset = random_split(dataset, [n - 100, 100])
    train_dataloader = DataLoader(train_dataset, batch_size=4, shuffle=True)
    val_dataloader = DataLoader(val_dataset, batch_size=20, shuffle=False)
    model = LanguageModel(dataset.vocab_size, int(fault))
    trainer = L.Trainer(
        gradient_clip_val=0.25,
        max_epochs=1000,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(dirpath=directory, every_n_train_steps=50, save_top_k=-1)],
    )
    medic = trainmedic.connect(job="upstream", metrics_port=int(port))
    trainmedic.lightning.fit(trainer, model, train_dataloader, val_dataloader, medic=medic)


if __name__ == "__main__":
    main()
