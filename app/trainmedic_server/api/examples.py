"""Examples for the OpenAPI document."""

from __future__ import annotations

from typing import Any

_RUN_ID = "019c1415-6c05-7c11-9a0d-6f1d2e3c4b5a"
_COMMAND_ID = "019c1415-6c0a-7d02-b1c3-4e5f60718293"
_UUID = "GPU-5f3a2c1e-0d6b-4a52-9d6e-0f2b8d1c7a90"
_LABELS = {
    "alertname": "GPUTemperatureHigh",
    "severity": "warning",
    "node": "node-1",
    "gpu": "3",
    "UUID": _UUID,
}

ITEM: dict[str, Any] = {
    "run_id": _RUN_ID,
    "timestamp": "2026-01-31T12:02:00.125000Z",
    "alert_name": "GPUTemperatureHigh",
    "alert_labels": _LABELS,
    "playbook": "gpu-temperature-high",
    "target": f"gpu:node-1/{_UUID}",
    "node": "node-1",
    "gpu": _UUID,
    "job": None,
    "mode": "enforce",
    "status": "succeeded",
    "decision": "started",
    "action_taken": "gpu.power_limit",
    "success": True,
    "message": "",
    "duration_ms": 184210,
    "touched": ["node-1"],
    "owes_undo": False,
    "undo_error": None,
    "undone_at": "2026-01-31T12:05:04.335000Z",
    "waiting_on": None,
    "deadline": None,
    "approved_by": [],
    "decided_at": None,
    "started_by": None,
    "repeats": None,
    "parent": None,
    "batch": None,
    "group": None,
    "original_alert_name": None,
    "original_labels": None,
    "version": "9f2c1d7e0b34",
    "also": [],
}

EVENT: dict[str, Any] = {
    "seq": 4711,
    "kind": "step_succeeded",
    "at": "2026-01-31T12:02:00.480000Z",
    "run_id": _RUN_ID,
    "actor": "trainmedic",
    "data": {"step": "cap", "action": "gpu.power_limit"},
}

_ATTEMPT: dict[str, Any] = {
    "number": 1,
    "command_id": _COMMAND_ID,
    "started_at": "2026-01-31T12:02:00.130000Z",
    "deadline": "2026-01-31T12:02:30.130000Z",
    "status": "applied",
    "ended_at": "2026-01-31T12:02:00.480000Z",
    "error": None,
}

RUN: dict[str, Any] = {
    **ITEM,
    "ended_at": "2026-01-31T12:05:04.335000Z",
    "acted_at": "2026-01-31T12:02:00.130000Z",
    "alerts": [
        {
            "fingerprint": "c6eadffa33fcdf37",
            "status": "resolved",
            "labels": _LABELS,
            "annotations": {"summary": "GPU 3 of node-1 is at 88 °C"},
            "starts_at": "2026-01-31T12:00:00Z",
            "ends_at": "2026-01-31T12:05:00Z",
            "generator_url": "",
            "first_heard_at": "2026-01-31T12:02:00.125000Z",
            "last_heard_at": "2026-01-31T12:05:04.300000Z",
            "count": 2,
            "resolved_at": "2026-01-31T12:05:00Z",
            "resolved_because": "alertmanager",
        }
    ],
    "steps": [
        {
            "phase": "steps",
            "index": 0,
            "id": "cap",
            "kind": "action",
            "action": "gpu.power_limit",
            "status": "succeeded",
            "params": {"percent": 80},
            "attempts": [_ATTEMPT],
            "output": {"previous_watts": 700, "limit_watts": 560},
            "error": None,
            "message": None,
            "started_at": "2026-01-31T12:02:00.130000Z",
            "ended_at": "2026-01-31T12:02:00.480000Z",
            "deadline": None,
            "undo": {
                "trigger": "on_resolve",
                "action": "gpu.power_limit",
                "params": {"restore": True},
                "undo_of": _COMMAND_ID,
                "status": "done",
                "because": "resolved",
                "attempts": [],
                "output": {"limit_watts": 700},
                "error": None,
                "retry_at": None,
            },
        }
    ],
    "events": [EVENT],
    "orders": [],
    "effect": {
        "verdict": "helped",
        "reason": "the alert's condition held at the act and did not 10 minutes after",
        "acted_at": "2026-01-31T12:02:00.130000Z",
        "due_at": None,
        "before": 79.0,
        "at": 88.0,
        "after": 72.0,
        "better": "lower",
        "operator": ">",
        "limit": 85.0,
        "query": "gpu:temperature_celsius",
        "origin": "rule",
        "series": [[1769860320.0, 79.0], [1769860920.0, 88.0], [1769861520.0, 72.0]],
    },
    "members": [],
    "next": None,
    "changed": [],
}
