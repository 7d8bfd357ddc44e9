"""A script of the shape of HelloDeepSpeed in DeepSpeedExamples, its ``train_bert_ds.py``, which it stands for:
``hello_deepspeed.py FAULT PORT DIRECTORY`` under torchrun.

As there: rows that are masked at random when they are drawn, in the training's own process, and padded by a
``collate_fn``; a model that returns its loss; an engine from a dictionary, with Adam, ZeRO 1 and weights of 16 bits;
a batch that is moved in place; a mean of all losses now and then. What is not as there are the lines that
docs/how-to/protect-a-training.md names, the model, the sizes, rows made on the spot, Adam without a compiler, and the
fault: after the step FAULT the weights that ZeRO keeps get noise, once. Its checkpoints are left to Trainmedic.
"""

import sys
import time
from functools import partial

import deepspeed
import deepspeed.ops
import numpy as np
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainmedic
import trainmedic.deepspeed

WORDS, PAD, MASK = 61, 61, 62


def collate_function(batch, pad_token_id):
    length = max(len(tokens) for tokens, _ in batch)
    padded = [[row + [pad_token_id] * (length - len(row)) for row in rows] for rows in zip(*batch, strict=True)]
    src_tokens, tgt_tokens = (torch.LongTensor(rows) for rows in padded)
    attention_mask = src_tokens.ne(pad_token_id).type_as(src_tokens)
    return {"src_tokens": src_tokens, "tgt_tokens": tgt_tokens, "attention_mask": attention_mask}


def masking_function(tokens, mask_prob):
    count = max(int(mask_prob * len(tokens) + np.random.rand()), 1)
    chosen = np.random.choice(len(tokens), count, replace=False)
    masked, labels = list(tokens), [PAD] * len(tokens)
    for place in chosen:
        masked[place], labels[place] = MASK, tokens[place]
    return masked, labels


class MaskedDataset(Dataset):
    def __init__(self, masking):
        self.rows = [[(row + 7 * place) % WORDS for place in range(6 + row % 4)] for row in range(2800)]
        self.masking_function = masking

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, idx):
        return self.masking_function(self.rows[idx])


class MaskedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(MASK + 1, 32)
        self.around = nn.Conv1d(32, 64, 5, padding=2)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(64, WORDS)

    def forward(self, src_tokens, attention_mask, tgt_tokens):
        known = self.words(src_tokens) * attention_mask.unsqueeze(-1)
        logits = self.head(self.dropout(self.around(known.transpose(1, 2)).relu()).transpose(1, 2))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tgt_tokens.flatten(), ignore_index=PAD)


def train(fault, port, directory, batch_size=8, log_every=100, num_iterations=1_000_000):
    device = torch.device("cpu")
    dataset = MaskedDataset(partial(masking_function, mask_prob=0.15))
    collate = partial(collate_function, pad_token_id=PAD)
    data_iterator = DataLoader(dataset, batch_size=batch_size, shuffle=True, collate_fn=collate)
    model = MaskedModel()
    ds_config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    }
    deepspeed.ops.__compatible_ops__.clear()  # else it calls a compiler, for collectives that gloo has as well
    deepspeed.init_distributed(dist_backend="gloo")
    model, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    model.train()
    losses = []
    medic = trainmedic.connect(job="hello-deepspeed", metrics_port=port)
    run = trainmedic.deepspeed.attach(
        medic, model, loader=data_iterator, checkpoints=f"{directory}/checkpoints", checkpoint_every=50, keep=10
    )
    run.resume()
    for batch in run.batches(steps=num_iterations):
        with run.step() as step:
            if step.number - 1 == fault:
                fault = None
                for parameter in model.parameters():
                    spoiled = safe_get_full_fp32_param(parameter)
                    safe_set_full_fp32_param(parameter, spoiled + torch.randn_like(spoiled) * 0.7)
            for key, value in batch.items():
                batch[key] = value.to(device)
            loss = model(**batch)
            model.backward(loss)
            model.step()
            step.report(loss=loss, grad_norm=model.get_global_grad_norm())
        losses.append(loss.item())
        if step.number % log_every == 0:
            print(f"Loss: {np.mean(losses):.4f}", flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    torch.manual_seed(0)
    train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
