"""How much processor time other programs use meanwhile, which limits how far times can be trusted.

The ranks are children of this process, so they do not count as other programs.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

#: Above this share, other programs may decide which method looks faster.
QUIET_SHARE = 0.1


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds of processor time so far: of the whole machine, and of this process and its ranks."""

    machine: float
    own: float
    clock: float

    @classmethod
    def now(cls) -> ProcessorTime:
        """Read the kernel's counters."""
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
        # Time that the hypervisor takes (steal) hurts as much as another program.
        busy = user + nice + system + irq + softirq + steal
        return cls(busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]), time.monotonic())

    def share_of_others_since(self, before: ProcessorTime) -> float:
        """The share of all processor time since ``before`` that other programs used."""
        others = (self.machine - before.machine) - (self.own - before.own)
        return max(0.0, others / ((self.clock - before.clock) * (os.cpu_count() or 1)))
