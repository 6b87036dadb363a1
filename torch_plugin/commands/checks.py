"""The checks of ``gflow doctor``, each a small function that looks at one thing.

A check must never change anything on this machine, never wait without a deadline, and never show
a secret. One that fails says what it saw and what to do about it.
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
import socket
import sys
import warnings
from importlib.metadata import entry_points

from gflow.commands import gpu_checks, ranks, selftest
from gflow.commands.check import Check, Fine, Wrong
from gflow.options import KNOBS, Settings, settle

_OLDEST_PYTHON = (3, 10)
_GROUPS = ("torch.distributed.backends", "torch.backends")
_WORLD = 2
_REINSTALL = "Reinstall gflow in this environment, with pip."
_REPORT = "This is a bug in gflow: please report it, with this output."


def all_checks(deadline: float) -> list[Check]:
    """All checks, in order; each that starts processes has ``deadline`` seconds."""
    rust = functools.partial(_rust_failures, deadline)
    self_test = functools.partial(_self_test, deadline)
    gpu_self_test = functools.partial(gpu_checks.self_test, deadline)
    return [
        Check("Python", _python),
        Check("torch", _torch),
        Check("native library", _native_library, needs=("torch",)),
        Check("entry points", _entry_points),
        Check("Rust failures", rust, needs=("native library",)),
        Check("CUDA", gpu_checks.cuda, needs=("torch",)),
        Check("GPU libraries", gpu_checks.libraries, needs=("native library",)),
        Check("options", _options),
        Check("network", _network, needs=("torch", "options")),
        Check("self-test", self_test, needs=("native library", "entry points", "options")),
        Check("GPU self-test", gpu_self_test, needs=("CUDA", "GPU libraries", "self-test")),
    ]


def _python() -> Fine:
    version = platform.python_version()
    if sys.version_info < _OLDEST_PYTHON:
        raise Wrong(f"{version} is too old", f"Use Python {_dotted(_OLDEST_PYTHON)} or newer.")
    return Fine(f"{version}, {sys.executable}")


def _torch() -> Fine:
    from gflow import native

    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise Wrong(f"cannot be imported: {error}", "Install torch in this environment.") from error
    if not dist.is_available():
        raise Wrong(f"{torch.__version__} has no torch.distributed", "Install a torch with it.")
    try:
        built_for = native.built_for()
    except ImportError as error:
        raise Wrong(str(error), _REINSTALL) from error
    detail = f"{torch.__version__}; gflow was built for {built_for}"
    minor = native.minor_of(built_for)
    if native.minor_of(torch.__version__) != minor:
        raise Wrong(detail, f"Install torch=={minor}.*, or rebuild gflow for this torch.")
    return Fine(detail)


def _native_library() -> Fine:
    from gflow import native

    try:
        return Fine(f"loaded, {native.load().__file__}")
    except ImportError as error:
        raise Wrong(str(error), _REINSTALL) from error


def _entry_points() -> Fine:
    for group in _GROUPS:
        found = [entry for entry in entry_points(group=group) if entry.name == "gflow"]
        if not found:
            raise Wrong(f"none called gflow in group {group}, so torch cannot find it", _REINSTALL)
        for entry in found:
            if not callable(entry.load()):
                raise Wrong(f"{entry.value} in group {group} cannot be called", _REINSTALL)
    return Fine(f"gflow in {' and '.join(_GROUPS)}")


def _rust_failures(deadline: float) -> Fine:
    try:
        (arrived,) = ranks.run(selftest.provoke_failures, 1, deadline=deadline)
    except ranks.RanksFailed as error:
        raise Wrong("the process did not survive a failure in Rust", _REPORT, str(error)) from error
    for way, what in arrived.items():
        if not what.startswith("RuntimeError:"):
            raise Wrong(f"a Rust {way} should be a RuntimeError in Python, but is {what}", _REPORT)
    return Fine("errors and panics in Rust arrive as RuntimeError in Python")


def _options() -> Fine:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            settings = settle(None)
        except ValueError as error:
            raise Wrong(str(error), "Give the variable such a value, or unset it.") from error
    chosen = [_shown(name, settings) for name, knob in KNOBS.items()
              if settings[name] != knob.default]  # fmt: skip
    return Fine(
        ", ".join(chosen) or "no GFLOW_ variable changes a default",
        " ".join(str(warning.message) for warning in warned),
    )


def _shown(name: str, settings: Settings) -> str:
    return f"{name}=<hidden>" if name == "secret" else f"{name}={settings[name]}"


def _network() -> Fine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the check of the options has shown them
        ifname = settle(None)["ifname"]
    master = os.environ.get("MASTER_ADDR")
    if master is not None:
        try:
            socket.getaddrinfo(master, None)
        except OSError as error:
            advice = "Correct or unset MASTER_ADDR, or repair this host's name resolution."
            raise Wrong(f"MASTER_ADDR is {master!r}: {error}", advice) from error
    try:
        address = _address_of_this_host(ifname)
    except ValueError as error:
        raise Wrong(str(error), "Correct or unset GFLOW_IFNAME.") from error
    if ifname is not None:
        return Fine(f"{address}, of interface {ifname}")
    if master is not None:
        return Fine(f"{address}, on the way to MASTER_ADDR={master}")
    return Fine(f"{address}, of this host's name; in a job, the address on the way to the master")


def _address_of_this_host(ifname: str | None) -> str:
    import torch.distributed as dist

    network = importlib.import_module("gflow.network")  # it needs torch
    # A store that names no master: what is left is MASTER_ADDR, or this host's name.
    return str(network.own_address(dist.HashStore(), ifname))


def _self_test(deadline: float) -> Fine:
    # A trace that the user has asked for is not the place for a self-test.
    unset = (KNOBS["timeline"].variable,)
    try:
        results = ranks.run(selftest.exchange, _WORLD, deadline=deadline, unset=unset)
    except ranks.RanksFailed as error:
        advice = "The output of the ranks is below; if it is no fault of this host, report it."
        raise Wrong(f"{_WORLD} ranks on this host failed", advice, str(error)) from error
    if len({result["weights"] for result in results}) != 1:
        raise Wrong("the ranks have different weights after the same training", _REPORT)
    buckets = [result["buckets"] for result in results]
    if not all(buckets):
        detail = f"DDP's gradient buckets are not recognised (by rank: {buckets})"
        raise Wrong(detail, "Unset DDP_DISABLE_COMM_MEM if it is 1; else report it.")
    share = results[0]["hosts"] == 1
    return Fine(
        f"{_WORLD} ranks on this host: all_reduce exact, DDP trains as one process does, "
        f"{buckets[0]} gradient buckets recognised, same weights on all ranks, "
        f"{'memory is shared' if share else 'memory is NOT shared'}",
        "" if share else "Ranks of this host use TCP, which is slower; a job's log says why.",
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
