"""The least that a FastAPI server can do with a webhook: nothing. What ``webhook_throughput`` divides by."""

from __future__ import annotations

from fastapi import FastAPI

app = FastAPI()


@app.post("/webhook")
async def webhook() -> dict[str, str]:
    return {}
