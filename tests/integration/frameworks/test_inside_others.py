"""Inside programs that make and run the Trainer themselves: the interfaces by which they take callbacks.

Here are not those programs, but look-alikes of the few lines in which they touch a callback, over the real Trainer.
ms-swift (4.6.0) imports a plugin file under a name of its own, with the file's directory first on the path; it has
the registry ``swift.callbacks.callbacks_map``, and makes what is named there with its arguments and its trainer,
before the trainer is initialised, or, in earlier versions, afterwards. LLaMA-Factory (0.9.5) has a function that
takes callbacks in a list, makes a Trainer with them, and calls ``train(resume_from_checkpoint=...)``.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import trainmedic
from tests.integration.frameworks.hf import Script, make_trainer
from tests.support.command_sender import Commander, Sent
from tests.support.programs import ROOT
from trainmedic import huggingface

PLUGIN = ROOT / "sdk" / "trainmedic" / "huggingface" / "ms_swift.py"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Any, Any], Any]]:
    """ms-swift's registry, with the plugin in it."""
    package, callbacks = types.ModuleType("swift"), types.ModuleType("swift.callbacks")
    callbacks.callbacks_map = entries = {}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swift", package)
    monkeypatch.setitem(sys.modules, "swift.callbacks", callbacks)
    monkeypatch.syspath_prepend(PLUGIN.parent)
    spec = importlib.util.spec_from_file_location("_swift_external_plugin", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return entries


class SwiftBefore(Trainer):  # type: ignore[misc]
    """Makes its callbacks first, so that they are told of the initialisation."""

    registry: dict[str, Callable[[Any, Any], Any]]

    def __init__(self, *arguments: Any, callbacks: list[Any], **options: Any) -> None:
        named = [self.registry["trainmedic"](options["args"], self)]
        super().__init__(*arguments, callbacks=[*callbacks, *named], **options)


class SwiftAfter(Trainer):  # type: ignore[misc]
    registry: dict[str, Callable[[Any, Any], Any]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.add_callback(self.registry["trainmedic"](self.args, self))


@pytest.mark.parametrize("kind", [SwiftBefore, SwiftAfter])
def test_a_callback_that_ms_swift_creates_by_name_restarts_its_trainer(
    kind: Any,
    registry: dict[str, Callable[[Any, Any], Any]],
    commander: Commander,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It carries out a rollback with the given trainer; the job's name comes from the environment."""
    monkeypatch.setenv("TRAINMEDIC_JOB", commander.name)
    monkeypatch.setenv("TRAINMEDIC_REDIS_URL", commander.url)
    monkeypatch.setattr(kind, "registry", registry, raising=False)
    script = Script()
    trainer = make_trainer(tmp_path, script, cls=kind, max_steps=16)
    (callback,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, huggingface.Callback)]
    with callback.medic as medic:
        sent = Sent(commander, medic)
        script.acts[13] = sent("job.rollback")
        assert trainer.train().global_step == 16
        assert sent.reply().status == "applied"
    assert script.steps == [*range(1, 14), *range(11, 17)]


def run_exp(directory: Path, callbacks: list[Any], **options: Any) -> int:
    """Stands in for LLaMA-Factory's function of that name."""
    trainer = make_trainer(directory, *callbacks, **options)
    step: int = trainer.train(resume_from_checkpoint=None).global_step
    return step


def test_callbacks_in_a_list_carry_out_live_commands(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """LLaMA-Factory accepts them this way, without its trainer; a rollback is unsupported."""
    script = Script(at_3=sent("job.scale_lr", factor=0.5), at_4=sent("job.rollback"))
    assert run_exp(tmp_path, [script, huggingface.Callback(medic)], max_steps=6) == 6
    assert [reply.status for reply in sent.replies()] == ["applied", "unsupported"]


def test_a_program_that_creates_its_own_trainer_restarts_inside_protect(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """This holds whatever callbacks the program has."""
    script = Script(at_13=sent("job.rollback"))
    with huggingface.protect(medic=medic):
        assert run_exp(tmp_path, [script], max_steps=16) == 16
    assert sent.reply().status == "applied"
    assert script.steps == [*range(1, 14), *range(11, 17)]
