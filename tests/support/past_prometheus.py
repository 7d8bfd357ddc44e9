"""A real Prometheus with a past that a test has written: OpenMetrics, made into blocks by promtool."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tests.support.programs import Program, start_prometheus

Course = Callable[[float], float | None]
"""What a series was so many seconds after the beginning; None where it had no sample."""


@dataclass
class Past:
    """The samples of a time, one each `every` seconds."""

    begin: datetime
    seconds: float
    every: float = 30.0
    series: dict[tuple[str, tuple[tuple[str, str], ...]], Course] = field(default_factory=dict)

    def add(self, name: str, course: Course | float, **labels: str) -> None:
        constant = course
        known = course if callable(course) else lambda _: float(constant)  # type: ignore[arg-type]
        self.series[name, tuple(sorted(labels.items()))] = known

    def written(self) -> str:
        """As OpenMetrics, in which the samples of a metric stand together."""
        lines: list[str] = []
        names: list[str] = sorted({name for name, _ in self.series})
        for name in names:
            lines.append(f"# TYPE {name} unknown")
            for (of, labels), course in self.series.items():
                if of == name:
                    lines += self._samples(name, dict(labels), course)
        return "\n".join([*lines, "# EOF", ""])

    def into(self, data: Path, scratch: Path) -> None:
        """Make it the past of a Prometheus that keeps its data there; `scratch` is a directory for a file."""
        written = scratch / "past.om"
        written.write_text(self.written())
        data.mkdir(parents=True)
        made = subprocess.run(
            ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet", written, data],
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stdout + made.stderr

    def _samples(self, name: str, labels: Mapping[str, str], course: Course) -> Iterator[str]:
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        for number in range(math.floor(self.seconds / self.every) + 1):
            after = number * self.every
            value = course(after)
            if value is not None:
                shown = "NaN" if math.isnan(value) else repr(float(value))
                yield f"{name}{{{text}}} {shown} {self.begin.timestamp() + after:.3f}"


@contextmanager
def prometheus_of(past: Past, directory: Path) -> Iterator[str]:
    """The URL of a Prometheus that remembers `past`, and scrapes nothing."""
    past.into(directory / "prometheus" / "data", directory)
    config = directory / "prometheus.yml"
    config.write_text("global: {scrape_interval: 1h}\n")
    program: Program
    program, url = start_prometheus(config, directory / "prometheus")
    with program:
        yield url
