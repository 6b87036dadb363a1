"""Plain computations: the ranks' inputs, and what every collective must make of them.

No process group is used here: expected values don't depend on what is tested.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

FLOATS: list[torch.dtype] = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS: list[torch.dtype] = [torch.int8, torch.uint8, torch.int32, torch.int64]
COMPLEX: list[torch.dtype] = [torch.complex64, torch.complex128]
# Types that Gloo accepts in every collective. (Not int16, uint16 to uint64 or float8.)
DTYPES: list[torch.dtype] = [*FLOATS, *INTEGERS, torch.bool]

FLOAT_OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
INTEGER_OPS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def ops_of(dtype: torch.dtype) -> list[str]:
    """The reduce operations that make sense for a dtype and that Gloo accepts."""
    return FLOAT_OPS if dtype.is_floating_point else INTEGER_OPS


def name_of(dtype: torch.dtype) -> str:
    """`float32`, for the names of tests."""
    return str(dtype).removeprefix("torch.")


def fill(rank: int, dtype: torch.dtype = torch.float32, count: int = 7) -> torch.Tensor:
    """The input of `rank`: numbers from 1 to 3, so that sums and products of four ranks are exact
    in every dtype, bfloat16 and int8 included."""
    index = torch.arange(count)
    numbers = (7 * index + 5 * rank + index * rank) % 3 + 1
    if dtype == torch.bool:
        return numbers == 2
    if dtype.is_complex:
        return torch.complex(numbers.double(), torch.full((count,), -rank).double()).to(dtype)
    return numbers.to(dtype)


def reduce(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors reduced element by element, computed with Python's own numbers."""
    first = tensors[0]
    columns = zip(*(tensor.reshape(-1).tolist() for tensor in tensors), strict=True)
    combine = (_BOOL if first.dtype == torch.bool else _NUMBER)[op]
    values = [combine(column) for column in columns]
    return torch.tensor(values, dtype=first.dtype).reshape(first.shape)


def assert_same(
    came: torch.Tensor, expected: torch.Tensor, rounded: bool = False, note: object = ""
) -> None:
    """Fails unless the tensors are equal in dtype, shape and every value; `rounded` allows the
    rounding of one division in the dtype."""
    __tracebackhide__ = True
    assert came.dtype == expected.dtype, f"{note} dtype: expected {expected.dtype}, {came.dtype}"
    assert came.shape == expected.shape, f"{note} shape: expected {expected.shape}, {came.shape}"
    if rounded:
        torch.testing.assert_close(came, expected, msg=lambda text: f"{note} {text}")
    else:
        assert torch.equal(came, expected), f"{note} expected {expected}, came {came}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal to the last bit, NaN included."""
    return bool(
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(
            one.contiguous().reshape(-1).view(torch.uint8),
            other.contiguous().reshape(-1).view(torch.uint8),
        )
    )


def _over(operator: Callable[[Any, Any], Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda column: functools.reduce(operator, column)


_NUMBER: dict[str, Callable[[Sequence[Any]], Any]] = {
    "SUM": sum,
    "AVG": lambda column: sum(column) / len(column),
    "PRODUCT": math.prod,
    "MIN": min,
    "MAX": max,
    "BAND": _over(lambda one, other: one & other),
    "BOR": _over(lambda one, other: one | other),
    "BXOR": _over(lambda one, other: one ^ other),
}
# A sum or a maximum of truth values is "any", a product or a minimum is "all".
_BOOL: dict[str, Callable[[Sequence[bool]], bool]] = {
    "SUM": any,
    "PRODUCT": all,
    "MIN": all,
    "MAX": any,
    "BAND": all,
    "BOR": any,
    "BXOR": _over(lambda one, other: one != other),
}
