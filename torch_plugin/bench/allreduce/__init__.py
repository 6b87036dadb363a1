"""``gflow bench allreduce``: the sum of one tensor over all ranks, in several sizes.

``options`` is its command line, ``contenders`` are what it compares (MPI in ``mpi``, the limits of
memory and links in ``limits``), ``race`` times them on the ranks, ``report`` prints and plots.
"""

from gflow.bench.allreduce import contenders, options, race, report
from gflow.bench.benchmark import Benchmark

BENCHMARK = Benchmark(
    name="allreduce",
    summary="the sum of one tensor over all ranks, by gflow, Gloo, MPI and at the limit, in turn",
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
