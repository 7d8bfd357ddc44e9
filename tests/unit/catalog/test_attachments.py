"""A manifest beside a playbook becomes part of it when it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_core import yaml_files
from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.library import Library

PLAYBOOK = """\
playbook: check-node
on: {alert: NodeBack}
target: node
vars: {image: health:1}
steps:
  - id: check
    action: k8s.create_job
    with: {template: health_template.yaml, namespace: ops}
"""
MANIFEST = """\
metadata: {name: health}
spec:
  template:
    spec:
      nodeName: "{{ target.node }}"
      containers: [{name: check, image: "{{ vars.image }}"}]
      restartPolicy: Never
"""
SCOPE = {"target": {"node": "node-7"}, "vars": {"image": "health:1"}, "steps": {}, "labels": {}, "run": {}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "check.yaml").write_text(PLAYBOOK)
    (tmp_path / "health_template.yaml").write_text(MANIFEST)
    return tmp_path


def problems_of(folder: Path) -> list[str]:
    loaded = loader.load_file(folder / "check.yaml", registry.specs_only())
    return [str(problem) for problem in loaded.problems]


def manifest_of(playbook: object) -> dict[str, object]:
    params = playbook.params("steps", 0, SCOPE)  # type: ignore[attr-defined]
    return dict(params.manifest)


def test_the_manifest_is_rendered_with_the_runs_names(folder: Path) -> None:
    """Its strings are templates like those of the playbook itself."""
    (playbook,) = loader.load_file(folder / "check.yaml", registry.specs_only()).playbooks
    spec = manifest_of(playbook)["spec"]["template"]["spec"]  # type: ignore[index]
    assert spec["nodeName"] == "node-7"
    assert spec["containers"] == [{"name": "check", "image": "health:1"}]


def test_the_stored_text_is_complete(folder: Path) -> None:
    """A run started with an earlier version finds its manifest in the text, whatever the file contains now."""
    actions = registry.specs_only()
    (playbook,) = loader.load_file(folder / "check.yaml", actions).playbooks
    (folder / "health_template.yaml").unlink()
    again = loader.load_one(playbook.text, str(folder / "check.yaml"), actions)
    assert again.version == playbook.version
    assert manifest_of(again) == manifest_of(playbook)


def test_a_changed_manifest_is_a_new_version(folder: Path) -> None:
    """The playbook's own file is unchanged."""
    library = Library([folder], registry.specs_only())
    assert library.reload()
    assert not library.reload()
    before = library.get("check-node")
    (folder / "health_template.yaml").write_text(MANIFEST.replace("name: health", "name: other"))
    assert library.reload()
    after = library.get("check-node")
    assert before is not None
    assert after is not None
    assert before.version != after.version
    assert library.problems == ()


def test_a_template_is_not_a_playbook(folder: Path) -> None:
    """It is skipped where the folder's playbooks are read."""
    assert [path.name for path in yaml_files.document_files(folder)] == ["check.yaml"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("missing_template.yaml", None, "check.yaml:8:22: template: missing_template.yaml: there is no such file"),
        ("../up_template.yaml", None, "is not a file name that ends in _template.yaml"),
        ("health.yaml", None, "is not a file name that ends in _template.yaml"),
        ("health_template.yaml", "a: [", "health_template.yaml:1"),
        ("health_template.yaml", "- a list", "must contain one YAML mapping"),
        ("health_template.yaml", "kind: Pod\nspec: {}", "must be a Job"),
        ("health_template.yaml", "kind: Job", "has no spec"),
        ("health_template.yaml", "{kind: Job, metadata: x, spec: {}}", "metadata or annotations that are no mapping"),
        ("health_template.yaml", "{kind: Job, metadata: {annotations: [x]}, spec: {}}", "annotations that are no"),
        ("health_template.yaml", "{kind: Job, spec: {template: {metadata: x}}}", "annotations that are no mapping"),
        ("health_template.yaml", "{kind: Job, spec: {template: {metadata: {annotations: x}}}}", "are no mapping"),
        ("health_template.yaml", "spec: {x: '{{ lables.x }}'}", "lables"),
    ],
)
def test_errors_in_a_template_are_reported_when_it_is_loaded(
    folder: Path, name: str, content: str | None, told: str
) -> None:
    """They name the place in the playbook, or in the file itself if the YAML is broken."""
    (folder / "check.yaml").write_text(PLAYBOOK.replace("health_template.yaml", name))
    if content is not None:
        (folder / name).write_text(content)
    assert any(told in problem for problem in problems_of(folder)), problems_of(folder)


def test_a_text_that_looks_like_yaml_is_returned_unchanged(folder: Path) -> None:
    """Quotes, comments, empty lines and leading blanks do not change."""
    content = "\n".join(
        ["# a comment: 'x'", "", "spec:", "    a: |", "       kept", "", "         as it is", '    b: "\'"']
    )
    (folder / "health_template.yaml").write_text(content)
    (playbook,) = loader.load_file(folder / "check.yaml", registry.specs_only()).playbooks
    again = loader.load_one(playbook.text, "check.yaml", registry.specs_only())
    assert manifest_of(again) == manifest_of(playbook)


def test_an_error_elsewhere_in_the_file_is_the_only_problem(folder: Path) -> None:
    """The template is found for a file that also repeats a key."""
    (folder / "check.yaml").write_text(PLAYBOOK.replace("target: node\n", "target: node\ntarget: node\n"))
    (problem,) = problems_of(folder)
    assert "check.yaml:4:1" in problem
