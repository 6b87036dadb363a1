"""Builds the stand-in: a libcuda.so.1 and a libnccl.so.2 that run on the CPU.

    python tests/gpu/standin/build.py [folder]

The headers of CUDA and NCCL are those that come with torch, so every function has the signature
that a program compiled against the real libraries expects.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
FLAGS = ["-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
FLAGS += ["-pthread", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Wno-unknown-pragmas"]
AT_ONCE = 2


@dataclass(frozen=True)
class Paths:
    """Where the built libraries are."""

    folder: Path
    cuda: Path
    nccl: Path

    def environment(self) -> dict[str, str]:
        """Variables that make a process load the stand-in instead of the real libraries."""
        found = os.environ.get("LD_LIBRARY_PATH")
        path = f"{self.folder}:{found}" if found else str(self.folder)
        return {"LD_LIBRARY_PATH": path, "GFLOW_NCCL": str(self.nccl)}


def build(folder: Path | str | None = None) -> Paths:
    """Builds both libraries into the folder, unless they are there and up to date."""
    folder = Path(folder or REPOSITORY / "target" / "standin").resolve()
    objects = folder / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    paths = Paths(folder, folder / "libcuda.so.1", folder / "libnccl.so.2")
    with (folder / "lock").open("w") as lock:
        # Several test processes may want it at once.
        fcntl.flock(lock, fcntl.LOCK_EX)
        headers = [f"-isystem{directory}" for directory in header_directories()]
        host_kernels = REPOSITORY / "tests" / "gpu" / "host_kernels" / "host_kernels.cpp"
        driver = _compile([*_sources("driver"), host_kernels], headers, objects)
        # Replaces the CUDA runtime headers, which need a CUDA compiler.
        headers = [f"-isystem{HERE / 'nccl' / 'include'}", *headers]
        nccl = _compile(_sources("nccl"), headers, objects)
        _link(paths.cuda, driver, ["-ldl"])
        _link(paths.nccl, nccl, [str(paths.cuda), "-Wl,-rpath,$ORIGIN"])
    return paths


def header_directories() -> list[Path]:
    """The folders of cuda.h and nccl.h, from packages that torch depends on."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    directories = []
    for header, pattern in (("cuda.h", "cu*/include"), ("nccl.h", "nccl/include")):
        found = [d for root in roots for d in sorted(root.glob(pattern)) if (d / header).exists()]
        if not found:
            looked = ", ".join(f"{root}/{pattern}" for root in roots) or "no package named nvidia"
            raise FileNotFoundError(f"standin: {header} was not found (looked in: {looked})")
        directories.append(found[-1])
    return directories


def _sources(part: str) -> list[Path]:
    return sorted((HERE / part).glob("*.cpp"))


def _compile(sources: list[Path], headers: list[str], objects: Path) -> list[Path]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda source: _compile_one(source, headers, objects), sources))


def _compile_one(source: Path, headers: list[str], objects: Path) -> Path:
    """The object file of a source, compiled again if the source or an include changed."""
    name = f"{source.parent.name}-{source.stem}"
    depends = objects / f"{name}.d"
    stamp = objects / f"{name}.stamp"
    made = objects / f"{name}.o"
    if made.exists() and stamp.exists() and stamp.read_text() == _fingerprint(source, depends):
        return made
    command = [os.environ.get("CXX", "g++"), *FLAGS, *headers, "-MMD", "-MF", str(depends)]
    subprocess.run([*command, "-c", str(source), "-o", str(made)], check=True)
    stamp.write_text(_fingerprint(source, depends))
    return made


def _fingerprint(source: Path, depends: Path) -> str:
    """A hash of a source's path and of everything it includes, except system headers."""
    if not depends.exists():
        return ""
    files = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    digest = hashlib.sha256(" ".join([*FLAGS, str(source)]).encode())
    for file in sorted(set(files)):
        path = Path(file)
        digest.update(path.read_bytes() if path.exists() else b"gone")
    return digest.hexdigest()


def _link(library: Path, objects: list[Path], more: list[str]) -> None:
    newest = max(file.stat().st_mtime_ns for file in [*objects, Path(__file__)])
    if library.exists() and library.stat().st_mtime_ns >= newest:
        return
    unfinished = library.with_suffix(".new")
    # nodelete: threads run in the library, so dlclose must not unload it.
    options = [f"-Wl,-soname,{library.name}", "-Wl,-z,defs", "-Wl,-z,nodelete", "-Wl,-Bsymbolic"]
    command = [os.environ.get("CXX", "g++"), "-shared", "-pthread", *options]
    subprocess.run([*command, *map(str, objects), *more, "-o", str(unfinished)], check=True)
    # Atomic: a process that has loaded the old library keeps it.
    unfinished.rename(library)


if __name__ == "__main__":
    built = build(sys.argv[1] if len(sys.argv) > 1 else None)
    print(f"{built.cuda}\n{built.nccl}")
