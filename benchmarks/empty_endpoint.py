"""FastAPI endpoint that does nothing with a webhook, the divisor of ``webhook_throughput``."""

from __future__ import annotations

from fastapi import FastAPI

app = FastAPI()


@app.post("/webhook")
async def webhook() -> dict[str, str]:
    return {}
