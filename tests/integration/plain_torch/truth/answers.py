"""What the answers of a commanded training say that it did, followed step by step and held to a plain training.

Each answer moves the course: back to a step, with batches left out, to another rate or batch. After each that went
back, after each restart and at the end the course is trained plainly (``plain_course``), and every step, every batch
and what stood after each boundary has to be the same. Raises Difference where an answer says what did not happen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tests.integration.plain_torch.truth.commanded import Begun, Boundary, Entry, Sent, Trained
from tests.integration.plain_torch.truth.plain_course import (
    DataPlace,
    Difference,
    Knowledge,
    Planned,
    Reached,
    batches_of,
    hold,
)
from tests.integration.plain_torch.truth.recipes import INDEXED, READ_ON
from trainmedic.wire.envelope import APPLIED, FAILED, read_time

REPLAYED, OTHER, NOT_KNOWN = "the same batches again", "the same samples again", "not known"
AHEAD = "not the same batches: the loop fetches each batch during the step before"
PERHAPS = "not known: the loop has fetched more than one batch by the end of its first step"
READ_OTHERWISE = "not the same batches: the source gives others when it is read again"
"""Of samples that are made with random numbers; those that come then are the same all the same."""
STREAM = "not the same batches: a stream only goes on; {} batches since then are left out"


@dataclass
class InForce:
    """What commands have changed, by the id of each."""

    rate: dict[str, float] = field(default_factory=dict)
    batch: dict[str, float] = field(default_factory=dict)
    accumulation: dict[str, float] = field(default_factory=dict)
    workers: int | None = None

    def drop(self, told: str) -> None:
        """Take out what a start says that it does without."""
        for factors in (self.rate, self.batch, self.accumulation):
            for command_id in [each for each in factors if each in told]:
                del factors[command_id]
        if "workers" in told:
            self.workers = None


class Story:
    """One training, as its answers tell it."""

    def __init__(self, knowledge: Knowledge, exact: bool) -> None:
        self.knowledge, self.exact = knowledge, exact
        self.recipe = knowledge.recipe
        self.course: list[Planned] = []
        self.left_out: set[DataPlace] = set()
        self.in_force = InForce()
        self.written = {0}
        self.held = self.anew = self.drawn = False
        self.saves_next = True
        self.jump: int | None = None
        self.is_given = self.recipe.loader == "liar"
        self.gives_others = False
        """Whether an answer has said that a stream which is shuffled through a buffer gives other batches from there
        on, so that no plain training can be held against it."""
        self.replayed: list[tuple[list[str], list[str], Mapping[str, Any]]] = []
        self.counts: dict[str, int] = {}

    def tell(self, log: list[Entry]) -> None:
        """Follow the whole log. Raises Difference."""
        for number, entry in enumerate(log):
            if self.gives_others:
                return
            if isinstance(entry, Trained):
                self._train(entry)
            elif isinstance(entry, Begun):
                self._begin(entry, is_first=number == 0)
            else:
                self._cross(entry)
        self._hold()

    # --- what is in force -------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        return math.prod(self.in_force.rate.values())

    @property
    def batch(self) -> int:
        return math.floor(_scaled(self.recipe.batch, self.in_force.batch))

    @property
    def accumulation(self) -> int:
        return int(_scaled(self.recipe.accumulation, self.in_force.accumulation))

    @property
    def workers(self) -> int:
        return self.recipe.workers if self.in_force.workers is None else self.in_force.workers

    # --- the log ----------------------------------------------------------------------------------------

    def _save(self) -> None:
        """The periodic checkpoint is written at a boundary after its commands, unless one of these went back."""
        step = len(self.course)
        if self.saves_next and step % self.recipe.every == 0 and self.recipe.memory != "asynchronous":
            self.written.add(step)
        self.saves_next = False

    def _train(self, seen: Trained) -> None:
        self._save()
        planned = Planned(seen, self.accumulation, self.batch, self.workers, self.scale)
        planned.held, planned.anew, planned.jump = self.held, self.anew, self.jump
        planned.drawn = self.drawn and not self.course
        self.drawn = False
        self.held, self.anew, self.jump = False, False, None
        self.course.append(planned)
        for _, digests, _ in self.replayed:
            digests.extend(seen.digests)
        self.saves_next = True

    def _begin(self, begun: Begun, is_first: bool) -> None:
        if is_first:
            return
        self._save()
        reached = self._hold()
        step = begun.resumed
        if step is None or not max(self.written) <= step <= len(self.course):
            raise Difference(f"a start went on from {step}, and there are checkpoints of {sorted(self.written)}")
        self.in_force.drop(begun.dropped)
        self._cut(step)
        self.held, self.anew, self.jump = False, True, None
        self._compare_state("after a start", begun, reached)

    def _cross(self, boundary: Boundary) -> None:
        reached = self._hold()
        for sent in boundary.sent:
            reply = sent.replies[self.knowledge.place.rank]
            output, status = reply.output, reply.status
            self.counts[f"{sent.order.action} {status}"] = self.counts.get(f"{sent.order.action} {status}", 0) + 1
            if status == APPLIED or (status == FAILED and "verified" in output):
                self._follow(sent, output, status, reached)
        if boundary.step != len(self.course):
            raise Difference(f"the training stands at step {boundary.step}, by its answers at {len(self.course)}")
        self._compare_state("after a boundary", boundary, reached)

    def _compare_state(self, when: str, seen: Boundary | Begun, reached: Reached) -> None:
        """With what a plain training is after that step, and what is in force now."""
        step = len(self.course)
        expected = dict(reached.after[step])
        if self.recipe.loader in ("stateful", "shuffling", "buffered_stream") or self.drawn:
            # A loader that was asked for its state, or has begun to read, has drawn what it otherwise draws next.
            expected = {name: value for name, value in expected.items() if not name.startswith("random")}
        differing = [name for name in expected if seen.state[name] != expected[name]]
        if differing:
            raise Difference(f"{when} at step {step}: {len(differing)} differ: {', '.join(differing[:8])}")
        told = (("the scale", seen.scale, self.scale), ("accumulation", seen.accumulation, self._told_accumulation))
        rates = [rate * self.scale for rate in reached.rates[step]]
        for what, is_now, was_told in (*told, *(("rate", *pair) for pair in zip(seen.rates, rates, strict=True))):
            if not self._is_same(is_now, was_told):
                raise Difference(f"{when} at step {step}: {what} is {is_now!r}, and was to be {was_told!r}")

    @property
    def _told_accumulation(self) -> int:
        return 1 if self.recipe.within else self.accumulation

    def _is_same(self, one: float, other: float) -> bool:
        return one == other if self.exact else math.isclose(one, other, rel_tol=1e-9)

    def _hold(self) -> Reached:
        self._check_replayed()
        return hold(self.knowledge, self.course, self.left_out, self.exact)

    def _cut(self, step: int) -> None:
        # The first checkpoint is written when the first step begins.
        recipe = self.recipe
        self.drawn = step == 0 and recipe.loader == "own_draws" and (recipe.ahead or not recipe.within)
        self.course = self.course[:step]
        self.written = {each for each in self.written if each <= step}

    # --- the answers ------------------------------------------------------------------------------------

    def _follow(self, sent: Sent, output: Mapping[str, Any], status: str, reached: Reached) -> None:
        action = sent.order.action
        if action == "job.rollback":
            self._roll_back(sent, output, status, reached)
        elif action == "job.scale_lr":
            self._change(self.in_force.rate, sent)
            self._hear(output, "scale", self.scale)
            self._hear(output, "after", reached.rates[len(self.course)][0] * self.scale)
        elif action == "job.accumulate":
            self._hear(output, "before", self._told_accumulation)
            self._change(self.in_force.accumulation, sent)
            self._hear(output, "after", self._told_accumulation)
        elif action == "job.scale_batch":
            self._scale_batch(sent, output)
        elif action == "job.dataloader_workers":
            self._hear(output, "previous", self.workers)
            self.in_force.workers = sent.params["count"]
            self._hear(output, "count", self.workers)
        elif output.get("checkpoint"):
            self.written.add(len(self.course))
            self._hear(output, "step", len(self.course))

    def _change(self, factors: dict[str, float], sent: Sent) -> None:
        if sent.undo_of is None:
            factors[sent.id] = sent.params["factor"]
        else:
            factors.pop(sent.undo_of.id, None)

    def _scale_batch(self, sent: Sent, output: Mapping[str, Any]) -> None:
        self._hear(output, "before", self.batch)
        self._hear(output, "accumulation_before", self._told_accumulation)
        self._change(self.in_force.batch, sent)
        if sent.undo_of is not None:
            self.in_force.accumulation.pop(sent.undo_of.id, None)
        elif sent.params.get("keep_global_batch", True):
            self.in_force.accumulation[sent.id] = 1 / sent.params["factor"]
        self._hear(output, "after", self.batch)
        self._hear(output, "accumulation_after", self._told_accumulation)
        self._hear(output, "global_batch_after", self._told_accumulation * self.batch * self.knowledge.place.ranks)

    def _hear(self, output: Mapping[str, Any], name: str, expected: float) -> None:
        if name in output and not self._is_same(output[name], expected):
            raise Difference(f"an answer has {name} {output[name]!r}, and it is {expected!r}: {dict(output)}")

    def _roll_back(self, sent: Sent, output: Mapping[str, Any], status: str, reached: Reached) -> None:
        left, step, skip = len(self.course), output["step"], sent.params.get("skip_batches", 0)
        self._hear(output, "left_step", left)
        self._hear(output, "skipped_batches", skip)
        self._check_target(sent, output, left)
        parameters, batches = output["verified"]["parameters"], output["verified"]["batches"]
        if not 0 < parameters["compared"] == parameters["agreed"] or parameters["ranks"] != self.knowledge.place.ranks:
            raise Difference(f"not all parameters agreed: {parameters}")
        if (status == APPLIED) != (batches["compared"] == batches["agreed"]):
            raise Difference(f"{status} with {batches}")
        if status == FAILED and not self.is_given:
            raise Difference(f"an honest source gave other batches: {dict(output)}")
        self._check_loss(output, "loss_at_checkpoint", step)
        self._check_loss(output, "loss_before", left)
        self._move_data(step, skip, output["data"], reached)
        if self.is_given and not skip:
            before = [digest for planned in self.course[step:] for digest in planned.seen.digests]
            self.replayed.append((before, [], batches))
        self._cut(step)
        self.saves_next = False
        self._hear(output, "learning_rate", reached.rates[step][0] * self.scale)

    def _check_loss(self, output: Mapping[str, Any], name: str, step: int) -> None:
        """That of the step, or of one before where a fast loop reports tensors: of these, not all are taken."""
        told = output.get(name)
        means = [sum(each.seen.losses) / len(each.seen.losses) for each in self.course[:step]]
        reports_numbers = self.recipe.own_calls or self.recipe.within
        possible = means[-1:] if reports_numbers else means
        if told is not None and not any(math.isclose(told, mean, rel_tol=1e-5) for mean in possible):
            raise Difference(f"{name} is {told!r}, and the losses up to step {step} were {means}")

    def _check_target(self, sent: Sent, output: Mapping[str, Any], left: int) -> None:
        """The newest that satisfies the command, or the answer names those that were passed over."""
        step, params = output["step"], sent.params
        latest = params.get("step", left - params.get("steps_back", 0))
        passed_over = {each["step"] for each in output.get("passed_over", ())}
        least = max((each for each in self.written - passed_over if each <= latest), default=0)
        if "before" in params:
            least = 0
            if not read_time(output["saved_at"]) < read_time(params["before"]):
                raise Difference(f"saved at {output['saved_at']}, which is not before {params['before']}")
        if not least <= step <= min(latest, left) or output.get("unusable"):
            raise Difference(
                f"a rollback by {params} from {left} went to {step}, with {sorted(self.written)}: {output}"
            )

    def _move_data(self, step: int, skip: int, data: str, reached: Reached) -> None:
        """Which batches come now, by the answer."""
        now, place = reached.places[-1], reached.places[step]  # of where the training was before the boundary
        loader = self.recipe.loader
        allowed = [REPLAYED]
        if loader == "own_draws":
            allowed = [NOT_KNOWN]
        elif loader == "stream":
            allowed = [STREAM.format(now.entries - place.entries), AHEAD]
        elif loader in INDEXED:
            allowed = [REPLAYED, OTHER, AHEAD]
        elif loader in READ_ON and (self.recipe.augments or loader == "buffered_stream"):
            allowed.append(READ_OTHERWISE)
        if not data.startswith((*allowed, AHEAD, PERHAPS)):
            raise Difference(f"of the batches of a {loader} the answer says: {data}")
        self.gives_others = loader == "buffered_stream" and not data.startswith(REPLAYED)
        self.held = self.recipe.ahead and not data.startswith((REPLAYED, OTHER, READ_OTHERWISE))
        if loader == "stream":
            self.jump = max(now.entries, place.entries + skip, self.jump or 0)
        elif skip:
            source = batches_of(self.knowledge, self.left_out)
            self.left_out |= source.leave_out(place, skip, self.batch)

    def _check_replayed(self) -> None:
        """Of a source that lies, as many batches agreed as the answer says."""
        for before, digests, told in self.replayed:
            pairs = list(zip(before, digests, strict=False))[: told["compared"]]
            agreed = sum(one == other for one, other in pairs)
            if len(pairs) == told["compared"] and agreed != told["agreed"]:
                raise Difference(f"{agreed} batches came again, and the answer has {told}")
        self.replayed = []


def _scaled(base: int, factors: Mapping[str, float]) -> Fraction:
    exact = Fraction(base)
    for factor in factors.values():
        exact *= Fraction(factor).limit_denominator(10_000)
    return exact
