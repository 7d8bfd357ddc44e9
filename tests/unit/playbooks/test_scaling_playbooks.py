"""The shipped playbooks that change how many nodes a job has, as somebody has them who lets them act."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.playbooks.test_shipped_playbooks import PLAYBOOKS
from trainmedic_server.actions import registry
from trainmedic_server.simulation import suite

SCENES = sorted((Path(__file__).parent / "scaling").glob("*.yaml"))


@pytest.mark.parametrize("scenes", SCENES, ids=lambda path: path.stem)
def test_what_they_do_is_what_the_scenes_say(scenes: Path, tmp_path: Path) -> None:
    """Within bounds, after a checkpoint, measured before and after, and taken back where it did not help."""
    shipped = (PLAYBOOKS / scenes.name).read_text()
    assert "\nmode: observe\n" in shipped
    (tmp_path / scenes.name).write_text(shipped.replace("\nmode: observe\n", "\nmode: enforce\n"))
    written = tmp_path / f"{scenes.stem}_test.yaml"
    written.write_text(scenes.read_text())
    result = suite.run_file(written, registry.specs_only())
    assert [str(problem) for problem in result.problems] == []
    assert [str(failure) for test in result.results for failure in test.failures] == []
    assert len(result.results) > 3
