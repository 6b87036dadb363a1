"""The checks of ``gflow doctor``, each a small function that looks at one thing.

A check changes nothing on this machine, has a deadline, and shows no secret. If it fails, it says
what it saw and what to do about it. A machine without a GPU is fine: checks of GPUs then pass.
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from gflow.bench.machine import gpu_findings
from gflow.cli import selftest
from gflow.launch import ranks
from gflow.options import OPTION_SPECS, Settings, resolve

_OLDEST_PYTHON = (3, 10)
_GROUPS = ("torch.distributed.backends", "torch.backends")
_WORLD = 2
_REINSTALL = "Reinstall gflow in this environment, with pip."
_REPORT = "This is a bug in gflow: please report it, with this output."
_NO_GPU = "no GPU: skipped"
_EXACT = "or set GFLOW_COMPRESS=off, then everything on GPUs goes through torch's own NCCL backend."


@dataclass(frozen=True)
class Passed:
    """The finding of a check that passed; ``advice`` is what the user may still want to know."""

    detail: str
    advice: str = ""


class Failed(Exception):
    """The finding of a check that failed, what to do, and the output of processes that were run."""

    def __init__(self, detail: str, advice: str, output: str = "") -> None:
        super().__init__(detail)
        self.detail, self.advice, self.output = detail, advice, output


@dataclass(frozen=True)
class Check:
    """One check: its name, what it does, and which checks must have passed before."""

    name: str
    run: Callable[[], Passed]
    needs: tuple[str, ...] = ()


def all_checks(deadline: float) -> list[Check]:
    """All checks, in order; those that start processes have ``deadline`` seconds each."""
    rust = functools.partial(_rust_failures, deadline)
    self_test = functools.partial(_self_test, deadline)
    gpu_self_test = functools.partial(_gpu_self_test, deadline)
    return [
        Check("Python", _python),
        Check("torch", _torch),
        Check("native library", _native_library, needs=("torch",)),
        Check("entry points", _entry_points),
        Check("Rust failures", rust, needs=("native library",)),
        Check("CUDA", _cuda, needs=("torch",)),
        Check("GPU libraries", gpu_libraries, needs=("native library",)),
        Check("options", _options),
        Check("network", _network, needs=("torch", "options")),
        Check("self-test", self_test, needs=("native library", "entry points", "options")),
        Check("GPU self-test", gpu_self_test, needs=("CUDA", "GPU libraries", "self-test")),
    ]


def _python() -> Passed:
    version = platform.python_version()
    if sys.version_info < _OLDEST_PYTHON:
        raise Failed(f"{version} is too old", f"Use Python {_dotted(_OLDEST_PYTHON)} or newer.")
    return Passed(f"{version}, {sys.executable}")


def _torch() -> Passed:
    from gflow import native

    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise Failed(
            f"cannot be imported: {error}", "Install torch in this environment."
        ) from error
    if not dist.is_available():
        raise Failed(f"{torch.__version__} has no torch.distributed", "Install a torch with it.")
    try:
        built_for = native.built_for()
    except ImportError as error:
        raise Failed(str(error), _REINSTALL) from error
    detail = f"{torch.__version__}; gflow was built for {built_for}"
    minor = native.minor_of(built_for)
    if native.minor_of(torch.__version__) != minor:
        raise Failed(detail, f"Install torch=={minor}.*, or rebuild gflow for this torch.")
    return Passed(detail)


def _native_library() -> Passed:
    from gflow import native

    try:
        return Passed(f"loaded, {native.load().__file__}")
    except ImportError as error:
        raise Failed(str(error), _REINSTALL) from error


def _entry_points() -> Passed:
    for group in _GROUPS:
        found = [entry for entry in entry_points(group=group) if entry.name == "gflow"]
        if not found:
            raise Failed(f"none called gflow in group {group}, so torch cannot find it", _REINSTALL)
        for entry in found:
            if not callable(entry.load()):
                raise Failed(f"{entry.value} in group {group} cannot be called", _REINSTALL)
    return Passed(f"gflow in {' and '.join(_GROUPS)}")


def _rust_failures(deadline: float) -> Passed:
    try:
        (arrived,) = ranks.run(selftest.provoke_failures, 1, deadline=deadline)
    except ranks.RanksFailed as error:
        raise Failed(
            "the process did not survive a failure in Rust", _REPORT, str(error)
        ) from error
    for way, what in arrived.items():
        if not what.startswith("RuntimeError:"):
            raise Failed(f"a Rust {way} should be a RuntimeError in Python, but is {what}", _REPORT)
    return Passed("errors and panics in Rust arrive as RuntimeError in Python")


def _options() -> Passed:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            settings = resolve(None)
        except ValueError as error:
            raise Failed(str(error), "Give the variable such a value, or unset it.") from error
    chosen = [_shown(name, settings) for name, spec in OPTION_SPECS.items()
              if settings[name] != spec.default]  # fmt: skip
    return Passed(
        ", ".join(chosen) or "no GFLOW_ variable changes a default",
        " ".join(str(warning.message) for warning in warned),
    )


def _shown(name: str, settings: Settings) -> str:
    return f"{name}=<hidden>" if name == "secret" else f"{name}={settings[name]}"


def _network() -> Passed:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the check of the options shows them
        ifname = resolve(None)["ifname"]
    master = os.environ.get("MASTER_ADDR")
    if master is not None:
        try:
            socket.getaddrinfo(master, None)
        except OSError as error:
            advice = "Correct or unset MASTER_ADDR, or repair this host's name resolution."
            raise Failed(f"MASTER_ADDR is {master!r}: {error}", advice) from error
    try:
        address = _address_of_this_host(ifname)
    except ValueError as error:
        raise Failed(str(error), "Correct or unset GFLOW_IFNAME.") from error
    if ifname is not None:
        return Passed(f"{address}, of interface {ifname}")
    if master is not None:
        return Passed(f"{address}, on the way to MASTER_ADDR={master}")
    return Passed(f"{address}, of this host's name; in a job, the address on the way to the master")


def _address_of_this_host(ifname: str | None) -> str:
    import torch.distributed as dist

    network = importlib.import_module("gflow.network")  # it needs torch
    # A store that names no master: what is left is MASTER_ADDR, or this host's name.
    return str(network.own_address(dist.HashStore(), ifname))


def _self_test(deadline: float) -> Passed:
    # A trace that the user asked for is not meant for a self-test.
    unset = (OPTION_SPECS["timeline"].variable,)
    try:
        results = ranks.run(selftest.exchange, _WORLD, deadline=deadline, unset=unset)
    except ranks.RanksFailed as error:
        advice = "The output of the ranks is below; if it is no fault of this host, report it."
        raise Failed(f"{_WORLD} ranks on this host failed", advice, str(error)) from error
    if len({result["weights"] for result in results}) != 1:
        raise Failed("the ranks have different weights after the same training", _REPORT)
    buckets = [result["buckets"] for result in results]
    if not all(buckets):
        detail = f"DDP's gradient buckets are not recognised (by rank: {buckets})"
        raise Failed(detail, "Unset DDP_DISABLE_COMM_MEM if it is 1; else report it.")
    share = results[0]["hosts"] == 1
    return Passed(
        f"{_WORLD} ranks on this host: all_reduce exact, DDP trains as one process does, "
        f"{buckets[0]} gradient buckets recognised, same weights on all ranks, "
        f"{'memory is shared' if share else 'memory is NOT shared'}",
        "" if share else "Ranks of this host use TCP, which is slower; a job's log says why.",
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# --- GPUs


def _cuda() -> Passed:
    """What torch sees."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return Passed(
            "not available (no GPU, no driver, or a torch without CUDA): CPU tensors only"
        )
    count = torch.cuda.device_count()
    detail = f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
    if not dist.is_nccl_available():
        return Passed(
            f"{detail}; torch has no NCCL: CPU tensors only", "Install a torch with NCCL."
        )
    return Passed(detail)


def gpu_libraries() -> Passed:
    """The engine's findings about what it needs to compress gradients on GPUs."""
    import torch

    try:
        found = gpu_findings()
    except RuntimeError as error:
        if not torch.cuda.is_available():
            return Passed(f"{_NO_GPU} ({error})")
        raise Failed(str(error), f"Please report this, {_EXACT}") from error
    said = "; ".join(f"{one.what}: {one.found}" for one in found)
    if not torch.cuda.is_available():
        return Passed(f"{_NO_GPU} ({said})")
    missing = [one.what for one in found if not one.is_there]
    if missing:
        raise Failed(said, f"Gradients on GPUs cannot be compressed without: install what is "
                    f"missing ({', '.join(missing)}), {_EXACT}")  # fmt: skip
    return Passed(said)


def _gpu_self_test(deadline: float) -> Passed:
    """Train on two GPUs with compression, and compare with training in one process."""
    import torch

    if not torch.cuda.is_available():
        return Passed(_NO_GPU)
    if torch.cuda.device_count() < _WORLD:
        return Passed("one GPU: skipped, NCCL needs one for each rank")
    unset = (OPTION_SPECS["timeline"].variable,)
    arguments = {"device_type": "cuda"}
    try:
        results = ranks.run(
            selftest.exchange_on_devices, _WORLD, arguments, deadline=deadline, unset=unset
        )
    except ranks.RanksFailed as error:
        advice = f"The output of the ranks is below. Please report it, {_EXACT}"
        raise Failed(f"{_WORLD} ranks on GPUs failed", advice, str(error)) from error
    if len({result["weights"] for result in results}) != 1:
        raise Failed(
            "the ranks have different weights after the same training", "Please report it."
        )
    if not all(result["compressed"] for result in results):
        raise Failed("DDP's gradients on GPUs were not compressed", "Please report it.")
    return Passed(
        f"{_WORLD} ranks on {_WORLD} GPUs: all_reduce exact, DDP trains as one process does with "
        f"{results[0]['compressed']} buckets compressed, same weights on all ranks"
    )
