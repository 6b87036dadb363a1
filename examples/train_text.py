"""Train a small GPT on the source text of Python's standard library, and let it write some.

It predicts text character by character, with AdamW and plain DistributedDataParallel:

    torchrun --standalone --nproc-per-node 2 examples/train_text.py

`--backend gloo` does the same without gflow.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gflow.models import CharacterGPT

CONTEXT = 64
ASCII = 128


def standard_library() -> Tensor:
    """The text as numbers of ASCII characters, the same on every rank."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return torch.tensor(list(text.encode("ascii", errors="ignore")))


def random_batch(text: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Pieces of the text, and the same pieces one character later."""
    starts = torch.randint(len(text) - CONTEXT, (size,))
    pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def sample(model: nn.Module, prompt: str, characters: int) -> str:
    """The prompt, and what the model writes after it."""
    model.eval()
    written = torch.tensor([list(prompt.encode("ascii"))])
    for _ in range(characters):
        scores = model(written[:, -CONTEXT:])[:, -1]
        # A temperature below 1 makes likely characters likelier, and the text easier to read.
        chances = torch.softmax(scores / 0.7, dim=-1)
        written = torch.cat([written, torch.multinomial(chances, 1)], dim=1)
    return bytes(written[0].tolist()).decode("ascii")


def main() -> None:
    """Train, and report on rank 0."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="gflow", help="gflow or gloo")
    parser.add_argument("--steps", type=int, default=300, help="how many")
    parser.add_argument("--batch", type=int, default=16, help="pieces of text per rank and step")
    parser.add_argument("--sample", type=int, default=300, help="characters to write at the end")
    args = parser.parse_args()

    dist.init_process_group(backend=args.backend)
    rank = dist.get_rank()
    text = standard_library()
    torch.manual_seed(0)
    gpt = CharacterGPT(vocabulary=ASCII, context=CONTEXT, width=128, layers=2, heads=4)
    model = DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    torch.manual_seed(rank)  # from here on each rank draws different pieces
    for step in range(1, args.steps + 1):
        inputs, targets = random_batch(text, args.batch)
        optimizer.zero_grad()
        scores = model(inputs)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 50 == 0 or step in (1, args.steps)):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    if rank == 0:
        print(f"\n{sample(gpt, 'def ', args.sample)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
