"""A script of the shape of accelerate's ``examples/nlp_example.py``, which it stands for:
``accelerated.py FAULT PORT DIRECTORY``.

As there: ``set_seed``, rows of unequal length that a ``collate_fn`` pads, everything prepared, a linear schedule with
warmup, an evaluation with ``gather_for_metrics`` at the end of each epoch; and with accumulation, as in
``by_feature/gradient_accumulation.py``. What is not as there are the lines that docs/how-to/protect-a-training.md
names, the model, the sizes, rows made on the spot, and the fault: after the step FAULT all weights get noise, once.
"""

import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import trainmedic
import trainmedic.torch

CLASSES = 16


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, 32, padding_idx=0)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, CLASSES))

    def forward(self, input_ids, labels):
        logits = self.head(self.dropout(self.words(input_ids).sum(1)))
        return nn.functional.cross_entropy(logits, labels), logits


def rows(count, seed):
    choice = torch.Generator().manual_seed(seed)
    for label in torch.randint(CLASSES, (count,), generator=choice).tolist():
        length = int(torch.randint(2, 6, (), generator=choice))
        yield {"input_ids": [1 + label * 3 + place % 3 for place in range(length)], "labels": label}


def collate_fn(examples):
    ids = [torch.tensor(example["input_ids"]) for example in examples]
    labels = torch.tensor([example["labels"] for example in examples])
    return {"input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True), "labels": labels}


def training_function(fault, port, directory):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(42)
    train_dataloader = DataLoader(
        list(rows(2800, 1)), shuffle=True, collate_fn=collate_fn, batch_size=8, drop_last=True
    )
    eval_dataloader = DataLoader(list(rows(100, 2)), shuffle=False, collate_fn=collate_fn, batch_size=32)
    model = Classifier()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=3e-3)
    warmup, total = 20, 1_000_000
    lr_scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, (total - step) / (total - warmup)))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    medic = trainmedic.connect(job="accelerated", metrics_port=port)
    run = trainmedic.torch.attach(
        medic,
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        scheduler=lr_scheduler,
        loader=train_dataloader,
        checkpoints=f"{directory}/checkpoints",
        checkpoint_every=50,
        keep=10,
    )
    run.resume()
    for epoch in range(run.epoch, 1000):
        model.train()
        for batch in run.batches(epochs=epoch + 1):
            with run.step() as step, accelerator.accumulate(model):
                if step.number - 1 == fault:
                    fault = None
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.add_(torch.randn_like(parameter) * 1.2)
                loss, _ = model(**batch)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                step.report(loss=loss)
            time.sleep(0.025)

        model.eval()
        right = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                _, logits = model(**batch)
            predictions, references = accelerator.gather_for_metrics((logits.argmax(dim=-1), batch["labels"]))
            right += int((predictions == references).sum())
        accelerator.print(f"epoch {epoch}: {right} of 100", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    training_function(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
