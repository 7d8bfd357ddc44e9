"""Pickles of plain values: numbers, texts, lists, tuples, dictionaries, and nothing that could be called."""

from __future__ import annotations

import io
import pickle
from typing import Any, Never

from trainmedic_logs.errors import DumpError


class _PlainUnpickler(pickle.Unpickler):
    """Finds no class, and so no function: neither can be called, nor an instance be made."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"it names {module[:60]}.{name[:60]}; a flight recorder's dump has plain values")

    def persistent_load(self, _pid: Any) -> Never:
        raise pickle.UnpicklingError("it refers to something outside itself")


def load(raw: bytes) -> Any:
    """What `raw` holds.

    It can still take all memory that the process has, or never end: who calls this limits both from outside.

    Raises:
        DumpError: It is no pickle, is cut off, or holds more than plain values.
    """
    try:
        return _PlainUnpickler(io.BytesIO(raw)).load()
    except MemoryError as error:
        raise DumpError("it takes more memory than a dump may") from error
    except RecursionError as error:
        raise DumpError("it is nested too deeply") from error
    except Exception as error:  # A hostile pickle makes the unpickler raise nearly anything, such as an IndexError.
        raise DumpError(f"it is no pickle of plain values: {str(error)[:200] or type(error).__name__}") from error
