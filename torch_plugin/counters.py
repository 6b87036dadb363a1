"""What a process group has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from gflow import native
from gflow.backend import backend_of


@dataclass(frozen=True)
class BucketMetrics:
    """One gradient bucket of DDP, between hosts, as this rank sees it.

    Attributes:
        number: of the bucket, in the order in which DDP made them.
        steps: how often it was exchanged.
        gradient_bytes: bytes of gradient, in all steps together.
        carried_bytes: bytes of the part of it that this rank carries to other hosts.
        wire_bytes: bytes that this rank has sent to other hosts for it.
        density: fraction of its chunks that it sent in the last step; 1 while it is exact.
        residual_ratio: what stayed behind in the last step over the gradient of that step, as
            L1 norms of this rank. It settles at about 1 / density; if it keeps growing, the
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
class Metrics:
    """One process group as this rank sees it, and its counters since the group was made.

    Attributes:
        hosts: hosts of the group; ranks that could not share memory count as hosts of their own.
        ranks_here: ranks of the group on this host, this one included.
        gradient_buckets: all-reduces of DDP's gradient buckets.
        gradient_bytes: bytes of gradient in them.
        exact_tensors: tensors of all other collectives on CPU, which are always exact; what is
            sent from one rank to another is not counted.
        exact_bytes: bytes in those.
        collectives: how many collectives of each kind were done.
        compresses: whether gradients are compressed between hosts, now or after the warm-up.
        carried_bytes: bytes of gradient that this rank has carried to other hosts. Only counted
            where ``compresses``, like all that follows but the last two.
        wire_bytes: bytes that it has sent for that.
        buckets: the same and more for each bucket that DDP has now.
        stage_seconds: time of each stage, all buckets together. ``agree`` and ``norms`` are
            mostly waiting for other ranks, ``wait`` is waiting for the network; ``wire`` is the
            time that the network is busy, beside the others.
        hidden_seconds: time in which gradients were on their way during a backward pass.
        exposed_seconds: time in which the job waited for them after a backward pass.
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

    @property
    def ratio(self) -> float:
        """How many times more bytes an exact exchange would have sent; 1 if nothing was sent."""
        exact = self.carried_bytes * 2 * (self.hosts - 1) / self.hosts
        return exact / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def density(self) -> float:
        """Fraction of all gradients that was sent in the last step, by their size."""
        sizes = {bucket: bucket.gradient_bytes / max(bucket.steps, 1) for bucket in self.buckets}
        sent = sum(size * bucket.density for bucket, size in sizes.items())
        return sent / sum(sizes.values()) if sizes else 1.0


def metrics(group: dist.ProcessGroup | None = None) -> Metrics:
    """Return the counters of ``group``, by default of the whole world's group.

    It costs some microseconds and may be called at any time.

    Example:
        >>> import gflow
        >>> gflow.metrics().gradient_buckets  # doctest: +SKIP
        12
    """
    numbers = native.load().metrics(backend_of(group))
    buckets = [BucketMetrics(**bucket) for bucket in numbers.pop("buckets")]
    carried = sum(bucket.carried_bytes for bucket in buckets) + numbers.pop("other_carried_bytes")
    sent = sum(bucket.wire_bytes for bucket in buckets) + numbers.pop("other_wire_bytes")
    return Metrics(**numbers, buckets=buckets, carried_bytes=carried, wire_bytes=sent)
