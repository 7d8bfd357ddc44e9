"""A script of the shape of nanoGPT's ``train.py``, which it stands for: ``drawn_batches.py FAULT PORT DIRECTORY``.

As there: no loader but a ``get_batch`` over a memory-mapped file of tokens, batches that are accumulated in an inner
loop, a rate set by hand (warmup, then cosine), ``GradScaler(enabled=False)``, clipping, an ``estimate_loss`` every so
often, a loop that ends by its iteration number. What is not as there are the lines that
docs/how-to/protect-a-training.md names, the model, the sizes, a text made on the spot, and the fault: after the step
FAULT all weights get noise, once.
"""

import math
import sys
import time

import numpy as np
import torch
from torch import nn

import trainmedic
import trainmedic.torch

fault, port, out_dir = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
gradient_accumulation_steps, batch_size, block_size = 2, 8, 8
learning_rate, min_lr, warmup_iters, lr_decay_iters, max_iters = 3e-3, 3e-4, 20, 100_000, 100_000
eval_interval, eval_iters, grad_clip, dtype = 100, 4, 1.0, "float32"

torch.manual_seed(1337)
tokens = (np.arange(20_000) * 7 % 61).astype(np.uint16)
tokens.tofile(f"{out_dir}/train.bin")


def get_batch(split):
    data = np.memmap(f"{out_dir}/train.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix])
    return x, y


model = nn.Sequential(nn.Embedding(61, 32), nn.Dropout(0.1), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 61))
scaler = torch.amp.GradScaler(enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=1e-1)


def loss_of(X, Y):
    return nn.functional.cross_entropy(model(X).flatten(0, 1), Y.flatten())


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        losses[k] = loss_of(*get_batch("val")).item()
    model.train()
    return losses.mean()


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


medic = trainmedic.connect(job="drawn-batches", metrics_port=port)
run = trainmedic.torch.attach(
    medic,
    model=model,
    optimizer=optimizer,
    scaler=scaler,
    loader=lambda: get_batch("train"),
    checkpoints=f"{out_dir}/trainmedic",
    checkpoint_every=50,
    keep=10,
)
run.resume()
batches = run.batches()
while True:
    iter_num = run.global_step
    lr = run.lr_scale * get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: loss {estimate_loss():.4f}", flush=True)
    with run.step() as step:
        if iter_num == fault:
            fault = None
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 1.2)
        for _ in range(gradient_accumulation_steps):
            X, Y = next(batches)
            loss = loss_of(X, Y) / gradient_accumulation_steps
            scaler.scale(loss).backward()
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        step.report(loss=loss * gradient_accumulation_steps, grad_norm=norm)
    time.sleep(0.05)
    if run.global_step > max_iters or run.stopping:
        break
