"""The plugin for ms-swift 4: ``swift sft --external_plugins …/trainmedic/huggingface/swift.py --callbacks trainmedic``.

Importing it, which is what ms-swift does with a plugin, registers the callback by name. ms-swift makes it with
its arguments and its trainer; by the trainer restarts are possible too. The job's name is TRAINMEDIC_JOB.
"""

from __future__ import annotations

from typing import Any

from swift.callbacks import callbacks_map

from trainmedic.client import connect
from trainmedic.huggingface import Callback, run_by


class SwiftCallback(Callback):
    """Made by ms-swift while its trainer is being made."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(connect())
        self._trainer = trainer

    def on_init_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        run_by(self, self._trainer)


callbacks_map["trainmedic"] = SwiftCallback
