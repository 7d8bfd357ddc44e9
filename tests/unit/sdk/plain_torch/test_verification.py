"""The answer to a rollback while its timer's thread answers too."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

from trainmedic.job.command import JobCommand
from trainmedic.job.loss_log import LossComparison, LossCourse
from trainmedic.recovery.batch_log import BatchLog
from trainmedic.torch.verification import TOO_SLOW, RollbackVerification
from trainmedic.wire import envelope


class TakenByTimer:
    """A lock that the timer's thread takes first, and answers."""

    def __init__(self, verification: RollbackVerification) -> None:
        self.verification = verification
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        timer = threading.Thread(target=self.answer)
        timer.start()
        timer.join()
        self.lock.acquire()

    def answer(self) -> None:
        self.verification._timer.lock = self.lock
        self.verification.finish(TOO_SLOW)

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def test_the_timer_may_answer_at_the_last_compared_step() -> None:
    answers: list[str] = []
    now = envelope.utc_now()
    sent = envelope.Command("c-1", "job.rollback", {"job": "llm"}, {}, "r", "p", "why", now, now + timedelta(minutes=5))
    command = JobCommand(sent, None, None, lambda command, status, output: answers.append(status))
    medic = SimpleNamespace(progress=SimpleNamespace(rollback_not_held=False), job="llm", step=1)
    training = SimpleNamespace(medic=medic, batch_log=BatchLog(), storage=None, accumulation=1, carried_hint="")
    verification = RollbackVerification(cast(Any, training))
    losses = LossComparison(5, {}, LossCourse(""))
    verification.begin(command, {"step": 5, "verified": {}}, is_paused=False, losses=losses)
    verification._timer.lock = cast(Any, TakenByTimer(verification))
    verification.step_done(1000)
    assert answers == ["applied"]
    assert verification.pending is None
