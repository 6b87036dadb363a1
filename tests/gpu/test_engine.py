"""The engine on GPUs: its own tests of whole exchanges, on the stand-in for CUDA and NCCL.

They are ignored Rust tests (rust/engine/tests/devices.rs), because they need the stand-in and a
compiler for CUDA kernels. Both are available here, so each of them is run here by name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.standin.build import REPOSITORY, build, header_directories

MODULE = "engine::tests::devices"
SOURCES = REPOSITORY / "rust" / "engine" / "tests"
# Two ranks more than the largest layout, each with two GPUs.
DEVICES = 12
# Only a hang takes this long.
LIMIT = 600


def named_tests() -> list[str]:
    """Every test of the module, read from its sources so that none is left out."""
    names = []
    for path in [SOURCES / "devices.rs", *sorted((SOURCES / "devices").glob("*.rs"))]:
        within = "" if path.stem == "devices" else f"{path.stem}::"
        found = re.findall(r"#\[test\]\n#\[ignore[^\n]*\]\nfn (\w+)", path.read_text())
        names += [f"{MODULE}::{within}{name}" for name in found]
    return names


@pytest.fixture(scope="session")
def program() -> Path:
    """The Rust tests, compiled as `make test` does."""
    options = ["--profile", "quick", "--locked", "--lib", "--no-run", "--message-format=json"]
    command = ["cargo", "test", *options]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    programs = [message["executable"] for message in messages if message.get("executable")]
    assert len(programs) == 1, programs
    return Path(programs[0])


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables that locate the stand-in and NVRTC, and a cache for compiled kernels."""
    try:
        variables = build().environment()
    except FileNotFoundError as missing:
        pytest.skip(f"this torch comes without CUDA: {missing}")
    # From torch's wheel: the test program does not load torch.
    libraries = [directory.parent / "lib" for directory in header_directories()]
    path = ":".join([variables["LD_LIBRARY_PATH"], *map(str, libraries)])
    cache = tmp_path_factory.mktemp("kernels")
    return {**os.environ, **variables, "LD_LIBRARY_PATH": path, "GFLOW_CACHE": str(cache)} | {
        "STANDIN_DEVICES": str(DEVICES)
    }


def run(program: Path, environment: dict[str, str], *arguments: str) -> str:
    """Runs some of the tests and returns what they wrote."""
    command = [str(program), "--include-ignored", "--test-threads=1", *arguments]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    return output


#: Long, and what they show is mostly shown by others too.
THOROUGH = {
    "every_exchange_on_gpus_is_to_the_bit_what_the_reference_makes_of_it",
    "a_rank_that_has_run_out_of_data_pays_what_it_owes_on_gpus_as_on_the_cpu",
}


def cases() -> list[Any]:
    return [
        pytest.param(
            name,
            id=name.removeprefix(f"{MODULE}::"),
            marks=[pytest.mark.thorough] if name.split("::")[-1] in THOROUGH else [],
        )
        for name in named_tests()
    ]


@pytest.mark.parametrize("name", cases())
def test_on_the_standin(program: Path, environment: dict[str, str], name: str) -> None:
    """One Rust test, which must have run and not been skipped."""
    output = run(program, environment, "--exact", name)
    assert "1 passed" in output, output


def test_every_test_of_the_module_is_known_by_name(
    program: Path, environment: dict[str, str]
) -> None:
    """The program has exactly the tests that were found in the sources."""
    listed = run(program, environment, "--list", MODULE)
    assert sorted(re.findall(rf"^({MODULE}::\S+): test$", listed, re.M)) == sorted(named_tests())


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("GFLOW_NCCL", "/nowhere/libnccl.so.2", ["NCCL was not found", "/nowhere/libnccl.so.2"]),
        ("LD_LIBRARY_PATH", "", ["the CUDA driver was not found", "libcuda.so.1"]),
    ],
    ids=["nccl", "driver"],
)
def test_a_library_that_is_missing_is_named_with_where_it_was_looked_for(
    program: Path, environment: dict[str, str], variable: str, value: str, expected: list[str]
) -> None:
    """Opening a GPU says what is missing, and nothing else goes wrong."""
    changed = {**environment, variable: value}
    command = [str(program), "--include-ignored", "--nocapture", "--exact"]
    command.append("cuda::exchange::device_queue::tests::a_gpu_that_cannot_be_opened_says_why")
    ran = subprocess.run(
        command, env=changed, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    assert all(part in output for part in expected), output
