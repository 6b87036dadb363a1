"""Tests the package: how torch finds it, what importing it costs, and what it says when it was
built for another torch."""

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

import gflow
from gflow import native

ROOT = Path(__file__).resolve().parent.parent


def run_python(source: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("group", ["torch.distributed.backends", "torch.backends"])
def test_both_groups_of_entry_points_name_something_that_can_be_called(group: str) -> None:
    (entry,) = [entry for entry in entry_points(group=group) if entry.name == "gflow"]
    assert callable(entry.load())


def test_registering_twice_is_the_same_as_once() -> None:
    gflow.register()
    first = torch.distributed.Backend._plugins["GFLOW"]
    gflow.register()
    assert torch.distributed.Backend._plugins["GFLOW"] is first


def test_importing_torch_does_not_load_the_native_library() -> None:
    done = run_python(
        "import sys, torch, torch.distributed as dist, gflow; gflow.register();"
        "print('gflow._C' in sys.modules, 'GFLOW' in dist.Backend._plugins)"
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_older_torch_registers_at_import_and_newer_torch_waits_to_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = torch.distributed.Backend
    monkeypatch.setattr(backend, "_plugins", {})
    gflow.register_on_older_torch()
    assert "GFLOW" not in backend._plugins
    monkeypatch.delattr(backend, "_ensure_backend_registered")
    gflow.register_on_older_torch()
    assert "GFLOW" in backend._plugins


def test_a_registration_that_fails_does_not_break_import_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("a change in torch")

    backend = torch.distributed.Backend
    monkeypatch.setattr(backend, "_plugins", {})
    monkeypatch.delattr(backend, "_ensure_backend_registered")
    monkeypatch.setattr(backend, "register_backend", broken)
    with pytest.warns(UserWarning, match="could not register.*a change in torch"):
        gflow.register_on_older_torch()


def test_another_torch_than_it_was_built_for_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    with pytest.raises(ImportError, match=r"built for torch 2\.\d+\.\*, but torch 2\.99\.1\+cpu"):
        native.load.__wrapped__()


def test_a_tree_that_is_not_built_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gflow._built_for", None)
    with pytest.raises(ImportError, match=r"not built.*pip install"):
        native.load.__wrapped__()


def test_an_old_name_still_works_and_is_said_to_be_deprecated_once() -> None:
    source = "import gflow; assert gflow.watch is gflow.watch is gflow.watch_scaler"
    done = run_python(source, "-W", "always")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("DeprecationWarning: gflow.watch is now gflow.watch_scaler") == 1
    assert "watch" not in gflow.__all__


def test_all_packages_and_their_data_are_installed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for folder in sorted({path.parent for path in (ROOT / "torch_plugin").rglob("*.py")}):
        name = ".".join(["gflow", *folder.relative_to(ROOT / "torch_plugin").parts])
        assert f'  "{name}",\n' in text, name
        for kind in ("c", "pyi"):
            has_data = any(folder.glob(f"*.{kind}"))
            (listed,) = re.findall(rf'^"?{re.escape(name)}"? = (\[.*\])$', text, re.M) or [""]
            assert (f"*.{kind}" in listed) == has_data, f"{name}: *.{kind}"


def test_the_versions_of_package_and_crate_agree() -> None:
    assert f'version = "{gflow.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f'version = "{gflow.__version__}"' in (ROOT / "Cargo.toml").read_text()


@pytest.mark.parametrize("what", ["error", "panic"])
def test_a_failure_in_rust_is_a_python_exception_with_its_message(what: str) -> None:
    for _ in range(3):
        with pytest.raises(RuntimeError, match="provoked on purpose"):
            native.load().provoke(what)


def test_an_address_that_cannot_be_listened_on_is_an_exception() -> None:
    with pytest.raises(RuntimeError, match=r"cannot listen on 192\.0\.2\.1"):
        native.load().Endpoint("192.0.2.1")


def test_gflow_is_found_beside_another_backend_for_cpu_tensors() -> None:
    done = run_python(
        "import os, torch.distributed as dist, gflow;"
        "os.environ.update(GLOO_SOCKET_IFNAME='lo');"
        "store = dist.HashStore();"
        "dist.init_process_group('cpu:gloo,cuda:gflow', store=store, rank=0, world_size=1);"
        "print(gflow.metrics().hosts)"
    )
    assert done.stdout.split() == ["1"], done.stderr
