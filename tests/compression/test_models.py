"""Tests that models do not disturb each other, and that a model's state is freed with it."""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import (
    SIZES,
    PrescribedGradients,
    gradients,
    kept,
    same_bits,
    take_gradients,
)
from tests.ranks import Team

STEPS = 10


def train_alone(rank: int, world: int, seed: int) -> list[list[torch.Tensor]]:
    model = DistributedDataParallel(PrescribedGradients())
    delivered = []
    for step in range(STEPS):
        model(gradients(rank, seed + step)).backward()
        delivered.append(take_gradients(model))
    return delivered


def train_in_turns(rank: int, world: int, together: bool) -> Any:
    """Two identical models with different gradients."""
    models = [DistributedDataParallel(PrescribedGradients()) for _ in range(2)]
    delivered: list[list[list[torch.Tensor]]] = [[], []]
    for step in range(STEPS):
        losses = [model(gradients(rank, 500 * i + step)) for i, model in enumerate(models)]
        if together:
            sum(losses).backward()
        else:
            for loss in losses[:: 1 if step % 2 else -1]:
                loss.backward()
        for i, model in enumerate(models):
            delivered[i].append(take_gradients(model))
    return delivered, gflow.state_dict(models=models)


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 24], ids=["one_by_one", "fused"])
@pytest.mark.parametrize("together", [False, True], ids=["one_by_one_pass", "in_one_pass"])
def test_models_that_are_alike_do_not_mix(
    compressing: Callable[..., Team], together: bool, fusion_bytes: int
) -> None:
    team = compressing(2, fusion_bytes=fusion_bytes)
    both = team.run(train_in_turns, together)
    for index in range(2):
        states = [state for _, state in both]
        left = kept(states, model=index)
        total = [torch.zeros(numel, dtype=torch.float64) for numel in SIZES]
        for step in range(STEPS):
            for rank in range(2):
                for sum_, one in zip(total, gradients(rank, 500 * index + step), strict=True):
                    sum_ += one.double() / 2
        for number, expected in enumerate(total):
            delivered = sum(step[number].double() for step in both[0][0][index])
            missing = delivered + left[f"weights.{number}"] - expected
            assert missing.abs().max() <= 2e-6 * expected.abs().max()
    if not together and not fusion_bytes:
        for index in range(2):
            (alone, _) = team.run(train_alone, 500 * index)
            assert same_bits(alone, both[0][0][index])


def twins(rank: int, world: int) -> list[str]:
    models = [DistributedDataParallel(PrescribedGradients()) for _ in range(2)]
    for step in range(5):
        for index, model in enumerate(models):
            model.zero_grad()
            model(gradients(rank, step + 100 * index)).backward()
    said = []
    try:
        gflow.state_dict()
    except RuntimeError as error:
        said.append(str(error))
    saved = gflow.state_dict(models=models)
    try:
        gflow.load_state_dict(saved)
    except RuntimeError as error:
        said.append(str(error))
    gflow.load_state_dict(saved, models=models)
    assert same_bits(saved, gflow.state_dict(models=models))
    first, second = ([b["residual"] for b in model["buckets"]] for model in saved["models"])
    assert not same_bits(first, second)
    # A new program makes them again, untrained.
    new = [DistributedDataParallel(PrescribedGradients()) for _ in range(2)]
    gflow.load_state_dict(saved, models=new)
    assert same_bits(saved["models"], gflow.state_dict(models=new)["models"])
    return said


def test_states_of_models_that_are_alike_must_be_told_apart(
    compressing: Callable[..., Team],
) -> None:
    for said in compressing(2).run(twins):
        assert len(said) == 2
        assert all("give models=[...]" in text for text in said)


class Net(nn.Module):
    def __init__(self, sizes: list[int], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        pairs = itertools.pairwise(sizes)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairs))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def adversaries(rank: int, world: int) -> dict[str, Any]:
    """A generator and a discriminator, trained alternately as in a GAN."""
    generator = DistributedDataParallel(Net([8, 40, 10], 1))
    critic = DistributedDataParallel(Net([10, 50, 1], 2))
    for_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    for_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    for step in range(12):
        noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        for_critic.zero_grad()
        with torch.no_grad():
            fake = generator(noise)
        (critic(fake).mean() - critic(fake + 1).mean()).backward()
        for_critic.step()
        for_generator.zero_grad()
        # Goes through the critic too, whose gradients are exchanged but not used.
        (-critic(generator(noise)).mean()).backward()
        for_generator.step()
    state = gflow.state_dict()
    weights = [p.detach() for model in (generator, critic) for p in model.parameters()]
    return {"weights": weights, "models": len(state["models"]), "state": state}


def test_a_gan_trains_the_same_on_all_ranks(compressing: Callable[..., Team]) -> None:
    team = compressing(2)
    first, second = team.run(adversaries)
    assert same_bits(first["weights"], second["weights"])
    assert first["models"] == 2
    again, _ = team.run(adversaries)
    assert same_bits(first, again)


def wrapped_again(rank: int, world: int) -> list[list[int]]:
    plain = PrescribedGradients()
    counts = []
    for _ in range(2):
        model = DistributedDataParallel(plain)
        counts.append([])
        for step in range(6):
            model(gradients(rank, step)).backward()
            counts[-1].append(sum(int(g.count_nonzero()) for g in take_gradients(plain)))
        del model
        gc.collect()
    return counts


def test_a_model_that_is_wrapped_again_starts_anew(compressing: Callable[..., Team]) -> None:
    for first, second in compressing(2).run(wrapped_again):
        assert first[:3] == second[:3] == [sum(SIZES)] * 3
        # Short chunks differ in what they hold, so not to the element.
        assert all(0 < count <= 9 * 64 for count in first[3:] + second[3:])


def made_and_gone(rank: int, world: int) -> tuple[list[int], list[int], int]:
    """Trains several models in sequence: how many the engine knows, and the memory in use."""
    buckets, memory = [], []
    for _ in range(8):
        model = DistributedDataParallel(PrescribedGradients((4_000_000,)))
        for step in range(5):
            model.zero_grad()
            model([torch.full((4_000_000,), 1.0 + step)]).backward()
        buckets.append(len(gflow.metrics().buckets))
        # Freed blocks that the C library still holds do not count.
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as file:
            memory.append(int(file.read().split()[1]) * 4096)
        del model
        gc.collect()
    # The next call frees the last one.
    torch.distributed.all_reduce(torch.ones(1))
    return buckets, memory, len(gflow.metrics().buckets)


def test_what_is_kept_of_models_that_are_gone_is_let_go(compressing: Callable[..., Team]) -> None:
    for buckets, memory, at_the_end in compressing(2, chunk=4096).run(made_and_gone):
        assert buckets == [1] * 8
        assert at_the_end == 0
        # A residual is 16 MB: if they stayed, four of them would show.
        assert memory[7] - memory[3] < 48e6
