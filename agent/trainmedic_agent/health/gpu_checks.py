from __future__ import annotations

from collections.abc import Iterator

from trainmedic_agent.errors import GpuError
from trainmedic_agent.health.checks import Check, Found, Kind, Value, at_most, checked, unread
from trainmedic_agent.ports.gpus import GpuLinks, GpuReading, Gpus

_FASTEST = 0


def gpu_checks(gpus: Gpus, expected: int) -> Found:
    """Check that at least `expected` GPUs respond, and each one. Nothing is checked on a node without driver and GPUs
    if none are expected.
    """
    inventory, found = gpus.inventory(), Found()
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
        found.checks += _memory(info.uuid, reading)
        failed = {**reading.unread, **links[info.uuid].unread}
        found.checks += [unread(f"gpu_{name}", info.uuid, reason) for name, reason in failed.items()]
    for uuid, of_gpu in links.items():
        found.checks += _pcie(uuid, of_gpu)
        found.add(_nvlinks(uuid, of_gpu, max((other.nvlinks_up or 0 for other in links.values()), default=0)))
    if expected or responding or inventory.driver is not None:
        observed = "; ".join((f"{responding} GPUs respond", *problems))
        is_ok = responding >= expected and not problems
        found.checks.insert(0, checked("gpus", "", is_ok, observed, f"{expected} or more, and no problem"))
    return found


def _memory(uuid: str, reading: GpuReading) -> Iterator[Check]:
    if reading.ecc is not None:
        count = reading.ecc.volatile_uncorrected
        observed = f"{count} uncorrectable memory errors since the reset"
        yield checked("gpu_ecc", uuid, count == 0, observed, 0)
    if (rows := reading.remapped_rows) is not None:
        state = "no spare row left" if rows.has_failed else "a reset is pending" if rows.is_pending else "none pending"
        is_ok = not (rows.has_failed or rows.is_pending)
        yield checked("gpu_memory_rows", uuid, is_ok, state, "no pending or failed row replacement")
    if (action := reading.recovery_action) is not None:
        yield checked("gpu_recovery", uuid, action == "none", f"the driver requests: {action}", "none")


def _pcie(uuid: str, links: GpuLinks) -> Iterator[Check]:
    if links.pcie_width is not None and links.pcie_max_width is not None:
        yield at_most("pcie_width", uuid, links.pcie_width, links.pcie_max_width, "x")
    # An idle GPU may slow its link down to save power, so this shows only at full performance.
    is_fast = links.performance_state == _FASTEST
    if is_fast and links.pcie_generation is not None and links.pcie_max_generation is not None:
        yield at_most("pcie_speed", uuid, links.pcie_generation, links.pcie_max_generation, "generation ")


def _nvlinks(uuid: str, links: GpuLinks, most: int) -> Found:
    """Compare a GPU with `most`, the links up at another one. A GPU without any is compared only with its record: the
    node may connect some of its GPUs only.
    """
    found = Found()
    if links.pcie_replays is not None:
        found.values.append(Value("pcie_replays", uuid, Kind.COUNTER, links.pcie_replays))
    if links.nvlink_errors is not None:
        found.values.append(Value("nvlink_errors", uuid, Kind.COUNTER, links.nvlink_errors))
    if links.nvlinks_up is not None:
        found.values.append(Value("nvlinks_up", uuid, Kind.STATE, links.nvlinks_up))
        if links.nvlinks_up:
            observed = f"{links.nvlinks_up} of {links.nvlinks} up"
            found.checks.append(
                checked("nvlink", uuid, links.nvlinks_up >= most, observed, f"{most}, as at other GPUs")
            )
    return found
