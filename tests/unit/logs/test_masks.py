"""Secrets are masked, and what only looks like one to a careless pattern is not."""

from __future__ import annotations

import time

import pytest

from trainmedic_logs.lines.masks import masked
from trainmedic_logs.lines.observation import shape_hash, shape_of

A = "a1B2c3D4e5" * 4


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"login with hf_{A}", f"hf_{A}"),
        (f"export WANDB_API_KEY={A}", A),
        (f"wandb: Appending key for api.wandb.ai: {'0a' * 20}", "0a" * 20),
        ("redis://user:geheim@10.0.0.1:6379/0", "geheim"),
        ("redis://user:ge@heim@10.0.0.1:6379/0", "heim"),
        (f"Authorization: Bearer {A}", A),
        (f"{{'password': '{A}', 'user': 'x'}}", A),
        ("aws_secret_access_key = wJalrXUtnFEMIbPxRfiCY", "wJalrXUtnFEMIbPxRfiCY"),
        ("AKIAIOSFODNN7EXAMPLE is the key", "AKIAIOSFODNN7EXAMPLE"),
        (f"ghp_{A} and sk-proj-{A}", A),
        (f"jwt eyJ{A}.{A}.{A}", A),
        (f"https://bucket/x?sig={A}&se=1", A),
        (f"GET /bucket/x?GoogleAccessId=a&Signature={A}", A),
        (f"GET /x?X-Amz-Signature={A}", A),
        (f"GET /x?access_token={A}", A),
        (f"-----BEGIN RSA PRIVATE KEY-----\n{A}\n-----END RSA PRIVATE KEY-----", A),
    ],
)
def test_secrets_are_masked(text: str, secret: str) -> None:
    """In the forms in which logs have them."""
    assert secret not in masked(text)
    assert "***" in masked(text)


@pytest.mark.parametrize(
    "text",
    [
        "tokens per second: 78400",
        "num_tokens: 500",
        "token: 151643",
        "pad_token=None, eos_token=<|endoftext|>",
        "see https://pytorch.org/docs/stable/notes.html",
        "tokenizer: Qwen2Tokenizer",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_other_text_stays(text: str) -> None:
    """Numbers of tokens are what trainings print most."""
    assert masked(text) == text


def test_masking_takes_time_in_proportion() -> None:
    """Also on lines that are made to be slow."""
    for hostile in ("eyJ-" * 2000, "password" * 1000, "a://" * 2000, "-----BEGIN PRIVATE KEY-----" * 300):
        began = time.thread_time()
        masked(hostile)
        assert time.thread_time() - began < 0.1


def test_lines_of_one_reason_have_one_shape() -> None:
    """Numbers, addresses and paths differ from rank to rank and from attempt to attempt."""
    one = "rank 3: failed at 0x7f3a in /data/run-1/a.py line 12, id 4f1c9f64-9a52-4c7b-b1de-30b1a7f0a1aa"
    two = "rank 12: failed at 0xffff12 in /data/run-2/b/a.py line 7, id 00000000-9a52-4c7b-b1de-30b1a7f0a1ab"
    assert shape_hash(one) == shape_hash(two)
    assert shape_hash(one) != shape_hash("rank 3: ended at 0x7f3a in /data/run-1/a.py line 12")
    assert "failed" in shape_of(one)
