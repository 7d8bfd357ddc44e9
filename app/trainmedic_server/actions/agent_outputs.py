"""Types of the agents' outputs, against which playbooks are checked."""

from __future__ import annotations

from collections.abc import Mapping

from trainmedic_server.domain.value_types import ANY, BOOLEAN, NUMBER, TEXT, TEXT_LIST, TEXTS, Each, Shape

_CARD_WATTS = dict.fromkeys(("default_watts", "min_watts", "max_watts"), NUMBER)

POWER_LIMIT: Mapping[str, Shape] = {
    "gpu": TEXT,
    "requested_watts": NUMBER,
    "limit_watts": NUMBER,
    "previous_watts": NUMBER,
    **_CARD_WATTS,
    "draw_watts": NUMBER,
    "clamped": TEXT,
    "lease_seconds": NUMBER,
    "lease_until": TEXT,
    "note": TEXT,
    "nothing_to_undo": BOOLEAN,
    "known": TEXT,
    "reason": TEXT,
    "gpus": ANY,
}

_PRESSURE = {"pressure_percent": NUMBER}
_USAGE = dict.fromkeys(("total_bytes", "used_bytes", "percent"), NUMBER)
_DISK: Mapping[str, Shape] = {
    **dict.fromkeys(("total_bytes", "available_bytes", "used_bytes", "percent"), NUMBER),
    **dict.fromkeys(("available_percent", "inodes_percent"), NUMBER),
    "type": TEXT,
    "is_read_only": BOOLEAN,
}
_GPU: Mapping[str, Shape] = {
    "index": NUMBER,
    **dict.fromkeys(("uuid", "name", "pci_address", "recovery_action"), TEXT),
    **dict.fromkeys(("utilization_percent", "temperature_celsius", "memory_temperature_celsius"), NUMBER),
    "slowdown_celsius": NUMBER,
    "memory": _USAGE,
    "power": {**_CARD_WATTS, **dict.fromkeys(("draw_watts", "limit_watts", "enforced_watts"), NUMBER)},
    "clocks": dict.fromkeys(("sm_mhz", "memory_mhz"), NUMBER),
    "throttle_reasons": TEXTS,
    "ecc": dict.fromkeys(
        ("volatile_corrected", "volatile_uncorrected", "aggregate_corrected", "aggregate_uncorrected"), NUMBER
    ),
    "remapped_rows": {"corrected": NUMBER, "uncorrected": NUMBER, "is_pending": BOOLEAN, "has_failed": BOOLEAN},
    "mig": BOOLEAN,
    "xid": NUMBER,
    "unread": TEXTS,
}

NODE_FACTS: Mapping[str, Shape] = {
    "node": TEXT,
    "cpu": {
        **dict.fromkeys(("count", "percent", "iowait_percent", "load_1m", "load_5m", "load_15m"), NUMBER),
        **_PRESSURE,
    },
    "memory": {**_USAGE, "available_bytes": NUMBER, **_PRESSURE},
    "swap": _USAGE,
    "disks": Each(_DISK),
    "uptime_seconds": NUMBER,
    "driver": TEXT,
    "gpu_problems": TEXTS,
    "gpus_known": NUMBER,
    "problems": TEXTS,
    "gpu": _GPU,
    "gpus": Each(_GPU),
}

NODE_HEALTH: Mapping[str, Shape] = {
    **dict.fromkeys(("node", "level", "verdict", "at"), TEXT),
    "faults": TEXT_LIST,
    "learning": TEXT_LIST,
    "checks": Each(dict.fromkeys(("name", "part", "verdict", "observed", "expected"), TEXT), is_list=True),
}

_REASON = {"reason": TEXT}

RESTARTED_UNIT: Mapping[str, Shape] = {
    **dict.fromkeys(("unit", "invocation_id_before", "invocation_id", "active_state", "sub_state", "note"), TEXT),
    "main_pid": NUMBER,
    "resumed": BOOLEAN,
    **_REASON,
}

RESTARTED_CONTAINER: Mapping[str, Shape] = {
    **dict.fromkeys(("container", "id", "started_at_before", "started_at"), TEXT),
    "running": BOOLEAN,
    "resumed": BOOLEAN,
    **_REASON,
}

_RESET_OF_ONE: Mapping[str, Shape] = {
    **dict.fromkeys(("gpu", "recovery_action_before", "recovery_action"), TEXT),
    "energy_restarted": BOOLEAN,
}

GPU_RESET: Mapping[str, Shape] = {
    **_RESET_OF_ONE,
    "gpus": Each(_RESET_OF_ONE, is_list=True),
    "processes": NUMBER,
    "resumed": BOOLEAN,
    **_REASON,
}

REBOOT: Mapping[str, Shape] = {
    **dict.fromkeys(("boot_id_before", "boot_id"), TEXT),
    "uptime_seconds": NUMBER,
    **_REASON,
}
