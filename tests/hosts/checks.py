"""The program that ranks run in test_hosts.py: many checks in one group. For each it reports what
was wrong, and a digest of all result bits.

A check must never stop halfway because a value is wrong: the other ranks would wait for its next
collective. Expected values never come from a process group.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests import plain
from tests.ddp.models import batch, loss_of, mean_gradients, perceptron
from tests.hosts.running import say

DTYPES: list[torch.dtype] = [*plain.FLOATS, *plain.INTEGERS]
SIZES = [0, 1, 3, 1000, 32769, 1_000_003]
# 25 MiB of float32: what DDP puts into a bucket.
BUCKET = 25 * 2**20 // 4
# Inputs repeat after this many elements, so that expected values are cheap to compute. A prime, so
# that a piece in the wrong place shows.
PERIOD = 10_007
TIMEOUT_S = 40.0


@dataclass(frozen=True)
class Finding:
    """The result of one call, and what it had to be."""

    label: str
    came: torch.Tensor
    expected: torch.Tensor
    # How far each value may be off; None: not at all.
    bound: torch.Tensor | None = None
    rounded: bool = False

    def problem(self) -> str | None:
        """The problem in one line."""
        try:
            if self.bound is None:
                plain.assert_same(self.came, self.expected, self.rounded, self.label)
            else:
                off = (self.came.double() - self.expected).abs()
                # Not `off > bound`, which is false for NaN.
                wrong = ~(off <= self.bound)
                assert not wrong.any(), (
                    f"{self.label}: {int(wrong.sum())} of {wrong.numel()} values are off, by up to "
                    f"{off.max().item()}, the first at {int(wrong.nonzero()[0])}"
                )
        except AssertionError as error:
            return f"{self.label}: {error}"[:2000]
        return None


Findings = Iterator[Finding]


def tiled(one: torch.Tensor, count: int) -> torch.Tensor:
    """`one`, repeated up to `count` elements."""
    return one.repeat(-(-count // one.numel()))[:count].clone()


@functools.cache
def _numbers(rank: int, dtype: torch.dtype) -> torch.Tensor:
    # From 1 to 3, so that sums and products of four ranks are exact in every dtype.
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 4, (PERIOD,), generator=generator).to(dtype)


@functools.cache
def _exact(op: str, dtype: torch.dtype, members: tuple[int, ...]) -> torch.Tensor:
    return plain.reduce(op, [_numbers(rank, dtype) for rank in members])


@functools.cache
def _rough(rank: int, dtype: torch.dtype) -> torch.Tensor:
    # The order in which such numbers are added shows in the last bits of their sum.
    generator = torch.Generator().manual_seed(1000 + rank)
    numbers = torch.randn(PERIOD, dtype=torch.float64, generator=generator)
    exponents = torch.randint(-3, 4, (PERIOD,), generator=generator)
    return (numbers * 2.0**exponents).to(dtype)


@functools.cache
def _rough_result(op: str, dtype: torch.dtype, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected result in double precision, and how far each value may be off."""
    columns = torch.stack([_rough(rank, dtype).double() for rank in range(world)])
    results = {
        "SUM": (columns.sum(0), columns.abs().sum(0)),
        "AVG": (columns.mean(0), columns.abs().mean(0)),
        "PRODUCT": (columns.prod(0), columns.abs().prod(0)),
    }
    expected, scale = results[op]
    limits = torch.finfo(dtype)
    return expected, (world + 1) * limits.eps * scale + limits.tiny


def members() -> tuple[int, ...]:
    return tuple(range(dist.get_world_size()))


def sizes_of(dtype: torch.dtype) -> list[int]:
    return [*SIZES, BUCKET] if dtype == torch.float32 else SIZES


def all_reduce(dtype: torch.dtype, op: str) -> Findings:
    for size in sizes_of(dtype):
        tensor = tiled(_numbers(dist.get_rank(), dtype), size)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        expected = tiled(_exact(op, dtype, members()), size)
        yield Finding(f"{size} elements", tensor, expected, rounded=op == "AVG")


def all_reduce_rough(dtype: torch.dtype, op: str) -> Findings:
    world = dist.get_world_size()
    for size in sizes_of(dtype):
        expected, bound = (tiled(one, size) for one in _rough_result(op, dtype, world))
        first = None
        for turn in range(3 if size < BUCKET else 2):
            tensor = tiled(_rough(dist.get_rank(), dtype), size)
            if turn == dist.get_rank():
                time.sleep(0.005)  # a different rank is last in each round
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            first = tensor if first is None else first
            yield Finding(f"{size} elements, turn {turn}", tensor, expected, bound)
            same = torch.tensor(plain.same_bits(first, tensor))
            yield Finding(f"{size} elements, turn {turn} as turn 0", same, torch.tensor(True))


def all_reduce_not_finite() -> Findings:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in plain.FLOATS:
        tensor = tiled(_numbers(rank, dtype), 1000)
        tensor[100 + rank] = float("inf")
        tensor[200 + rank] = float("-inf")
        tensor[300 + rank] = float("nan")
        tensor[400] = float("inf") if rank == 0 else float("-inf")
        dist.all_reduce(tensor)
        wide = tensor.double()
        right = bool(
            torch.all(wide[100 : 100 + world] == float("inf"))
            and torch.all(wide[200 : 200 + world] == float("-inf"))
            and torch.all(wide[300 : 300 + world].isnan())
            and wide[400].isnan()
            and int(wide.isfinite().sum()) == 1000 - 3 * world - 1
        )
        yield Finding(str(dtype), torch.tensor(right), torch.tensor(True))


def all_reduce_of_a_part() -> Findings:
    rank = dist.get_rank()
    for offset, size in [(1, 5), (3, 32769), (7, 300_001)]:
        whole = torch.full((size + offset + 5,), -7.0)
        part = whole[offset : offset + size]
        part.copy_(tiled(_numbers(rank, torch.float32), size))
        dist.all_reduce(part)
        expected = torch.full_like(whole, -7.0)
        expected[offset : offset + size] = tiled(_exact("SUM", torch.float32, members()), size)
        yield Finding(f"{size} elements from {offset}", whole, expected)
    square = tiled(_numbers(rank, torch.float32), 300 * 200).reshape(300, 200)
    turned = square.t()
    dist.all_reduce(turned)
    expected = tiled(_exact("SUM", torch.float32, members()), 300 * 200).reshape(300, 200)
    yield Finding("transposed", square, expected)


def all_reduce_in_bucket_memory() -> Findings:
    rank = dist.get_rank()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for size in (1, 1000, 1_000_003, BUCKET):
        if backend.supports_tensor_alloc(torch.device("cpu")):
            bucket = backend.allocate_tensor(size, dtype=torch.float32, device=torch.device("cpu"))
        else:  # Gloo has none
            bucket = torch.empty(size)
        for turn in range(3):
            bucket.copy_(tiled(_numbers(rank + turn, torch.float32), size))
            dist.all_reduce(bucket)
            shifted = tuple(member + turn for member in members())
            expected = tiled(_exact("SUM", torch.float32, shifted), size)
            yield Finding(f"{size} elements, turn {turn}", bucket.clone(), expected)


def broadcast(root: int) -> Findings:
    for dtype in (torch.float32, torch.uint8, torch.int64, torch.bfloat16, torch.bool):
        for size in [*SIZES, BUCKET] if dtype == torch.float32 else SIZES:
            tensor = tiled(_numbers(dist.get_rank(), dtype), size)
            dist.broadcast(tensor, root)
            yield Finding(f"{dtype}, {size}", tensor, tiled(_numbers(root, dtype), size))


def all_gather() -> Findings:
    for dtype in (torch.float32, torch.int64, torch.uint8):
        for size in SIZES:
            own = tiled(_numbers(dist.get_rank(), dtype), size)
            outputs = [torch.empty_like(own) for _ in members()]
            dist.all_gather(outputs, own)
            for rank, output in enumerate(outputs):
                expected = tiled(_numbers(rank, dtype), size)
                yield Finding(f"{dtype}, {size}, of rank {rank}", output, expected)


def all_gather_into_tensor() -> Findings:
    for dtype in (torch.float32, torch.int64, torch.uint8):
        for size in SIZES:
            own = tiled(_numbers(dist.get_rank(), dtype), size)
            output = torch.empty(size * dist.get_world_size(), dtype=dtype)
            dist.all_gather_into_tensor(output, own)
            expected = torch.cat([tiled(_numbers(rank, dtype), size) for rank in members()])
            yield Finding(f"{dtype}, {size}", output, expected)


def barrier() -> Findings:
    store = dist.distributed_c10d._get_default_store()
    world = dist.get_world_size()
    for turn in range(2 * world):
        if turn % world == dist.get_rank():
            time.sleep(0.05)
        store.set(f"barrier {turn} {dist.get_rank()}", "here")
        dist.barrier()
        keys = [f"barrier {turn} {rank}" for rank in members()]
        yield Finding(f"turn {turn}", torch.tensor(store.check(keys)), torch.tensor(True))


def in_flight() -> Findings:
    """Starts fifty calls of all kinds, then waits for them in a different order."""
    rank, float32 = dist.get_rank(), torch.float32
    begun = []
    for number in range(50):
        size = [1, 1000, 32769, 300_001][number % 4]
        own = tiled(_numbers(rank, float32), size)
        if number % 5 == 3:
            root = number % dist.get_world_size()
            work = dist.broadcast(own, root, async_op=True)
            begun.append((number, work, own, tiled(_numbers(root, float32), size)))
        elif number % 5 == 4:
            output = torch.empty(size * dist.get_world_size())
            work = dist.all_gather_into_tensor(output, own, async_op=True)
            expected = torch.cat([tiled(_numbers(peer, float32), size) for peer in members()])
            begun.append((number, work, output, expected))
        else:
            work = dist.all_reduce(own, async_op=True)
            begun.append((number, work, own, tiled(_exact("SUM", float32, members()), size)))
    barrier = dist.barrier(async_op=True)
    for number, work, came, expected in reversed(begun):
        work.wait()
        yield Finding(f"call {number}", came, expected)
    barrier.wait()


def parts_of_the_world() -> Findings:
    """Groups of the first and last rank, of all but the first, and of every second rank."""
    everybody = list(members())
    for part in (sorted({0, everybody[-1]}), everybody[1:], everybody[::2]):
        group = dist.new_group(part)
        expected_members = tuple(sorted(part))
        for size in (1, 32769, 1_000_003):
            tensor = tiled(_numbers(dist.get_rank(), torch.float32), size)
            # Non-members do nothing, and report what the members must get.
            expected = tiled(_exact("SUM", torch.float32, expected_members), size)
            if dist.get_rank() in part:
                dist.all_reduce(tensor, group=group)
            else:
                tensor = expected.clone()
            yield Finding(f"ranks {part}, {size} elements", tensor, expected)
        if dist.get_rank() in part:
            dist.destroy_process_group(group)


def ddp(bucket_cap_mb: float | None, as_view: bool) -> Findings:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = perceptron()
    options = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_view, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(wrapped, batch(rank, step)).backward()
        means = mean_gradients(model, lambda peer, step=step: [batch(peer, step)], world)
        for number, (parameter, mean) in enumerate(zip(model.parameters(), means, strict=True)):
            label = f"step {step}, parameter {number}"
            yield Finding(label, parameter.grad.clone(), mean.float(), rounded=True)
        optimizer.step()


CHECKS: dict[str, Callable[[], Findings]] = {
    **{
        f"all_reduce {plain.name_of(dtype)} {op}": functools.partial(all_reduce, dtype, op)
        for dtype in DTYPES
        for op in ["SUM", "AVG", "MIN", "MAX", "PRODUCT"]
        if op != "AVG" or dtype.is_floating_point
    },
    **{
        f"rough {plain.name_of(dtype)} {op}": functools.partial(all_reduce_rough, dtype, op)
        for dtype in plain.FLOATS
        for op in ["SUM", "AVG", "PRODUCT"]
    },
    "all_reduce of what is not finite": all_reduce_not_finite,
    "all_reduce of a part of a tensor": all_reduce_of_a_part,
    "all_reduce in bucket memory": all_reduce_in_bucket_memory,
    **{f"broadcast from rank {root}": functools.partial(broadcast, root) for root in range(4)},
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor,
    "barrier": barrier,
    "calls in flight": in_flight,
    "parts of the world": parts_of_the_world,
    "ddp": functools.partial(ddp, None, False),
    "ddp with many buckets": functools.partial(ddp, 0.0002, False),
    "ddp with bucket views": functools.partial(ddp, 0.0002, True),
}
# For layouts that need only a few checks.
FEW = [
    "all_reduce float32 SUM",
    "all_reduce int64 MAX",
    "rough float32 AVG",
    "broadcast from rank 1",
    "all_gather_into_tensor",
    "barrier",
    "calls in flight",
    "ddp with many buckets",
]
ROUGH = [name for name in CHECKS if name.startswith("rough")]


def run(name: str) -> None:
    """Runs one check and reports the result."""
    began = time.monotonic()
    problems = []
    digest = hashlib.sha256()
    try:
        for finding in CHECKS[name]():
            problem = finding.problem()
            if problem:
                problems.append(problem)
            bits = finding.came.contiguous().reshape(-1).view(torch.uint8)
            digest.update(bits.numpy().data)
    except RuntimeError as error:
        problems.append(f"raised {type(error).__name__}: {error}")
    say(
        check=name,
        problems=problems,
        digest=digest.hexdigest(),
        seconds=round(time.monotonic() - began, 3),
    )


def interface_bytes() -> dict[str, int]:
    """The bytes that each network interface of this host has sent so far."""
    sent = {}
    with open("/proc/self/net/dev") as table:
        for line in table.readlines()[2:]:
            name, numbers = line.split(":")
            sent[name.strip()] = int(numbers.split()[8])
    return sent


def traffic() -> None:
    """Reports how much this host sends for one all_reduce of a bucket."""
    rank = dist.get_rank()
    tensor = tiled(_numbers(rank, torch.float32), BUCKET)
    dist.all_reduce(tensor)
    dist.barrier()
    before = interface_bytes()
    dist.barrier()
    dist.all_reduce(tensor)
    dist.barrier()
    after = interface_bytes()
    say(sent={name: after[name] - before[name] for name in after}, tensor=tensor.nbytes)
    dist.barrier()


def main() -> None:
    """Runs the checks named in the arguments."""
    torch.set_num_threads(1)
    dist.init_process_group(os.environ["BACKEND"], timeout=timedelta(seconds=TIMEOUT_S))
    for name in sys.argv[1:]:
        if name == "traffic":
            traffic()
        else:
            run(name)
    dist.destroy_process_group()
    say(done=True, sent_in_all=interface_bytes())


if __name__ == "__main__":
    main()
