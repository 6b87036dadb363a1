"""Sets up the environment that PyTorch's suite expects, and loads the suite in it.

Must never leave a setting in place that turns skipped tests into passed ones.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

# With these PyTorch's tests "pass" where they would have been skipped.
SANDCASTLE = ("SANDCASTLE", "TW_JOB_USER")


def prepare(backend: str, world_size: int, timeout: int, folder: Path) -> None:
    """Sets the variables that the suite reads on import, and its ranks when they start."""
    for name in SANDCASTLE:
        os.environ.pop(name, None)
    # Ranks leave files in the temporary directory; forked ones have its name already looked up.
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    for name in ("barrier", "init_dir", "test_dir"):
        (folder / name).mkdir()
    os.environ["TEMP_DIR"] = str(folder)
    # Some tests are skipped unless the rendezvous is a file. Each test gets a new one later.
    os.environ["INIT_METHOD"] = f"file://{folder}/init_dir/shared_init_file"
    os.environ["BACKEND"] = backend
    os.environ["WORLD_SIZE"] = str(world_size)
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(timeout)
    # The command that PyTorch suggests for repeating a failure does not exist here.
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"


def find_backend(name: str) -> str | None:
    """Where torch finds the backend, so that a run can say what it tested; None if it doesn't."""
    # The same search as torch's: of several with one name, the first on the path wins.
    for plugin in entry_points(group="torch.distributed.backends"):
        if plugin.name.lower() == name and plugin.dist is not None:
            return f"{plugin.value} of {plugin.dist.name} {plugin.dist.version}"
    return "torch itself" if name == "gloo" else None


def load_suite(start: str) -> ModuleType:
    """Imports the suite, without starting a thread: the tests' processes are forked from here."""
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    # NumPy's library starts its threads when it is loaded. Spawned ranks get them as usual.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    suite = importlib.import_module(f"{__package__}.suite")
    if before is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = before
    import torch

    if start == "auto":
        # A CUDA context does not survive a fork.
        start = "spawn" if torch.accelerator.is_available() else "fork"
    suite.BackendSuite.start_method = start
    # Garbage collection skips everything imported so far, so that a forked rank neither copies nor
    # destroys it object by object; a rank's own objects are collected as usual.
    gc.freeze()
    return suite


def leave(folder: Path) -> None:
    """Removes the tests' files, and undoes the freeze so that this process exits normally."""
    gc.unfreeze()
    shutil.rmtree(folder, ignore_errors=True)
