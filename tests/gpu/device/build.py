"""Builds the extension that makes the stand-in a torch device, next to the stand-in itself.

Nothing here loads the extension: the test runner itself never gets the device.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
from pathlib import Path

from torch.utils import cpp_extension

from tests.gpu.standin import build as standin

HERE = Path(__file__).resolve().parent
EXTENSION = "gflow_standin_device"
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-pthread"]
LIBRARIES = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]


def build() -> tuple[Path, standin.Paths]:
    """The file of the extension and the libraries of the stand-in, both built if needed."""
    paths = standin.build()
    folder = paths.folder / "device"
    folder.mkdir(exist_ok=True)
    with (folder / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "build.ninja").write_text(_rules(paths))
        ninja = [sys.executable, "-m", "ninja", "-C", str(folder), "-j2", "--quiet"]
        subprocess.run(ninja, check=True)
    return folder / f"{EXTENSION}.so", paths


def _rules(paths: standin.Paths) -> str:
    """The rules for ninja, which recompiles only what has changed."""
    # nccl.h includes a CUDA header that only comes with the full toolkit.
    ours = HERE.parent / "standin"
    folders = [ours, ours / "nccl" / "include", *standin.header_directories()]
    folders += [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    includes = " ".join(f"-isystem {folder}" for folder in folders)
    defines = f"-DTORCH_EXTENSION_NAME={EXTENSION} -DTORCH_API_INCLUDE_EXTENSION_H"
    search = " ".join(f"-L{folder}" for folder in cpp_extension.library_paths())
    link = f"{paths.cuda} -Wl,-rpath,{paths.folder} {search} {' '.join(LIBRARIES)}"
    sources = sorted((HERE / "csrc").glob("*.cpp"))
    lines = [
        "rule compile",
        f"  command = g++ {' '.join(FLAGS)} {defines} {includes} -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = g++ -shared $in {link} -o $out",
        *(f"build {source.stem}.o: compile {source}" for source in sources),
        f"build {EXTENSION}.so: link {' '.join(f'{source.stem}.o' for source in sources)}",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(build()[0])
