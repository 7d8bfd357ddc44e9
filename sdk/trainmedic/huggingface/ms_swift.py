"""The plugin for ms-swift 4: ``swift sft --callbacks trainmedic --external_plugins …/huggingface/ms_swift.py``.

Importing it, which is what ms-swift does with a plugin, registers the callback by name. ms-swift makes it with
its arguments and its trainer; by the trainer restarts are possible too. The job's name is TRAINMEDIC_JOB. The module
is not named like ms-swift's own package, for ms-swift puts the directory of a plugin first on the path.
"""

from __future__ import annotations

from typing import Any

from swift.callbacks import callbacks_map

from trainmedic.client import connect
from trainmedic.huggingface import Callback, run_by


class SwiftCallback(Callback):
    """The callback as ms-swift makes it: before the trainer is initialised or after, by the version of ms-swift."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(connect())
        run_by(self, trainer)


callbacks_map["trainmedic"] = SwiftCallback
