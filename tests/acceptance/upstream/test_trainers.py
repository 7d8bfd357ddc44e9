"""Scripts as people have them: the loss jumps, the alert brings them back, and the answer proves it.

All of it real, as in ``test_loss_spike``: Prometheus with the shipped rules, Alertmanager, ``trainmedic serve`` with
the shipped playbook. TRL's is its own, from its package; scripts of others that no package holds have one of their
shape here.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.acceptance import scene
from tests.support.programs import PYTHON_PATH, Program, alertmanagers, eventually, start_server

HERE = Path(__file__).parent
TRL = Path(sys.prefix) / "trl"
"""Where `scripts/setup all` installs what is not to be seen by the other frameworks."""
LOSS = 'training_loss{job_name="upstream"}'
LEARNING_RATE = 'training_learning_rate{job_name="upstream"}'
FAULT = 320
"""The step after which the weights are spoiled: by then the alert's rule has a baseline."""
WORDS = [f"word{number}" for number in range(20)]


def text(path: Path) -> Path:
    """A text that can be learned, in which a word says much of the next."""
    choice = random.Random(0)
    lines = [
        [WORDS[(start + 3 * place) % len(WORDS)] for place in range(20)] for start in choice.choices(range(20), k=3000)
    ]
    path.write_text("\n".join(" ".join(line) for line in lines))
    return path


def start_trl(directory: Path, port: int, environment: Mapping[str, str]) -> Program:
    """TRL's own script for supervised fine-tuning, unmodified, within ``protect``."""
    end = "[END]"
    words = WordLevel({word: number for number, word in enumerate((end, *WORDS))}, unk_token=end)
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
    fast.save_pretrained(directory / "model")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 1 + len(WORDS)}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(directory / "model")
    (directory / "data").mkdir()
    text(directory / "data" / "train.txt")
    script = ["trl.scripts.sft", "--model_name_or_path", directory / "model", "--dataset_name", directory / "data"]
    packages = {"PYTHONPATH": os.pathsep.join((PYTHON_PATH, str(TRL))), "HF_HOME": str(directory / "cache")}
    return start_protected(script, directory, port, {**packages, **environment})


def start_causal_language_model(directory: Path, port: int, environment: Mapping[str, str]) -> Program:
    """A script of the shape of one of transformers' examples, within ``protect``."""
    script = [HERE / "causal_language_model.py", "--train_file", text(directory / "train.txt")]
    return start_protected(script, directory, port, environment)


def start_protected(
    script: Sequence[str | Path], directory: Path, port: int, environment: Mapping[str, str]
) -> Program:
    """A script of others that takes a Trainer's arguments, as a job that saves often."""
    trainer = [
        *("--output_dir", directory / "checkpoints", "--max_steps", "100000", "--save_steps", "50"),
        *("--logging_steps", "1", "--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--use_cpu"),
        *("--report_to", "none", "--disable_tqdm", "true", "--per_device_train_batch_size", "4"),
    ]
    argv = [sys.executable, HERE / "protected.py", FAULT, port, *script, *trainer]
    return Program([str(part) for part in argv], directory / "job.log", _with_packages(environment))


def start_lightning(directory: Path, port: int, environment: Mapping[str, str]) -> Program:
    """A script with Lightning's own demonstration model and data set."""
    script = HERE / "lightning_transformer.py"
    argv = [sys.executable, script, FAULT, port, text(directory / "wikitext-2.txt"), directory / "checkpoints"]
    return Program([str(part) for part in argv], directory / "job.log", _with_packages(environment))


def _with_packages(environment: Mapping[str, str]) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {"PYTHONPATH": PYTHON_PATH, **offline, **environment}


@pytest.mark.parametrize("start", [start_trl, start_lightning, start_causal_language_model])
def test_a_spike_is_rolled_back_verified_and_reverted(tmp_path: Path, start: Any) -> None:
    """The job loads a checkpoint from before the jump, the comparison agrees, and the learning rate is restored."""
    alertmanager = next(iter(alertmanagers().values()), None)
    assert alertmanager is not None, "no Alertmanager; see scripts/fetch-alertmanager"
    playbooks = scene.faster_playbook(tmp_path / "playbooks", "training-loss-spike.yaml")
    program, server = start_server(tmp_path / "server", "--mode", "enforce", playbooks=playbooks)
    environment = {"TRAINMEDIC_STATE_DIR": os.fspath(tmp_path / "server" / "state")}
    with program, scene.running(tmp_path / "scene", alertmanager, server, environment, start) as watched:
        run = eventually(lambda: succeeded(server, watched.job), 240, "the run's success", every=1.0)
        run = eventually(lambda: given_back(server, run), 60, "the learning rate is given back")
        scaled = output_of(run, "job.scale_lr")
        assert scaled["after"] == pytest.approx(scaled["before"] / 2)
        eventually(lambda: watched.newest(LEARNING_RATE) == pytest.approx(scaled["before"]), 60, "the rate's return")
        assert watched.newest(LOSS) < watched.highest(LOSS, 90) - 1.0
    went_back = output_of(run, "job.rollback")
    assert went_back["checkpoint_step"] <= FAULT - 5
    assert went_back["skipped_batches"] == 200
    parameters, batches = went_back["verified"]["parameters"], went_back["verified"]["batches"]
    assert parameters["agreed"] == parameters["compared"] > 0
    assert batches["agreed"] == batches["compared"]
    assert batches["compared"] > 0, json.dumps(went_back)


def succeeded(server: str, job: Program) -> dict[str, Any] | None:
    """The run for the spike, with its steps, once it has succeeded; the job is still at work."""
    assert job.process.poll() is None, job.tail()
    found = httpx.get(f"{server}/history", params={"alertname": "TrainingLossSpike"}).raise_for_status().json()["items"]
    if not found or found[-1]["status"] in ("running", "waiting"):
        return None
    run = told(server, found[-1]["run_id"])
    assert run["status"] == "succeeded", json.dumps(run["steps"])
    return run


def given_back(server: str, run: Mapping[str, Any]) -> dict[str, Any] | None:
    """The run, once what it owed has been taken back."""
    present = told(server, run["run_id"])
    return present if present["undone_at"] else None


def told(server: str, run_id: str) -> dict[str, Any]:
    run: dict[str, Any] = httpx.get(f"{server}/history/{run_id}").raise_for_status().json()
    return run


def output_of(run: Mapping[str, Any], action: str) -> Mapping[str, Any]:
    (output,) = (step["output"] for step in run["steps"] if step["action"] == action and step["phase"] == "steps")
    return output
