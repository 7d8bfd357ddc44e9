"""Training loops in the shapes of widespread kinds of scripts, each protected with the documented lines.

A loop trains ``course.steps`` steps and notes each one: its loss, and all groups' rates in use at its update. What is
expected of them: ``test_stranger_loops``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainmedic
import trainmedic.torch
from trainmedic.torch.steps import Step


class Course:
    """Losses and rates by step, as they last were, and acts by step, once each."""

    def __init__(self, steps: int = 60, acts: dict[int, Callable[[], Any]] | None = None) -> None:
        self.steps = steps
        self.acts = dict(acts or {})
        self.losses: dict[int, float] = {}
        self.rates: dict[int, list[float]] = {}

    def note(self, step: Step, loss: Any, rates: list[float]) -> None:
        """Report the step as well."""
        step.report(loss=loss)
        self.losses[step.number], self.rates[step.number] = torch.as_tensor(loss).item(), rates
        self.acts.pop(step.number, int)()


@contextmanager
def protected(medic: trainmedic.Medic, directory: Path, **parts: Any) -> Iterator[trainmedic.torch.Run]:
    """The documented lines."""
    with trainmedic.torch.attach(medic, checkpoints=directory, checkpoint_every=10, keep=None, **parts) as run:
        run.resume()
        yield run


def rates_of(*optimizers: Any) -> list[float]:
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]


def images(count: int = 96, size: int = 12) -> TensorDataset:
    return TensorDataset(torch.randn(count, size), torch.randint(4, (count,)))


def adversarial(medic: trainmedic.Medic, directory: Path, course: Course, knows_schedulers: bool = True) -> None:
    """Two networks and optimizers in turn, with schedules for both; some loops step them behind the step."""
    maker, judge = nn.Linear(4, 12), nn.Sequential(nn.Linear(12, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    for_judge = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for_maker = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizers = {"judge": for_judge, "maker": for_maker}
    schedulers = {name: lr_scheduler.LambdaLR(each, lambda n: 0.98**n) for name, each in optimizers.items()}
    more = {"scheduler": schedulers} if knows_schedulers else {}
    models = {"maker": maker, "judge": judge}
    loader = DataLoader(images(), 8, shuffle=True)
    with protected(medic, directory, model=models, optimizer=optimizers, loader=loader, **more) as run:
        for real, _ in run.batches(steps=course.steps):
            with run.step() as step:
                made = maker(torch.randn(len(real), 4))
                for_judge.zero_grad()
                loss = functional.softplus(-judge(real)).mean() + functional.softplus(judge(made.detach())).mean()
                loss.backward()
                rates = rates_of(for_judge, for_maker)
                for_judge.step()
                for_maker.zero_grad()
                functional.softplus(-judge(made)).mean().backward()
                for_maker.step()
                course.note(step, loss, rates)
                for scheduler in schedulers.values() if knows_schedulers else ():
                    scheduler.step()
            for scheduler in () if knows_schedulers else schedulers.values():
                scheduler.step()


def unknown_schedulers(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    adversarial(medic, directory, course, knows_schedulers=False)


def self_distilled(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    """A student and its average as teacher; rate, weight decay and momentum by step, from tables; a centre."""
    student = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 6))
    teacher = copy.deepcopy(student).requires_grad_(False)
    centre = torch.zeros(6)
    decayed = [each for each in student.parameters() if each.dim() > 1]
    groups = [{"params": decayed}, {"params": [each for each in student.parameters() if each.dim() == 1]}]
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    table = [2e-2 * min(1.0, (n + 1) / 10) * (1 + math.cos(math.pi * n / 200)) / 2 for n in range(200)]
    parts: dict[str, Any] = {"model": student, "optimizer": optimizer, "ema": teacher, "also": {"centre": centre}}
    loader = DataLoader(images(), 8, shuffle=True, drop_last=True)
    with protected(medic, directory, loader=loader, **parts) as run:
        for batch, _ in run.batches(steps=course.steps):
            with run.step() as step:
                now = run.global_step
                for number, group in enumerate(optimizer.param_groups):
                    group["lr"] = step.learning_rate(table[now])
                    if number == 0:
                        group["weight_decay"] = 0.04 + 0.001 * now
                views = [batch + 0.1 * torch.randn_like(batch) for _ in range(2)]
                targets = functional.softmax((teacher(views[0]) - centre) / 0.1, -1)
                loss = -(targets * functional.log_softmax(student(views[1]) / 0.2, -1)).sum(-1).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(student.parameters(), 3.0)
                rates = rates_of(optimizer)
                optimizer.step()
                with torch.no_grad():
                    for mean, value in zip(teacher.parameters(), student.parameters(), strict=True):
                        mean.lerp_(value, 0.1)
                    centre.lerp_(teacher(views[0]).mean(0), 0.1)
                course.note(step, loss, rates)


def detector(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    """The loop warms up the rates of three groups by itself, for 25 steps; then a schedule has them."""
    model = nn.Sequential(nn.Linear(12, 16), nn.SiLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}], lr=0.05, momentum=0.9, nesterov=True)
    optimizer.add_param_group({"params": [model[2].weight], "weight_decay": 5e-4})
    optimizer.add_param_group({"params": [model[2].bias]})
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda n: 1 - 0.004 * n)
    loader = DataLoader(images(), 8, shuffle=True)
    with protected(medic, directory, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader) as run:
        for batch, classes in run.batches(steps=course.steps):
            with run.step() as step:
                if run.global_step < 25:
                    share = run.global_step / 25
                    for number, group in enumerate(optimizer.param_groups):
                        start = 0.1 if number == 2 else 0.001
                        group["lr"] = start + share * (group["initial_lr"] - start)
                loss = functional.cross_entropy(model(batch), classes)
                loss.backward()
                rates = rates_of(optimizer)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                course.note(step, loss, rates)


class Sharpened(torch.optim.Optimizer):
    """Two steps for each update, of which the second is its base's; the loop calls them by their own names."""

    def __init__(self, parameters: Any, lr: float, reach: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "reach": reach})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["shift"] = group["reach"] * parameter.grad / (parameter.grad.norm() + 1e-12)
                parameter.add_(self.state[parameter]["shift"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.state[parameter]["shift"])
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


def sharpened(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = Sharpened(model.parameters(), lr=0.05)
    loader = DataLoader(images(), 8, shuffle=True)
    with protected(medic, directory, model=model, optimizer=optimizer, loader=loader) as run:
        for batch, classes in run.batches(steps=course.steps):
            with run.step() as step:
                loss = functional.cross_entropy(model(batch), classes)
                loss.backward()
                optimizer.first_step()
                functional.cross_entropy(model(batch), classes).backward()
                rates = rates_of(optimizer)
                optimizer.second_step()
                course.note(step, loss, rates)


def compiled(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    """Model and update are compiled, with the rate in a tensor that both groups share."""
    torch.compiler.reset()  # it compiles only so many optimizers in a process
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4))
    compiled_model: Any = torch.compile(model, backend="eager")
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.01), foreach=False, capturable=False)
    update: Any = torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=False)
    loader = DataLoader(images(), 8, shuffle=True, drop_last=True)
    with protected(medic, directory, model=compiled_model, optimizer=optimizer, loader=loader) as run:
        for batch, classes in run.batches(steps=course.steps):
            with run.step() as step:
                loss = functional.cross_entropy(compiled_model(batch), classes)
                optimizer.zero_grad()
                loss.backward()
                rates = rates_of(optimizer)
                update()
                course.note(step, loss, rates)


class Shards(IterableDataset[torch.Tensor]):
    """Documents from shards in an order of their own for each epoch, cut into windows, without end."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        epoch = 0
        while True:
            order = torch.randperm(4, generator=torch.Generator().manual_seed(epoch))
            for shard in order.tolist():
                text = torch.randint(20, (60,), generator=torch.Generator().manual_seed(shard))
                yield from (text[start : start + 9] for start in range(0, 50, 8))
            epoch += 1


def streamed(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    """Several batches a step from an endless stream, a rate that the loop sets, and bad batches left out."""
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with protected(medic, directory, model=model, optimizer=optimizer, loader=DataLoader(Shards(), 4)) as run:
        batches = run.batches()
        while run.global_step < course.steps and not run.stopping:
            with run.step() as step:
                rate = 0.01 * 0.99**run.global_step
                for group in optimizer.param_groups:
                    group["lr"] = run.lr_scale * rate
                total = 0.0
                for _ in range(3):
                    rows = next(batches)
                    loss = functional.cross_entropy(model(rows[:, :8]), rows[:, 8]) / 3
                    loss.backward()
                    total += loss.item()
                rates = rates_of(optimizer)
                is_bad = step.number % 7 == 0  # as if its gradients were no numbers
                if not is_bad:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                course.note(step, total, rates)


def second_order(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    """The optimizer calls the loss by itself, several times for each step."""
    model = nn.Linear(12, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=4)
    loader = DataLoader(images(), 24, shuffle=True)
    with protected(medic, directory, model=model, optimizer=optimizer, loader=loader) as run:
        for batch, classes in run.batches(steps=course.steps):
            with run.step() as step:

                def again(batch: Any = batch, classes: Any = classes) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(batch), classes) + 0.01 * model.weight.square().sum()
                    loss.backward()
                    return loss

                rates = rates_of(optimizer)
                loss: Any = optimizer.step(again)
                course.note(step, loss, rates)


class Corridor:
    """An environment with a position and random numbers of its own."""

    def __init__(self) -> None:
        self.place, self.generator = 0.0, torch.Generator().manual_seed(5)

    def act(self, right: bool) -> tuple[torch.Tensor, float]:
        self.place += (1.0 if right else -1.0) + 0.3 * float(torch.randn((), generator=self.generator))
        reward = -abs(self.place - 3.0)
        self.place = 0.0 if abs(self.place) > 8 else self.place
        return torch.tensor([self.place, self.place**2 / 10]), reward

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        self.generator.set_state(state["generator"])


def policy_gradient(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    """No loader: each step plays, then trains some epochs on it, with a rate that falls by step."""
    policy = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02, eps=1e-5)
    world = Corridor()
    view = torch.zeros(2)
    also = {"world": world, "view": view}
    with protected(medic, directory, model=policy, optimizer=optimizer, also=also) as run:
        while run.global_step < course.steps and not run.stopping:
            with run.step() as step:
                optimizer.param_groups[0]["lr"] = step.learning_rate(0.02 * (1 - run.global_step / 400))
                seen, acted, rewards = [], [], []
                for _ in range(16):
                    seen.append(view.clone())
                    with torch.no_grad():
                        action = torch.distributions.Categorical(logits=policy(view)).sample()
                    after, reward = world.act(bool(action))
                    view.copy_(after)
                    acted.append(action)
                    rewards.append(reward)
                worth = torch.tensor(rewards)
                worth = (worth - worth.mean()) / (worth.std() + 1e-8)
                losses = []
                rates = rates_of(optimizer)
                for _ in range(2):
                    for places in torch.randperm(16).split(8):
                        chosen = torch.distributions.Categorical(logits=policy(torch.stack(seen)[places]))
                        loss = -(chosen.log_prob(torch.stack(acted)[places]) * worth[places]).mean()
                        optimizer.zero_grad()
                        loss.backward()
                        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                        optimizer.step()
                        losses.append(loss.item())
                course.note(step, losses[0], rates)


def layered(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    """Four batches for each update, counted by the loop, with a rate by group; batches without a finite loss do not
    count."""
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    groups = [
        {"params": layer.parameters(), "lr_scale": 0.75**depth} for depth, layer in enumerate((model[3], model[0]))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    number = 0

    def set_number(value: int) -> None:
        nonlocal number
        number = value

    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": DataLoader(images(), 4, shuffle=True)}
    also = {"number": (lambda: number, set_number)}
    with protected(medic, directory, accumulation=4, also=also, **parts) as run:
        total = 0.0
        for batch, classes in run.batches(steps=course.steps):
            with run.step() as step:
                rate = 1e-2 * (1 + math.cos(math.pi * run.global_step / 120)) / 2
                for group in optimizer.param_groups:
                    group["lr"] = step.learning_rate(rate) * group["lr_scale"]
                loss = functional.cross_entropy(model(batch + 0.01 * torch.randn_like(batch)), classes)
                if number % 11 == 10:
                    loss = loss * float("nan")
                if math.isfinite(loss.item()):
                    (loss / 4).backward()
                    total += loss.item() / 4
                number += 1
                if step.is_update:
                    rates = rates_of(optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
                    course.note(step, total, rates)
                    total = 0.0


def half_scaled(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    """Two optimizers with rates by step, of which one forgets the factor."""
    first, last = nn.Linear(12, 8), nn.Linear(8, 4)
    optimizers = [torch.optim.Adam(first.parameters(), lr=0.01), torch.optim.SGD(last.parameters(), lr=0.1)]
    loader = DataLoader(images(), 8, shuffle=True)
    with protected(medic, directory, model=[first, last], optimizer=optimizers, loader=loader) as run:
        for batch, classes in run.batches(steps=course.steps):
            with run.step() as step:
                optimizers[0].param_groups[0]["lr"] = step.learning_rate(0.01 * 0.99**step.number)
                optimizers[1].param_groups[0]["lr"] = 0.1 * 0.99**step.number
                loss = functional.cross_entropy(last(torch.relu(first(batch))), classes)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                rates = rates_of(*optimizers)
                for optimizer in optimizers:
                    optimizer.step()
                course.note(step, loss, rates)


class Averaged(torch.optim.Optimizer):
    """Without a schedule: the parameters are between the fast ones and their mean, and at the mean while evaluated."""

    def __init__(self, parameters: Any, lr: float, share: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "share": share, "count": 0, "weight_sum": 0.0, "largest": 0.0})
        self.is_training = True

    @torch.no_grad()
    def _move(self, share: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "fast" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["fast"], 1 - share)

    def eval(self) -> None:
        if self.is_training:
            self._move(1 / self.param_groups[0]["share"])
        self.is_training = False

    def train(self) -> None:
        if not self.is_training:
            self._move(self.param_groups[0]["share"])
        self.is_training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            group["largest"] = max(group["largest"], group["lr"])
            weight = group["largest"] ** 2
            group["weight_sum"] += weight
            part = weight / group["weight_sum"]
            for parameter in group["params"]:
                state = self.state[parameter]
                fast = state.setdefault("fast", parameter.clone())
                parameter.lerp_(fast, part)
                parameter.sub_(parameter.grad, alpha=group["lr"] * (group["share"] * (1 - part)))
                fast.sub_(parameter.grad, alpha=group["lr"])


def schedule_free(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    """Its means are evaluated every ten steps, right before a checkpoint, and while `train` was not called again."""
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = Averaged(model.parameters(), lr=0.1)
    loader = DataLoader(images(), 8, shuffle=True)
    with protected(medic, directory, model=model, optimizer=optimizer, loader=loader) as run:
        for batch, classes in run.batches(steps=course.steps):
            with run.step() as step:
                optimizer.train()
                loss = functional.cross_entropy(model(batch), classes)
                loss.backward()
                rates = rates_of(optimizer)
                optimizer.step()
                optimizer.zero_grad()
                course.note(step, loss, rates)
                if step.number % 10 == 0:
                    optimizer.eval()
                    with torch.no_grad():
                        functional.cross_entropy(model(batch), classes)


class Lookahead(torch.optim.Optimizer):
    """Goes back halfway to its slow weights at every fifth step. It is its inner optimizer, but for list and count."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
        self.slow = [[each.detach().clone() for each in group["params"]] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.count += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True) if self.count % 5 == 0 else ():
            for parameter, value in zip(group["params"], slow, strict=True):
                parameter.copy_(value.lerp_(parameter, 0.5))


def looked_ahead(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.01))
    loader = DataLoader(images(), 8, shuffle=True)
    with protected(medic, directory, model=model, optimizer=optimizer, loader=loader) as run:
        for batch, classes in run.batches(steps=course.steps):
            with run.step() as step:
                loss = functional.cross_entropy(model(batch), classes)
                optimizer.zero_grad()
                loss.backward()
                rates = rates_of(optimizer.optimizer)
                optimizer.step()
                course.note(step, loss, rates)


class Dampened:
    """A warmup around a schedule, as a package has it: it keeps the schedule's rates, and sets smaller ones."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.optimizer, self.steps, self.count = optimizer, steps, 0
        self.rates = rates_of(optimizer)
        self._dampen()

    def _dampen(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= min(1.0, self.count / self.steps)

    @contextmanager
    def dampening(self) -> Iterator[None]:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        yield
        self.rates = rates_of(self.optimizer)
        self._dampen()

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def dampened(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 200)
    warmup = Dampened(optimizer, 20)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "also": {"warmup": warmup}}
    loader = DataLoader(images(), 8, shuffle=True)
    with protected(medic, directory, loader=loader, **parts) as run:
        for batch, classes in run.batches(steps=course.steps):
            with run.step() as step:
                loss = functional.cross_entropy(model(batch), classes)
                optimizer.zero_grad()
                loss.backward()
                rates = rates_of(optimizer)
                optimizer.step()
                with warmup.dampening():
                    scheduler.step()
                course.note(step, loss, rates)


class Both:
    """Two optimizers as one, in no class of PyTorch's: one for matrices, one for the rest."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"each": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, held in zip(self.optimizers, state["each"], strict=True):
            optimizer.load_state_dict(held)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class InverseRoot:
    """A schedule of updates, as fairseq and Megatron-LM have them: it sets the rate when it is made and when it is
    loaded, too."""

    def __init__(self, optimizer: Any, warmup: int = 10) -> None:
        self.optimizer, self.warmup = optimizer, warmup
        self.step_update(0)

    def step_update(self, count: int) -> None:
        self.count = count
        share = min((count + 1) / self.warmup, (self.warmup / (count + 1)) ** 0.5)
        for group in self.optimizer.param_groups:
            group["lr"] = group["largest"] * share

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_update(state["count"])


def updated(medic: trainmedic.Medic, directory: Path, course: Course) -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4))
    matrices = [{"params": [model[0].weight, model[2].weight], "largest": 0.05}]
    optimizer = Both(
        torch.optim.SGD(matrices, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
        torch.optim.AdamW([{"params": [model[0].bias, model[2].bias], "largest": 0.01}], lr=0.01, fused=True),
    )
    schedule = InverseRoot(optimizer)
    loader = DataLoader(images(), 8, shuffle=True)
    with protected(medic, directory, model=model, optimizer=optimizer, scheduler=schedule, loader=loader) as run:
        for batch, classes in run.batches(steps=course.steps):
            with run.step() as step:
                loss = functional.cross_entropy(model(batch), classes)
                optimizer.zero_grad()
                loss.backward()
                rates = rates_of(optimizer)
                optimizer.step()
                schedule.step_update(step.number)
                course.note(step, loss, rates)


LOOPS: tuple[Callable[[trainmedic.Medic, Path, Course], None], ...] = (
    adversarial,
    unknown_schedulers,
    self_distilled,
    detector,
    sharpened,
    compiled,
    streamed,
    second_order,
    policy_gradient,
    layered,
    half_scaled,
    schedule_free,
    looked_ahead,
    dampened,
    updated,
)
