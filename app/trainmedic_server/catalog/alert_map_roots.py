"""Paths of alert maps: files, folders, and names of shipped maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainmedic_core.setting_sources import paths_in

SETTING = "TRAINMEDIC_ALERT_MAP"
SHIPPED = "shipped"  # name for all shipped maps
_FOLDER = "alert-maps"
_INSTALLED = Path("/etc/trainmedic") / _FOLDER
_CHECKOUT = Path(__file__).parents[3] / _FOLDER


def shipped() -> Path | None:
    return next((path for path in (_CHECKOUT, _INSTALLED, Path(_FOLDER)) if path.is_dir()), None)


def shipped_names() -> list[str]:
    folder = shipped()
    files = folder.glob("*.yaml") if folder is not None else ()
    return sorted({SHIPPED, *(file.stem for file in files if not file.stem.endswith("_test"))})


def roots(named: Sequence[Path], environment: Mapping[str, str]) -> list[Path]:
    """A name without folder and suffix, such as ``kube-prometheus``, is a shipped map unless such a file exists."""
    setting = environment.get(SETTING, "") if not named else ""
    return [_resolved(path) for path in (*named, *paths_in(setting))]


def _resolved(path: Path) -> Path:
    folder = shipped()
    if folder is None or len(path.parts) != 1 or path.suffix or path.exists():
        return path
    if path.name == SHIPPED:
        return folder
    file = folder / f"{path.name}.yaml"
    return file if file.is_file() else path
