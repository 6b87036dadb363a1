"""Where the tensors of a rank are in a benchmark: in the memory of the host, or on a device of its
own."""

from __future__ import annotations

from dataclasses import dataclass

from gflow.commands.rank import Rank


@dataclass(frozen=True)
class Place:
    """A device as torch names it."""

    device: str

    @classmethod
    def of_rank(cls, rank: Rank, device_type: str) -> Place:
        """The rank's own device of that type; from now on also torch's current one."""
        if device_type == "cpu":
            return cls(device_type)
        import torch

        number = rank.number % torch.accelerator.device_count()
        torch.accelerator.set_device_index(number)
        return cls(f"{device_type}:{number}")

    @property
    def is_device(self) -> bool:
        """Whether there is anything to wait for."""
        return self.device != "cpu"

    def wait(self) -> None:
        """Wait until the device has done all that was asked of it, so that it can be timed."""
        if self.is_device:
            import torch

            torch.accelerator.synchronize()
