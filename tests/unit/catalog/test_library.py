"""Directories of playbooks: loading, reloading, and what one bad file may not do."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import watchfiles

from tests.unit.catalog.actions import PLAYBOOK, Tell, TestActions, config_map, library
from trainmedic_core import yaml_files
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


def test_a_bad_file_does_not_affect_others(tmp_path: Path) -> None:
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


def test_a_file_that_breaks_keeps_its_last_valid_content(tmp_path: Path) -> None:
    """The content stays until the file is fixed."""
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


def test_a_deleted_file_unloads_its_playbooks(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(named("a"))
    made = library(tmp_path)
    (tmp_path / "a.yaml").unlink()
    assert made.reload()
    assert made.all() == ()


def test_an_unchanged_reload_reports_no_change(tmp_path: Path) -> None:
    """The same content gives the same playbooks, whatever the file's time says."""
    path = tmp_path / "a.yaml"
    path.write_text(named("a"))
    made = library(tmp_path)
    before = made.get("a")
    os.utime(path, (1, 1))
    assert not made.reload()
    assert made.get("a") is before


def test_the_loaded_playbook_stays_if_another_has_the_same_name(tmp_path: Path) -> None:
    """The problem names both places, and disappears with either."""
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


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A named pipe would block permanently."""
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "dangling.yaml").symlink_to(tmp_path / "nowhere")
    made = library(tmp_path)
    assert len(made.problems) == 2


def test_a_config_map_is_read_once_and_its_swap_is_noticed(tmp_path: Path) -> None:
    """The hidden directories behind a mounted ConfigMap are not read as playbooks of their own."""
    config_map(tmp_path, "2026_1", {"a.yaml": named("a")})
    made = library(tmp_path)
    assert list(made.problems) == []
    config_map(tmp_path, "2026_2", {"a.yaml": named("a").replace("100", "50")})
    assert made.reload()
    assert "steps_back: 50" in loaded(made, "a").text


def test_an_earlier_version_compiles_from_its_text(tmp_path: Path) -> None:
    """So a run continues with the version with which it started."""
    made = library(tmp_path)
    playbook = made.compile(PLAYBOOK, "kept")
    assert playbook.definition.name == "spike"
    assert made.compile(PLAYBOOK, "kept") is playbook
    with pytest.raises(errors.PlaybookError, match="kept:1:1"):
        made.compile("a: 1", "kept")


BAD_TEXTS = [
    "{{ vars.x | round(precision=1, precision=2) }}",
    "{{ " + "9" * 5_000 + " }}",
    "{% for a in alerts %}" * 25 + "{% endfor %}" * 25,
    "{{ " + "not " * 210 + "true }}",
    "{{ 20000000 | upcase }}",
]


def test_one_bad_file_stops_neither_the_start_nor_a_reload(tmp_path: Path) -> None:
    """Any failure of Jinja or Python on a template is a problem of that file, with its line."""
    (tmp_path / "good.yaml").write_text(named("good"))
    for number, text in enumerate(BAD_TEXTS):
        (tmp_path / f"bad{number}.yaml").write_text(PLAYBOOK + f'  - {{approve: "{text}"}}\n')
    made = library(tmp_path)
    assert [playbook.definition.name for playbook in made.all()] == ["good"]
    assert [(Path(problem.file).name, problem.line) for problem in made.problems] == [
        (f"bad{number}.yaml", 9) for number in range(len(BAD_TEXTS))
    ]
    (tmp_path / "good.yaml").write_text(named("good").replace("100", "50"))
    assert made.reload()
    assert "steps_back: 50" in loaded(made, "good").text


def test_an_exception_in_an_action_is_a_problem_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An action of another package must not prevent the start."""

    def fail(raw: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Tell, "check_template", fail)
    (tmp_path / "a.yaml").write_text(
        named("a") + "---\n" + named("b") + "  - {action: test.tell, with: {message: m}}\n"
    )
    made = library(tmp_path)
    assert [playbook.definition.name for playbook in made.all()] == ["a"]
    (problem,) = made.problems
    assert (problem.line, "ZeroDivisionError" in problem.message) == (10, True)


def test_a_reload_that_fails_as_a_whole_is_reported_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loaded playbooks stay; the next successful reload removes the problem."""
    (tmp_path / "a.yaml").write_text(named("a"))
    metrics = telemetry.Metrics()
    made = Library([tmp_path], TestActions(), metrics=metrics)
    made.reload()

    def fail(root: Path) -> list[Path]:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(yaml_files, "document_files", fail)
        for _ in range(2):
            assert made.reload()
    assert [playbook.definition.name for playbook in made.all()] == ["a"]
    (problem,) = made.problems
    assert "loading failed: MemoryError" in problem.message
    assert metrics.registry.get_sample_value("trainmedic_playbook_errors") == 1
    assert metrics.registry.get_sample_value("trainmedic_loop_errors_total", {"loop": "playbooks"}) == 2
    assert made.reload()
    assert list(made.problems) == []


def test_an_unlistable_directory_keeps_its_playbooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unknown whether they are gone."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.yaml").write_text(named("a"))
    made = library(tmp_path)
    monkeypatch.setattr(yaml_files, "MOST_ENTRIES", 0)
    made.reload()
    assert made.get("a")
    assert "over 0 entries" in made.problems[0].message
    monkeypatch.undo()
    (tmp_path / "sub" / "a.yaml").unlink()
    made.reload()
    assert made.get("a") is None


def test_a_slow_reload_continues_in_the_next(tmp_path: Path) -> None:
    """So the first files become active and the server starts, however many files there are."""
    for name in "abc":
        (tmp_path / f"{name}.yaml").write_text(named(name))
    times = iter([0.0, 1.0, 61.0, 61.0, *([100.0] * 10)])
    made = Library([tmp_path], TestActions(), seconds=lambda: next(times))
    made.reload()
    assert [playbook.definition.name for playbook in made.all()] == ["a"]
    assert ["not read" in problem.message for problem in made.problems] == [True, True]
    made.reload()
    assert [playbook.definition.name for playbook in made.all()] == ["a", "b", "c"]
    assert list(made.problems) == []


def test_loading_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are on files, playbooks per file, steps, template parts, and reported mistakes."""
    monkeypatch.setattr(yaml_files, "MOST_FILES", 6)
    many = "steps:\n" + "  - {wait_for: resolved}\n" * 201
    texts = {
        "a": "---\na: 1\n" * 501,
        "b": PLAYBOOK.partition("steps:")[0] + many,
        "c": PLAYBOOK + ("  - {approve: '" + "{{ 1 }}" * 2_400 + "'}\n") * 25,
        "d": "".join(f"key{number}: 1\n" for number in range(2_000)),
        "e": named("e").replace("100", "0x" + "f" * 5_000),
        "f": named("f") + 'summary: "\\ud800"\n',
        "g": named("g"),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    messages: dict[str, list[str]] = {}
    for problem in library(tmp_path).problems:
        messages.setdefault(Path(problem.file).stem, []).append(problem.message)
    assert "a file has at most 500 playbooks" in " ".join(messages["a"])
    assert "at most 200 items" in messages["b"][0]
    assert messages["c"] == ["the templates of this file have over 50000 parts together; divide the file"]
    assert len(messages["d"]) == 101
    assert "the number" in messages["e"][0]
    assert "surrogate" in messages["f"][0]
    assert messages["g"] == ["not read: there are over 6 files of playbooks"]


async def test_watching_continues_where_the_file_system_cannot_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernel has no watch left, the directories are checked periodically."""
    (tmp_path / "a.yaml").write_text(named("a"))
    made = library(tmp_path)
    monkeypatch.setattr(watchfiles, "awatch", Mock(side_effect=OSError(28, "no space left on device")))
    (tmp_path / "a.yaml").write_text(named("a").replace("100", "50"))
    watching = asyncio.create_task(made.watch())
    async with asyncio.timeout(60):
        while "steps_back: 50" not in loaded(made, "a").text:
            await asyncio.sleep(0.01)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
