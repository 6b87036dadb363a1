"""The commands of ``gflow``, one small file per noun.

``line`` puts the command line together. ``doctor`` runs ``checks``; ``bench`` runs benchmarks:
``allreduce``, a ``race`` in which ``contenders`` compete, and ``ddp`` and ``quality``, which are
folders of their own. ``ranks`` starts processes, if need be on several ``hosts``, and ``rank`` is
what runs inside of them.

Nothing here may be needed by a training job: the backend must never import this package.
"""
