"""``gflow bench ddp``: how long a training step takes, by what exchanges the gradients.

``options`` is its command line, ``contenders`` train replicas of one of the ``networks``, ``race``
times them on the ranks, ``report`` prints and plots.
"""

from gflow.bench.benchmark import Benchmark
from gflow.bench.ddp import contenders, options, race, report

BENCHMARK = Benchmark(
    name="ddp",
    summary="a training step of DDP, by gflow, Gloo with and without compression, and without any "
    "communication, in turn",
    label=contenders.LABELS.__getitem__,
    layout=options.LAYOUT,
    add_options=options.add_options,
    apply_defaults=options.apply_defaults,
    prepare=options.prepare,
    measure=race.measure,
    expected_seconds=options.expected_seconds,
    time_limit=options.time_limit,
    progress=report.progress,
    report=report.tables,
    plot=report.plot,
)
