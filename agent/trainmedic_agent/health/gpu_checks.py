"""GPUs by the driver: response, memory, PCIe links, NVLinks."""

from __future__ import annotations

from collections.abc import Iterator

from trainmedic_agent.errors import GpuError
from trainmedic_agent.health.checks import (
    CheckResults,
    HealthCheck,
    HealthValue,
    ValueKind,
    at_maximum,
    checked,
    unread,
)
from trainmedic_agent.ports.gpus import GpuLinks, GpuReading, Gpus

_FULL_PERFORMANCE = 0  # NVML's performance state P0


def gpu_checks(gpus: Gpus, expected: int) -> CheckResults:
    """Check that `expected` GPUs respond, and each one. Without expected GPUs, a missing driver is no fault."""
    inventory, results = gpus.inventory(), CheckResults()
    problems = list(inventory.problems)
    links: dict[str, GpuLinks] = {}
    responding = 0
    for info in inventory.gpus:
        try:
            reading, links[info.uuid] = gpus.read(info.uuid), gpus.links(info.uuid)
        except GpuError as error:
            problems.append(str(error))
            continue
        responding += 1
        results.checks += _memory(info.uuid, reading)
        failed = {**reading.unread, **links[info.uuid].unread}
        results.checks += [unread(f"gpu_{name}", info.uuid, reason) for name, reason in failed.items()]
    for uuid, of_gpu in links.items():
        results.checks += _pcie(uuid, of_gpu)
        results.add(_nvlinks(uuid, of_gpu, max((other.nvlinks_up or 0 for other in links.values()), default=0)))
    if expected or responding or inventory.driver is not None:
        observed = "; ".join((f"{responding} GPUs respond", *problems))
        is_ok = responding >= expected and not problems
        results.checks.insert(0, checked("gpus", "", is_ok, observed, f"{expected} or more, and no problem"))
    return results


def _memory(uuid: str, reading: GpuReading) -> Iterator[HealthCheck]:
    if reading.ecc is not None:
        count = reading.ecc.volatile_uncorrected
        observed = f"{count} uncorrectable memory errors since the reset"
        yield checked("gpu_ecc", uuid, count == 0, observed, 0)
    if (rows := reading.remapped_rows) is not None:
        state = "none pending"
        if rows.has_failed:
            state = "no spare row left"
        elif rows.is_pending:
            state = "a reset is pending"
        is_ok = not (rows.has_failed or rows.is_pending)
        yield checked("gpu_memory_rows", uuid, is_ok, state, "no pending or failed row replacement")
    if (action := reading.recovery_action) is not None:
        yield checked("gpu_recovery", uuid, action == "none", f"the driver requests: {action}", "none")


def _pcie(uuid: str, links: GpuLinks) -> Iterator[HealthCheck]:
    if links.pcie_width is not None and links.pcie_max_width is not None:
        yield at_maximum("pcie_width", uuid, links.pcie_width, links.pcie_max_width, "x")
    # An idle GPU may slow its link down to save power, so its generation counts only at full performance.
    is_fast = links.performance_state == _FULL_PERFORMANCE
    if is_fast and links.pcie_generation is not None and links.pcie_max_generation is not None:
        yield at_maximum("pcie_speed", uuid, links.pcie_generation, links.pcie_max_generation, "generation ")


def _nvlinks(uuid: str, links: GpuLinks, most: int) -> CheckResults:
    """Compare with `most`, the links up at the best GPU. A GPU without any is compared with its record alone: the node
    may connect only some GPUs.
    """
    results = CheckResults()
    if links.pcie_replays is not None:
        results.values.append(HealthValue("pcie_replays", uuid, ValueKind.COUNTER, links.pcie_replays))
    if links.nvlink_errors is not None:
        results.values.append(HealthValue("nvlink_errors", uuid, ValueKind.COUNTER, links.nvlink_errors))
    if links.nvlinks_up is not None:
        results.values.append(HealthValue("nvlinks_up", uuid, ValueKind.STATE, links.nvlinks_up))
        if links.nvlinks_up:
            observed = f"{links.nvlinks_up} of {links.nvlinks} up"
            results.checks.append(
                checked("nvlink", uuid, links.nvlinks_up >= most, observed, f"{most}, as at other GPUs")
            )
    return results
