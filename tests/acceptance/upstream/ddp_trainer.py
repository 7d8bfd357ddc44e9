"""A script of the shape of minGPT-ddp in pytorch/examples, which it stands for: ``ddp_trainer.py FAULT PORT DIRECTORY``
under torchrun.

As there: a ``Trainer`` with ``_prepare_dataloader``, ``_run_batch`` and ``_run_epoch``, a ``DistributedSampler``, DDP,
loader workers, gradients that are cleared before and clipped after ``backward``. What is not as there are the lines
that docs/how-to/protect-a-training.md names, the model, the sizes, a text made on the spot, and the fault: after the
step FAULT all weights get noise, once, the same on all ranks. Its snapshots are left to Trainmedic.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import trainmedic
import trainmedic.torch


class CharDataset(Dataset):
    def __init__(self, block_size):
        self.data = torch.arange(20_000) * 7 % 61
        self.block_size = block_size

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, idx):
        chunk = self.data[idx : idx + self.block_size + 1]
        return chunk[:-1], chunk[1:]


class Trainer:
    def __init__(self, fault, port, directory):
        self.fault = fault
        self.global_rank = int(os.environ["RANK"])
        self.train_loader = self._prepare_dataloader(CharDataset(8))
        model = nn.Sequential(nn.Embedding(61, 32), nn.Dropout(0.1), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 61))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.model = DDP(model)
        medic = trainmedic.connect(job="ddp-trainer", metrics_port=port if self.global_rank == 0 else None)
        self.run = trainmedic.torch.attach(
            medic,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.train_loader,
            checkpoints=f"{directory}/checkpoints",
            checkpoint_every=50,
            keep=10,
        )
        self.run.resume()

    def _prepare_dataloader(self, dataset):
        return DataLoader(dataset, batch_size=8, shuffle=False, num_workers=1, sampler=DistributedSampler(dataset))

    def _run_batch(self, source, targets):
        loss = nn.functional.cross_entropy(self.model(source).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss, norm

    def _run_epoch(self, epoch):
        for source, targets in self.run.batches(epochs=epoch + 1):
            with self.run.step() as step:
                if step.number - 1 == self.fault:
                    self.fault = None
                    noise = torch.Generator().manual_seed(0)
                    with torch.no_grad():
                        for parameter in self.model.parameters():
                            parameter.add_(torch.randn(parameter.shape, generator=noise) * 1.2)
                loss, norm = self._run_batch(source, targets)
                step.report(loss=loss, grad_norm=norm)
            time.sleep(0.05)

    def train(self):
        for epoch in range(self.run.epoch, 1000):
            self._run_epoch(epoch)


if __name__ == "__main__":
    init_process_group("gloo")
    torch.manual_seed(1337)
    Trainer(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]).train()
    destroy_process_group()
