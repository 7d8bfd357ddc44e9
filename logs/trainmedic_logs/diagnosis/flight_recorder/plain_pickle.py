"""Unpickling of plain values only."""

from __future__ import annotations

import io
import pickle
from typing import Any, Never

from trainmedic_logs.errors import DumpError


class _PlainUnpickler(pickle.Unpickler):
    """Finds no classes or functions, so nothing can be called."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"it names {module[:60]}.{name[:60]}; a flight recorder's dump has plain values")

    def persistent_load(self, _pid: Any) -> Never:
        raise pickle.UnpicklingError("it refers to an external object")


def load(raw: bytes) -> Any:
    """Raises DumpError. The caller must limit memory and time."""
    try:
        return _PlainUnpickler(io.BytesIO(raw)).load()
    except MemoryError as error:
        raise DumpError("it takes more memory than a dump may") from error
    except RecursionError as error:
        raise DumpError("it is nested too deeply") from error
    except Exception as error:  # hostile pickles raise nearly any exception
        raise DumpError(f"it is not a pickle of plain values: {str(error)[:200] or type(error).__name__}") from error
