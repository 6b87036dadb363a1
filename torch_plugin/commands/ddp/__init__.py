"""``gflow bench ddp``: how long a training step takes, by whom the gradients are exchanged.

``options`` is what can be asked for, ``contenders`` train replicas of one of the ``networks``,
``race`` lets them take turns, ``report`` and ``picture`` show it.
"""

from gflow.commands.ddp import contenders, options, picture, race, report

__all__ = ["contenders", "options", "picture", "race", "report"]
