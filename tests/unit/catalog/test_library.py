"""Directories of playbooks: loading, reloading, and what one bad file may not do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.catalog.actions import PLAYBOOK, TestActions, config_map, library
from trainmedic_server import errors, telemetry
from trainmedic_server.catalog.library import Library
from trainmedic_server.ports.playbooks import Catalog, CompiledPlaybook


def named(name: str) -> str:
    return PLAYBOOK.replace("playbook: spike", f"playbook: {name}")


def loaded(made: Library, name: str) -> CompiledPlaybook:
    playbook = made.get(name)
    assert playbook is not None
    return playbook


def test_playbooks_are_found_in_a_directory_and_one_level_below(tmp_path: Path) -> None:
    """Both endings; hidden files and tests are left out."""
    (tmp_path / "sub" / "deeper").mkdir(parents=True)
    for place in ("a.yaml", "b.yml", "sub/c.yaml", ".hidden.yaml", "d_test.yaml", "e.txt", "sub/deeper/f.yaml"):
        (tmp_path / place).write_text(named(Path(place).stem.strip(".")))
    made: Catalog = library(tmp_path)
    assert [playbook.definition.name for playbook in made.all()] == ["a", "b", "c"]
    assert len(made.for_alert("TrainingLossSpike")) == 3
    assert made.for_alert("Other") == ()


def test_a_bad_file_takes_nothing_else_down(tmp_path: Path) -> None:
    """Its problems are listed; metrics count files."""
    (tmp_path / "good.yaml").write_text(named("good"))
    (tmp_path / "bad.yaml").write_text("playbook: [")
    metrics = telemetry.Metrics()
    made = Library([tmp_path], TestActions(), metrics=metrics)
    assert made.reload()
    assert [playbook.definition.name for playbook in made.all()] == ["good"]
    assert [problem.file for problem in made.problems] == [str(tmp_path / "bad.yaml")]
    assert metrics.registry.get_sample_value("trainmedic_playbooks_loaded") == 1
    assert metrics.registry.get_sample_value("trainmedic_playbook_errors") == 1


def test_a_file_that_breaks_keeps_what_it_last_gave(tmp_path: Path) -> None:
    """Until it is mended."""
    path = tmp_path / "a.yaml"
    path.write_text(named("one") + "---\n" + named("two"))
    made = library(tmp_path)
    before = made.get("two")
    path.write_text(named("one").replace("100", "50") + "---\n" + named("two").replace("target", "targt"))
    assert made.reload()
    assert made.get("two") is before
    assert "steps_back: 50" in loaded(made, "one").text
    path.write_text("a: [")
    made.reload()
    assert {playbook.definition.name for playbook in made.all()} == {"one", "two"}
    path.write_text(named("two"))
    made.reload()
    assert [playbook.definition.name for playbook in made.all()] == ["two"]
    assert list(made.problems) == []


def test_a_file_that_is_gone_takes_its_playbooks_with_it(tmp_path: Path) -> None:
    """Deleting a file unloads."""
    (tmp_path / "a.yaml").write_text(named("a"))
    made = library(tmp_path)
    (tmp_path / "a.yaml").unlink()
    assert made.reload()
    assert made.all() == ()


def test_nothing_changed_is_told(tmp_path: Path) -> None:
    """The same content gives the same playbooks, whatever the file's time says."""
    path = tmp_path / "a.yaml"
    path.write_text(named("a"))
    made = library(tmp_path)
    before = made.get("a")
    os.utime(path, (1, 1))
    assert not made.reload()
    assert made.get("a") is before


def test_of_two_playbooks_with_one_name_the_loaded_one_stays(tmp_path: Path) -> None:
    """The problem names both places, and goes away with either."""
    (tmp_path / "b.yaml").write_text(named("same"))
    made = library(tmp_path)
    (tmp_path / "a.yaml").write_text(named("same"))
    made.reload()
    assert loaded(made, "same").source == str(tmp_path / "b.yaml")
    (problem,) = made.problems
    assert problem.file == str(tmp_path / "a.yaml")
    assert str(tmp_path / "b.yaml:1") in problem.message
    (tmp_path / "b.yaml").unlink()
    made.reload()
    assert loaded(made, "same").source == str(tmp_path / "a.yaml")
    assert list(made.problems) == []


def test_a_missing_directory_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    """It may appear later."""
    made = library(tmp_path / "later")
    assert "no such" in made.problems[0].message
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "a.yaml").write_text(named("a"))
    made.reload()
    assert made.get("a")


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    """A named pipe would block for ever."""
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "dangling.yaml").symlink_to(tmp_path / "nowhere")
    made = library(tmp_path)
    assert len(made.problems) == 2


def test_a_config_map_is_seen_once_and_its_swap_is_taken_in(tmp_path: Path) -> None:
    """The hidden directories behind a mounted ConfigMap are not read as playbooks of their own."""
    config_map(tmp_path, "2026_1", {"a.yaml": named("a")})
    made = library(tmp_path)
    assert list(made.problems) == []
    config_map(tmp_path, "2026_2", {"a.yaml": named("a").replace("100", "50")})
    assert made.reload()
    assert "steps_back: 50" in loaded(made, "a").text


def test_an_earlier_version_compiles_from_its_text(tmp_path: Path) -> None:
    """So that a run goes on with the version that it started with."""
    made = library(tmp_path)
    playbook = made.compile(PLAYBOOK, "kept")
    assert playbook.definition.name == "spike"
    assert made.compile(PLAYBOOK, "kept") is playbook
    with pytest.raises(errors.PlaybookError, match="kept:1:1"):
        made.compile("a: 1", "kept")
