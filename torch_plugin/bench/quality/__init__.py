"""``gflow bench quality``: what training ends with, by how much of the gradients is sent.

``options`` is its command line. ``training`` trains the networks of the ``tasks`` on their
``datasets`` in several ``variants``; ``report`` prints and plots.
"""

from gflow.bench.benchmark import Benchmark
from gflow.bench.quality import options, report, training

BENCHMARK = Benchmark(
    name="quality",
    summary="what training ends with when gflow sends all of the gradients, and when it sends a "
    "part",
    label=str,  # a variant's name is its label
    layout=options.LAYOUT,
    add_options=options.add_options,
    apply_defaults=options.apply_defaults,
    prepare=options.prepare,
    measure=training.measure,
    expected_seconds=options.expected_seconds,
    time_limit=options.time_limit,
    progress=report.progress,
    report=report.tables,
    plot=report.plot,
    devices=("cpu",),
)
