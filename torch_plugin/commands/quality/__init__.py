"""``gflow bench quality``: what training ends with, by how much of the gradients is sent.

``options`` is what can be asked for. ``trainings`` trains the networks of the ``tasks``, which are
``digits`` and ``text``, in several ``variants``; ``report`` and ``picture`` show it.
"""

from gflow.commands.quality import options, picture, report, trainings

__all__ = ["options", "picture", "report", "trainings"]
