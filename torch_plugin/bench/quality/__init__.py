"""``gflow bench quality``: what training ends with, by what the gradients are sent as.

``command`` is its command line. ``training`` trains the networks of the ``tasks`` on their
``datasets``, one of the ``runs`` after the other; ``report`` prints and plots what they ended with.
"""

from gflow.bench.quality.command import add_to

__all__ = ["add_to"]
