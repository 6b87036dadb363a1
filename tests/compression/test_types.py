"""Tests that a method that cannot compress any gradient of a model is refused, and that parameters
that it leaves out are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.compression.jobs import Listener, PrescribedGradients
from tests.ranks import Team

TYPES = {
    "double": [torch.float64],
    "complex": [torch.complex64, torch.float64],
    "mixed": [torch.float32, torch.float64],
    "single": [torch.float32],
    "half": [torch.float16, torch.bfloat16],
}


class Typed(nn.Module):
    """A model with two parameters of each of some types."""

    def __init__(self, types: list[torch.dtype]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(7, dtype=dtype)) for dtype in types for _ in range(2)
        )


def wrap(rank: int, world: int, types: str, ddp_options: dict[str, Any]) -> tuple[str, list[str]]:
    """The error and the warnings of wrapping a model, after which the group must still work."""
    error = ""
    with Listener() as listener:
        try:
            DistributedDataParallel(Typed(TYPES[types]), **ddp_options)
        except ValueError as refused:
            error = str(refused)
    DistributedDataParallel(PrescribedGradients())
    assert gflow.metrics().hosts == world
    return error, [text for _, text in listener.heard]


@pytest.mark.parametrize("method", ["chunks", "fp16", "bf16", "int8", "ternary"])
@pytest.mark.parametrize("types", ["double", "complex"])
def test_a_method_that_fits_no_parameter_is_refused_with_those_that_do(
    compressing: Callable[..., Team], types: str, method: str
) -> None:
    for error, heard in compressing(2, method=method).run(wrap, types, {}):
        found = "complex64, float64" if types == "complex" else "float64"
        for words in (
            f"method={method!r}",
            f"all of its parameters are {found}",
            "float32, float16, bfloat16",
            "method='auto' or method='exact' or method='fp32'",
        ):
            assert words in error, error
        assert heard == []


def test_parameters_that_a_method_leaves_out_are_named_once(
    compressing: Callable[..., Team],
) -> None:
    (error, heard), *others = compressing(2, method="int3").run(wrap, "mixed", {})
    assert error == ""
    (text,) = heard
    for words in ("method='int3'", "weights.2, weights.3", "(float64)", "exactly"):
        assert words in text, text
    assert "weights.1" not in text
    assert others == [("", [])]


@pytest.mark.parametrize(
    ("types", "options"),
    [
        ("double", {"method": "auto"}),
        ("mixed", {"method": "auto"}),
        ("double", {"method": "exact"}),
        ("complex", {"method": "fp32"}),
        ("double", {"method": "int8", "compress": "off"}),
        ("single", {"method": "int8"}),
        ("half", {"method": "int8"}),
    ],
)
def test_where_nothing_was_chosen_that_does_not_fit_nothing_is_said(
    compressing: Callable[..., Team], types: str, options: dict[str, str]
) -> None:
    found = compressing("ab", **options).run(wrap, types, {"find_unused_parameters": True})
    assert found == [("", []), ("", [])]
