"""Reports of complete checkpoints: Lightning calls its hook before it writes, maybe in the background."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from pathlib import Path
from typing import Any, Callable, NamedTuple, Tuple

from trainmedic.client import Medic
from trainmedic.job.progress import CHECKPOINT
from trainmedic.lightning import checkpoints
from trainmedic.trainer.patching import replaced

log = logging.getLogger("trainmedic")

_Stamp = Tuple[int, int, int]  # inode, time of change in ns, and size of a file
_MOST_BEGUN = 4  # checkpoints to look for: a plugin writes one after the other


class _Begun(NamedTuple):
    step: int
    path: str
    before: _Stamp | None  # of the file that is replaced


class WrittenCheckpoints:
    """Calls ``report`` with the step of each complete checkpoint, on the writing rank."""

    def __init__(self, medic: Medic, report: Callable[[int], None]) -> None:
        self._medic = medic
        self._report = report
        self._trainer: Any = None
        self._save: Callable[..., Any] = lambda: None
        self._begun: deque[_Begun] = deque(maxlen=_MOST_BEGUN)
        self._watching = contextlib.ExitStack()

    def watch(self, trainer: Any) -> None:
        self.stop()
        self._begun.clear()
        self._trainer, self._save = trainer, trainer.save_checkpoint
        self._watching.enter_context(replaced(trainer, save_checkpoint=self._save_and_report))

    def stop(self) -> None:
        self._watching.close()

    def report_newest(self) -> None:
        complete = [begun for begun in self._begun if self._is_complete(begun)]
        if complete:
            while self._begun.popleft() is not complete[-1]:
                pass
            self._report(complete[-1].step)

    def _save_and_report(self, filepath: Any, weights_only: bool | None = None, *arguments: Any, **options: Any) -> Any:
        begun = _Begun(self._trainer.global_step, str(filepath), _stamp(filepath))
        with self._medic.window(CHECKPOINT):
            result = self._save(filepath, weights_only, *arguments, **options)
        if self._trainer.is_global_zero and not weights_only:
            try:
                self._begun.append(begun)
                self.report_newest()
                if not writes_later(self._trainer):
                    self._begun.clear()  # an incomplete one stays so
            except Exception:  # Lightning would end the training for any error
                log.exception("%s: cannot report the checkpoint %s", self._medic.job, filepath)
        return result

    def _is_complete(self, begun: _Begun) -> bool:
        later = writes_later(self._trainer)
        if "://" in begun.path:  # an object store: only Lightning's return shows that it was written
            return not later
        if later and _stamp(begun.path) == begun.before:
            return False
        return checkpoints.is_written(Path(begun.path))


def writes_later(trainer: Any) -> bool:
    plugin = type(trainer.strategy.checkpoint_io)  # by name: the library may be installed twice
    return any(each.__name__ == "AsyncCheckpointIO" for each in plugin.__mro__)


def _stamp(path: Any) -> _Stamp | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
