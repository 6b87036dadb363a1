"""The command line ``gflow``, one file per command.

``parser`` puts it together. ``doctor`` runs ``checks``, some of which start ranks that run
``selftest``; ``bench`` runs the benchmarks of ``gflow.bench``. torch is imported only where it is
used: ``--help`` has to answer at once, and also where torch is broken.
"""
