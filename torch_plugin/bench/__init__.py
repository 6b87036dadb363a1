"""The benchmarks of ``gflow bench``, one folder each: ``allreduce``, ``ddp`` and ``quality``.

What they share is here. A benchmark is a :class:`~gflow.bench.benchmark.Benchmark`; ``arguments``
and ``units`` read its command line, ``turns`` lets contenders alternate so that noise hits all of
them, ``groups`` and ``machine`` say what was measured on, ``table`` prints.

A training job needs none of this: the backend never imports this package.
"""
