"""A program of reinforcement learning in the shape of those on Ray: another process samples, from weights of its own.

The process stands for an actor. The trainer sends it the weights every few steps, asks it for samples, and trains on
what it gets. `Engine` is what the trainer gives `trainmedic.torch.attach` in ``also``.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import trainmedic
import trainmedic.torch

ACTIONS, FEATURES, SENT_EVERY = 5, 3, 4

Orders = Any
"""A `Connection`, or an actor's handle: ``send`` an order, ``recv`` what it returns."""


def make_policy() -> torch.nn.Linear:
    torch.manual_seed(2)
    return torch.nn.Linear(FEATURES, ACTIONS)


def sample(policy: torch.nn.Linear, prompts: torch.Tensor, seed: int) -> torch.Tensor:
    odds = policy(prompts).softmax(-1).detach()
    return torch.multinomial(odds, 1, generator=torch.Generator().manual_seed(seed)).squeeze(1)


def digest_of(policy: torch.nn.Linear) -> str:
    return hashlib.sha256(
        repr({name: each.tolist() for name, each in policy.state_dict().items()}).encode()
    ).hexdigest()


def serve(connection: Connection) -> None:
    """Sample for whoever has the other end, until it closes that."""
    torch.set_num_threads(1)
    policy = make_policy()
    while True:
        try:
            order, *content = connection.recv()
        except EOFError:
            return
        if order == "load":
            policy.load_state_dict({name: torch.tensor(values) for name, values in content[0].items()})
            connection.send(None)
        elif order == "digest":
            connection.send(digest_of(policy))
        else:
            connection.send(sample(policy, torch.tensor(content[0]), content[1]).tolist())


class Engine:
    """The trainer's side. Its state is the weights that the process has."""

    def __init__(self, connection: Orders) -> None:
        self._connection = connection
        self._weights: dict[str, Any] = {}

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = {name: values.tolist() for name, values in weights.items()}
        self._ask("load", self._weights)

    def sample(self, prompts: torch.Tensor, seed: int) -> torch.Tensor:
        return torch.tensor(self._ask("sample", prompts.tolist(), seed))

    def digest(self) -> str:
        """Of the weights that the process samples from."""
        found: str = self._ask("digest")
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._weights = state["weights"]
        if self._weights:
            self._ask("load", self._weights)

    def _ask(self, *order: Any) -> Any:
        self._connection.send(order)
        return self._connection.recv()


@contextmanager
def engine_process() -> Iterator[Engine]:
    """An engine in a process of its own, which ends with the context."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Engine(ours)
    finally:
        ours.close()
        process.join(60)


Story = list[tuple[int, str, list[int], float]]
"""Of each step its number, the digest of the engine's weights, the actions that it has sampled, and the loss."""


def train(
    medic: trainmedic.Medic,
    engine: Engine,
    directory: Path,
    steps: int,
    each: Callable[[int, torch.nn.Linear], None],
    names_engine: bool = True,
) -> Story:
    """Train for so many updates more than were undone. ``each`` is called when a step's loss is known."""
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    prompts = torch.randn(64, FEATURES, generator=torch.Generator().manual_seed(3))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(prompts), batch_size=8, shuffle=True)
    story: Story = []
    run = trainmedic.torch.attach(
        medic,
        model=policy,
        optimizer=optimizer,
        loader=loader,
        checkpoints=directory,
        checkpoint_every=5,
        seed=4,
        also={"engine": engine} if names_engine else None,
    )
    with run:
        for (batch,) in run.batches():
            with run.step() as step:
                number = run.global_step
                if number % SENT_EVERY == 0:
                    engine.load(policy.state_dict())
                sampled_from, actions = engine.digest(), engine.sample(batch, number)
                reward = (actions == 1).float() - 0.2
                chosen = torch.distributions.Categorical(logits=policy(batch)).log_prob(actions)  # type: ignore[no-untyped-call]
                loss = -(chosen * reward).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step.report(loss=loss)
            story.append((number, sampled_from, actions.tolist(), loss.item()))
            each(number, policy)
            if number + 1 >= steps:
                break
    return story
