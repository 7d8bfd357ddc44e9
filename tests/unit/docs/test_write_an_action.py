"""The guide to actions: its package, installed, is found and does what the guide says."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support import doc_pages
from trainmedic_core import yaml_text
from trainmedic_server import extending
from trainmedic_server.actions import registry
from trainmedic_server.catalog import compiler
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.domain.alert import AlertStatus

GUIDE = (Path(__file__).parents[3] / "docs" / "how-to" / "write-an-action.md").read_text()
FILES = {block.option("file"): block.body for block in doc_pages.blocks(GUIDE)}
NOW = datetime(2026, 1, 1, tzinfo=UTC)
ALERT = extending.Alert("f1", AlertStatus.FIRING, {"alertname": "StorageSlow"}, {}, NOW)


class Pager:
    """Answers every call alike, at a time that stands still."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.calls: list[tuple[Any, ...]] = []

    def now(self) -> datetime:
        return NOW

    async def call(self, *call: Any) -> extending.HttpReply:
        self.calls.append(call)
        return extending.HttpReply(self.status, {}, '{"id": "i-1"}')


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's package, as pip leaves it: the module, and the metadata that names its entry points."""
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    (tmp_path / "acme_trainmedic.py").write_text(FILES["acme_trainmedic.py"])
    metadata = tmp_path / f"acme_trainmedic-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    points = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(points))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_trainmedic", raising=False)


def call_of(params: extending.ActionParams, **changes: Any) -> extending.Call:
    target = extending.Target(extending.TargetKind.CLUSTER)
    return extending.Call(
        "c1", "r1", "page", target, params, "storage is slow", NOW, NOW + timedelta(seconds=9), ALERT, **changes
    )


@pytest.mark.usefixtures("installed")
async def test_the_guides_action_is_found_and_acts() -> None:
    """Its entry point is like a built-in one's; the attempt's id lets the service recognise a repeat."""
    pager = Pager()
    actions = registry.build(extending.Services(clock=pager, bus=None, http=pager))  # type: ignore[arg-type]
    page = actions.get("acme.page")
    assert actions.problems == []
    params = page.Params(team="storage", message="slow")
    output = await page.perform(call_of(params))  # type: ignore[arg-type]
    assert output == {"incident": "i-1"}
    assert [(call[1], call[2]["Idempotency-Key"]) for call in pager.calls] == [
        ("https://pager.acme.example/incidents", "c1")
    ]
    assert page.inverse(params, None) is None
    undo = page.inverse(params, output)
    assert undo == extending.Inverse("acme.close_page", {"incident": "i-1"})
    closing = actions.get(undo.action)
    await closing.perform(call_of(closing.Params(**undo.params)))  # type: ignore[arg-type]
    assert pager.calls[-1][1] == "https://pager.acme.example/incidents/i-1/close"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("status", "failure"), [(503, extending.TemporaryFailure), (403, extending.PermanentFailure)])
async def test_the_guides_action_fails_as_described(status: int, failure: type[Exception]) -> None:
    """It fails temporarily where another attempt may succeed, else permanently."""
    pager = Pager(status)
    page = registry.build(extending.Services(clock=pager, bus=None, http=pager)).get("acme.page")  # type: ignore[arg-type]
    with pytest.raises(failure, match=str(status)):
        await page.perform(call_of(page.Params(team="a", message="b")))  # type: ignore[arg-type]


@pytest.mark.usefixtures("installed")
def test_the_guides_playbook_is_valid() -> None:
    """The action is known when playbooks are checked."""
    (document,), problems = yaml_text.read(FILES["page.yaml"], "guide")
    assert problems == []
    assert isinstance(compiler.compile_document(document, registry.specs_only()), YamlPlaybook)


def test_the_guide_names_every_promised_name() -> None:
    """Each public name is in its table, and the table has no other."""
    rows = re.findall(r"^\| (`[A-Z].*?) \|", GUIDE, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(names) == sorted(extending.__all__)
    assert all(hasattr(extending, name) for name in extending.__all__)


def test_python_shows_how_each_of_them_is_constructed() -> None:
    """``help()``, an editor and a mock ask for the arguments of what an author imports."""
    values = ("Alert", "Call", "HttpReply", "Inverse", "Ref", "Resource", "Services", "Target")
    for name in values:
        assert inspect.signature(getattr(extending, name)).parameters, name


def test_a_value_is_copied_with_a_change_as_the_guide_describes() -> None:
    """An author's tests do this with a call."""
    call = call_of(extending.ActionParams())
    again = replace(call, resumed=True)
    assert (again.resumed, call.resumed, again.command_id) == (True, False, call.command_id)
    assert "msgspec.structs.replace" in GUIDE
