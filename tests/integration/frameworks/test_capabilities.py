"""What a framework's job can do, as the real server shows it, and what becomes of a playbook that wants more."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import trainmedic
from tests.integration.frameworks.hf import Script, make_trainer
from tests.support.live import Server
from tests.support.messages import delivery
from tests.support.programs import eventually
from trainmedic import huggingface

PLAYBOOK = """
playbook: go-back
on: {alert: TrainingLossSpike}
target: job
steps:
  - {id: save, action: job.checkpoint}
  - {id: back, action: job.rollback}
"""


def _stated(server: Server) -> Any:
    """Return the capabilities of the only job once they name that of the Trainer."""
    stated = [job["details"]["capabilities"] for job in server.ask("/jobs").body["items"]]
    return stated[0] if stated and "job.checkpoint" in stated[0] else None


def test_a_step_that_the_job_cannot_carry_out_fails_with_the_jobs_reason(tmp_path: Path) -> None:
    """A Trainer with only the callback saves, and says why it cannot roll back; the API shows this in advance."""
    over = threading.Event()

    def until_over(control: object) -> None:
        control.should_training_stop = over.is_set()  # type: ignore[attr-defined]

    with Server(tmp_path / "server", PLAYBOOK) as server:
        url = (server.state / "redis.url").read_text().strip()
        with trainmedic.connect(job="llm-1", redis_url=url, rank=0, world_size=1) as medic:
            script = Script(each=until_over)
            trainer = make_trainer(
                tmp_path,
                script,
                huggingface.Callback(medic),
                max_steps=1_000_000,
                save_strategy="no",
                logging_steps=100,
            )
            training = threading.Thread(daemon=True, target=trainer.train)
            training.start()
            try:
                # The first presence can come before the Trainer has begun.
                capabilities = eventually(lambda: _stated(server), 60, "the job states what it can do")
                assert server.ask("/webhook", delivery("TrainingLossSpike", "llm-1")).status == 200
                run = server.closed_run()
            finally:
                over.set()
                training.join()
    assert {name: capabilities[name] for name in ("job.checkpoint", "job.rollback", "job.accumulate")} == {
        "job.checkpoint": "live",
        "job.rollback": "unsupported",
        "job.accumulate": "unsupported",
    }
    assert run["status"] == "failed"
    assert [step["status"] for step in run["steps"]] == ["succeeded", "failed"]
    assert "which is not set up here" in run["message"]
