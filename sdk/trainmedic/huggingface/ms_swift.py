"""Plugin for ms-swift 4: ``swift sft --callbacks trainmedic --external_plugins …/huggingface/ms_swift.py``.

Its module name must not be that of ms-swift's package: the plugin's directory comes first on the path.
"""

from __future__ import annotations

from typing import Any

from swift.callbacks import callbacks_map

from trainmedic.client import connect
from trainmedic.huggingface import Callback, run_by


class SwiftCallback(Callback):
    """ms-swift creates it before or after the trainer's initialisation."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(connect())
        run_by(self, trainer)


callbacks_map["trainmedic"] = SwiftCallback
