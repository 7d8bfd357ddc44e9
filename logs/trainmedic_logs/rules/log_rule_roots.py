from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainmedic_core.setting_sources import paths_in

SETTING = "TRAINMEDIC_LOG_RULES"
_FOLDER = "logrules"
_INSTALLED = Path("/etc/trainmedic") / _FOLDER
_IN_PACKAGE = Path(__file__).parents[1] / _FOLDER


def shipped() -> Path | None:
    # In this package, in the container image, or in the working directory.
    return next((path for path in (_IN_PACKAGE, _INSTALLED, Path(_FOLDER)) if path.is_dir()), None)


def roots(named: Sequence[Path], environment: Mapping[str, str]) -> list[Path]:
    if named:
        return list(named)
    setting = environment.get(SETTING)
    if setting:
        return paths_in(setting)
    folder = shipped()
    return [folder] if folder else []
