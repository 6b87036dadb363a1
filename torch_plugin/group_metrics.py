"""Counters of what a process group has done so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from gflow import native
from gflow.backend import backend_of


@dataclass(frozen=True)
class BucketMetrics:
    """One gradient bucket of DDP, between hosts, as this rank sees it.

    Example:
        >>> import gflow
        >>> bucket = gflow.BucketMetrics(0, 10, 4000, 4000, 400, density=0.1, residual_ratio=9.5)
        >>> bucket.wire_bytes / bucket.carried_bytes
        0.1

    Attributes:
        number: of the bucket, in the order in which DDP made them.
        steps: how often it was exchanged.
        gradient_bytes: bytes of gradient, over all steps.
        carried_bytes: the part of them that this rank carries to other hosts.
        wire_bytes: bytes that this rank has sent to other hosts for it.
        density: fraction of its chunks that it sent in the last step; 1 while it is exact.
        residual_ratio: what was not sent up to the last step over the gradient of that step, as
            L1 norms on this rank. It settles at about 1 / density; if it keeps growing, the
            density is too low for this training.
    """

    number: int
    steps: int
    gradient_bytes: int
    carried_bytes: int
    wire_bytes: int
    density: float
    residual_ratio: float


@dataclass(frozen=True)
class Certificate:
    """How close compressed gradients came to the exact ones, as an audit has found.

    Every ``audit_steps`` steps a part of one bucket is also summed exactly over the hosts, for a
    few steps in a row, and compared with what was delivered.

    Example:
        >>> import gflow
        >>> found = gflow.Certificate(3, 500, 8, "int3", 0.97, 0.26, 0.07, 0.99, 0.11)
        >>> found.method, found.noise
        ('int3', 0.07)

    Attributes:
        bucket: number of the bucket.
        step: its first step that was audited.
        steps: how many were.
        method: what it was sent as.
        cosine: between what was delivered and the exact sum, in one step.
        relative_error: length of the difference, relative to the exact sum.
        noise: its square: the variance that was added to the gradient. With noise q, training needs
            at most 1 + q times the steps.
        window_cosine: as ``cosine``, for the sum of all audited steps: what was missing in one step
            and came in the next is no error there.
        window_relative_error: likewise.
    """

    bucket: int
    step: int
    steps: int
    method: str
    cosine: float
    relative_error: float
    noise: float
    window_cosine: float
    window_relative_error: float


@dataclass(frozen=True)
class Metrics:
    """One process group as this rank sees it, and its counters since the group was made.

    Example:
        >>> import gflow
        >>> metrics = gflow.metrics()
        >>> metrics.hosts, metrics.ranks_here, metrics.compresses
        (1, 1, False)

    Attributes:
        hosts: hosts of the group; ranks that could not share memory count as hosts of their own.
        ranks_here: ranks of the group on this host, this one included.
        gradient_buckets: all-reduces of DDP's gradient buckets.
        gradient_bytes: bytes of gradient in them.
        exact_tensors: tensors of all other collectives on CPU, which are always exact; not of
            point-to-point calls.
        exact_bytes: bytes in those.
        collectives: how many collectives of each kind have completed.
        compresses: whether gradients are compressed between hosts, now or after the warm-up.
        carried_bytes: bytes of gradient that this rank has carried to other hosts. Like the
            fields below except the last four, only counted where ``compresses``.
        wire_bytes: bytes that it has sent for that.
        buckets: the counters of each bucket that DDP has now.
        stage_seconds: time of each stage, over all buckets. ``agree`` and ``norms`` are mostly
            spent waiting for other ranks, ``wait`` for the network; ``wire`` is the time that the
            network was busy, in parallel to the others.
        hidden_seconds: time of exchanges that ran during a backward pass.
        exposed_seconds: time that the job waited for exchanges after a backward pass.
        method: what gradients were sent as last, such as ``exact`` or ``int3``; empty before the
            first exchange.
        certificate: what the last audit found; ``None`` before the first.
    """

    hosts: int
    ranks_here: int
    gradient_buckets: int
    gradient_bytes: int
    exact_tensors: int
    exact_bytes: int
    collectives: dict[str, int]
    compresses: bool
    carried_bytes: int
    wire_bytes: int
    buckets: list[BucketMetrics]
    stage_seconds: dict[str, float]
    hidden_seconds: float
    exposed_seconds: float
    method: str
    certificate: Certificate | None

    @property
    def ratio(self) -> float:
        """How many times as many bytes an exact exchange would have sent; 1 if nothing was sent."""
        exact = self.carried_bytes * 2 * (self.hosts - 1) / self.hosts
        return exact / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def density(self) -> float:
        """Fraction of all gradients that was sent in the last step, weighted by size."""
        sizes = {bucket: bucket.gradient_bytes / max(bucket.steps, 1) for bucket in self.buckets}
        sent = sum(size * bucket.density for bucket, size in sizes.items())
        return sent / sum(sizes.values()) if sizes else 1.0


def metrics(group: dist.ProcessGroup | None = None) -> Metrics:
    """Return the counters of ``group``, by default of the default group.

    It takes microseconds and may be called at any time.

    Example:
        >>> import gflow
        >>> dist.all_reduce(torch.ones(4))
        >>> gflow.metrics().collectives["all_reduce"] > 0
        True
    """
    numbers: dict[str, Any] = dict(native.library.metrics(backend_of(group)))
    buckets = [BucketMetrics(**bucket) for bucket in numbers.pop("buckets")]
    carried = sum(bucket.carried_bytes for bucket in buckets) + numbers.pop("other_carried_bytes")
    sent = sum(bucket.wire_bytes for bucket in buckets) + numbers.pop("other_wire_bytes")
    certificates = [Certificate(**one) for one in numbers.pop("certificates")]
    numbers["certificate"] = certificates[0] if certificates else None
    return Metrics(**numbers, buckets=buckets, carried_bytes=carried, wire_bytes=sent)
