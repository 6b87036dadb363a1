"""A torch device whose memory, streams and events are those of the stand-in driver.

It is there so that what runs above the engine runs in tests as it would on a GPU: torch's autograd,
DDP, and gflow's own C++ half. Every operator is a kernel on a stream, on memory that the host
cannot touch, so a wait that is missing is a race, and a stray access a fault.

    device.load()                         # in the rank
    torch.ones(3, device="standin:0")
"""

from tests.gpu.device.loading import NAME, Standin, load

__all__ = ["NAME", "Standin", "load"]
