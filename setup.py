"""Builds gflow: the Rust engine as a static library, linked with the C++ shim into gflow._C.

A wheel works with one minor version of torch, because c10d is outside torch's stable ABI. That
version is recorded in the package, and `gflow` reports a mismatch. The build must never download a
compiler: it names the missing tool instead.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ModuleNotFoundError as missing:
    sys.exit(
        f"gflow: building needs torch, and {missing.name} is not installed for {sys.executable}. "
        "Install torch first, or leave out --no-build-isolation."
    )

ROOT = Path(__file__).resolve().parent
TARGET = ROOT / "target"
TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])


def cargo_build() -> None:
    """Compile the Rust engine, or name what is missing."""
    cargo = shutil.which("cargo")
    if cargo is None:
        sys.exit(
            "gflow: building needs Rust's cargo (1.89 or newer), which is not on PATH. "
            "Install it with rustup or your system's packages, or install a wheel of gflow."
        )
    command = [cargo, "build", "--release", "--locked", "--lib", "--target-dir", str(TARGET)]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        sys.exit("gflow: cargo could not build the engine; its messages are above.")


class BuildWithCargo(BuildExtension):
    """Builds the engine before the shim that is linked with it."""

    def finalize_options(self) -> None:
        """Keep the objects of earlier builds."""
        super().finalize_options()
        # pip passes a new folder each time; a fixed one makes later builds incremental.
        self.build_temp = str(ROOT / "build" / f"torch-{torch.__version__}-{sys.version_info[1]}")

    def build_extensions(self) -> None:
        """Build the engine and the shim, and record the torch version they were built for."""
        cargo_build()
        super().build_extensions()
        self._write_built_for()

    def _write_built_for(self) -> None:
        in_source = self.inplace or getattr(self, "editable_mode", False)
        package = ROOT / "torch_plugin" if in_source else Path(self.build_lib) / "gflow"
        (package / "_built_for.py").write_text(
            '"""Written by the build: the torch that the extension was compiled for."""\n\n'
            f'TORCH_VERSION = "{torch.__version__}"\n'
        )


extension = CppExtension(
    "gflow._C",
    sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp")),
    include_dirs=[str(ROOT / "csrc"), str(TARGET / "cxxbridge"), str(TARGET / "cxxbridge/gflow")],
    extra_objects=[str(TARGET / "release" / "libgflow.a")],
    depends=[str(TARGET / "release" / "libgflow.a")],
    extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-Wall"],
    # Rust's symbols stay inside: another extension may carry its own Rust runtime.
    extra_link_args=["-Wl,--exclude-libs,ALL"],
)

setup(
    ext_modules=[extension],
    cmdclass={"build_ext": BuildWithCargo},
    install_requires=[f"torch=={TORCH_MINOR}.*"],
)
