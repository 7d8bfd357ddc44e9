"""Lightning under the name by which the program has it: ``lightning.pytorch``, or ``pytorch_lightning``.

Both are the same library, and may be installed at once; each takes callbacks of the other.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

LightningCallback: Any = Callback
