"""Cost of a frozen value: the server's structs over frozen dataclasses of the same fields.

The value is a run. Each start defines each class; each alert makes, copies and compares values. `docs/decisions.md`
quotes the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import timeit
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tests.contract.run_store_values import closed
from trainmedic_server.domain.run import Run, Status

NAMES = Run.__struct_fields__


def as_dataclass() -> type[Any]:
    members = [(name, Any) for name in NAMES]
    return dataclasses.make_dataclass("DataclassRun", members, frozen=True, slots=True)


def as_struct() -> type[Any]:
    return msgspec.defstruct("StructRun", list(NAMES), frozen=True)


def microseconds(work: Callable[[], object], rounds: int) -> float:
    timer = timeit.Timer(work)
    number, _ = timer.autorange()
    return statistics.median(timer.repeat(rounds, number)) / number * 1e6


def costs(kind: type[Any], define: Callable[[], object], replace: Any, rounds: int) -> Mapping[str, float]:
    members = msgspec.structs.asdict(closed(1))
    one, same = kind(**members), kind(**members)
    return {
        "defined": microseconds(define, rounds),
        "made": microseconds(lambda: kind(**members), rounds),
        "copied with a change": microseconds(lambda: replace(one, status=Status.FAILED, message="x"), rounds),
        "compared": microseconds(lambda: one == same, rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    dear = costs(as_dataclass(), as_dataclass, dataclasses.replace, rounds)
    cheap = costs(as_struct(), as_struct, msgspec.structs.replace, rounds)
    for what, cost in cheap.items():
        print(
            f"a value of {len(NAMES)} fields {what}: {cost / dear[what]:.2f} ="
            f" {cost:.2f} us as a struct / {dear[what]:.2f} us as a frozen dataclass (median of {rounds})"
        )


if __name__ == "__main__":
    main()
