"""Stop a training and resume it later, bit-identical to one that was never stopped.

Besides model and optimizer there is gflow's own state: what it has not sent yet, and its step. It
differs from rank to rank, so every rank saves and loads its own file.

    torchrun --standalone --nproc-per-node 2 examples/checkpoint_and_resume.py --steps 20
    torchrun --standalone --nproc-per-node 2 examples/checkpoint_and_resume.py --steps 40

The second continues where the first has stopped. To see that nothing is lost, without torchrun:

    python examples/checkpoint_and_resume.py --check

trains 40 steps at once, then 20, stops, and 20 more in new processes, and compares the results.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_digits import batches, build_model, load_digits

import gflow

RANKS = 2


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save everything that the next process needs."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    if rank == 0:  # the same on every rank
        training = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(training, folder / "training.pt")
    if dist.get_backend() == "gflow":
        torch.save({"step": step, "gflow": gflow.state_dict()}, folder / f"gflow_rank{rank}.pt")
    dist.barrier()  # after it, the files of all ranks exist


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what was saved, if anything was; returns the step to continue from."""
    if not (folder / "training.pt").exists():
        return 0
    training = torch.load(folder / "training.pt")
    model.load_state_dict(training["model"])
    optimizer.load_state_dict(training["optimizer"])
    if dist.get_backend() == "gflow":
        own = torch.load(folder / f"gflow_rank{dist.get_rank()}.pt")
        if own["step"] != training["step"]:
            raise SystemExit(f"{folder}: its files are of different steps; take an older folder")
        gflow.load_state_dict(own["gflow"])
    return training["step"]


def train(args: argparse.Namespace) -> None:
    """Train up to step `args.steps`, from the checkpoint in the folder."""
    options = None
    if args.backend == "gflow":
        # One host alone would be exact and keep nothing: "on" treats each rank as a host. The rest
        # starts compression early, because this training is short.
        options = gflow.Options(compress="on", warmup_steps=5, ramp_steps=5, chunk=1024)
    dist.init_process_group(args.backend, pg_options=options)

    torch.manual_seed(0)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    done = load(args.folder, model.module, optimizer)

    # The data also has to continue where it was: skip the batches that were seen already.
    data = itertools.islice(batches(load_digits()[0], size=32), done, args.steps)
    for step, (images, labels) in enumerate(data, start=done + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps:
            save(args.folder, step, model.module, optimizer)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.6f}, saved", flush=True)
    dist.destroy_process_group()


def check(args: argparse.Namespace) -> int:
    """Train at once and in two halves, and compare; returns the exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        at_once, in_halves = Path(scratch) / "at_once", Path(scratch) / "in_halves"
        for folder, steps in (
            (at_once, args.steps),
            (in_halves, args.steps // 2),
            (in_halves, args.steps),
        ):
            print(f"{folder.name.replace('_', ' ')}, up to step {steps}:", flush=True)
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(RANKS), __file__, "--backend", args.backend),
                *("--steps", str(steps), "--folder", str(folder)),
            ]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        one = torch.load(at_once / "training.pt")["model"]
        other = torch.load(in_halves / "training.pt")["model"]
    different = [
        name for name in one if one[name].numpy().tobytes() != other[name].numpy().tobytes()
    ]
    if different:
        print(f"Not the same: {', '.join(different)} differ.")
        return 1
    print(f"The same to the last bit: all {len(one)} parameters and buffers.")
    return 0


def main() -> int:
    """Train, or check; returns the exit code."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="gflow", help="gflow or gloo")
    parser.add_argument("--steps", type=int, default=40, help="the step to train up to")
    parser.add_argument("--folder", type=Path, default=Path("checkpoint"), help="of the files")
    parser.add_argument("--check", action="store_true", help="prove it; without torchrun")
    args = parser.parse_args()
    if args.check:
        return check(args)
    train(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
