"""Endpoint that starts a command for each webhook and keeps nothing, as is common with Alertmanager."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI

app = FastAPI()


@app.post("/webhook")
async def webhook() -> dict[str, int]:
    process = await asyncio.create_subprocess_exec("/bin/true")
    return {"status": await process.wait()}
