"""Sum one tensor over all ranks. Run: torchrun --nproc-per-node 2 examples/ten_lines.py"""

import torch
import torch.distributed as dist

dist.init_process_group(backend="gflow")
tensor = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {tensor.tolist()}")
dist.destroy_process_group()
