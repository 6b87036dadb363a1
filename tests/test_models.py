"""Tests the networks that benchmarks train: their sizes, and what they must not do."""

import subprocess
import sys

import pytest
import torch

from gflow import models


@pytest.mark.parametrize(
    ("name", "parameters", "inputs"),
    [
        ("AlexNet", 61_100_840, torch.zeros(1, 3, 64, 64)),
        ("ResNet50", 25_557_032, torch.zeros(1, 3, 64, 64)),
        ("DigitsCNN", 2_201_546, torch.zeros(2, 1, 8, 8)),
        ("CharacterGPT", 834_304, torch.zeros(1, 64, dtype=torch.long)),
        ("SmallViT", 102_858, torch.zeros(1, 1, 16, 16)),
    ],
)
def test_a_network_has_the_size_that_its_documentation_says(
    name: str, parameters: int, inputs: torch.Tensor
) -> None:
    network = getattr(models, name)()
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    network(inputs).sum().backward()
    # DDP would wait forever for a gradient that never comes.
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_benchmarks_know_the_sizes_of_their_networks() -> None:
    from gflow.bench.ddp.networks import NETWORKS
    from gflow.bench.quality.tasks import TASKS

    for network in NETWORKS.values():
        with torch.device("meta"):
            built = getattr(models, network.name)()
        assert sum(one.numel() for one in built.parameters()) == network.parameters
    for name, task in TASKS.items():
        if task.obstacle() is None:
            built = task.load().network()
            thousands = round(sum(one.numel() for one in built.parameters()) / 1000)
            assert f"({thousands} k parameters)" in task.summary, name


def test_a_character_is_predicted_from_what_came_before_it() -> None:
    torch.manual_seed(0)
    network = models.CharacterGPT(vocabulary=10, context=8, width=16, layers=2, heads=2)
    text = torch.randint(10, (1, 8))
    changed = text.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 10
    before, after = network(text), network(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_importing_gflow_and_its_commands_does_not_import_torch() -> None:
    source = "import sys, gflow, gflow.cli.parser; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", source], timeout=60, check=True)
