"""A torch device whose memory, streams and events are those of the stand-in driver.

It lets tests run everything above the engine as on a GPU: torch's autograd, DDP, and gflow's C++
shim. Every operator is a kernel on a stream, on memory that the host can't touch, so a missing wait
is a race and a stray access is a fault.

    device.load()                         # in the rank
    torch.ones(3, device="standin:0")
"""

from tests.gpu.device.loading import NAME, Standin, load

__all__ = ["NAME", "Standin", "load"]
