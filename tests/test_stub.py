"""Proves that torch_plugin/_C.pyi, which type checkers believe, describes the native library: the
same names, methods, arguments and defaults, none missing on either side."""

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType, WrapperDescriptorType

import pytest

from gflow import native

STUB = Path(__file__).resolve().parent.parent / "torch_plugin" / "_C.pyi"

#: By function, its arguments, each with whether it has a default.
Functions = dict[str, list[tuple[str, bool]]]


def is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__init__"


def arguments_in_stub(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    spec = function.args
    assert [*spec.posonlyargs, *spec.kwonlyargs, spec.vararg, spec.kwarg] == [None, None]
    required = len(spec.args) - len(spec.defaults)
    found = [(one.arg, number >= required) for number, one in enumerate(spec.args)]
    return [one for one in found if one[0] != "self"]


def functions_in_stub(body: list[ast.stmt]) -> Functions:
    return {
        one.name: arguments_in_stub(one)
        for one in body
        if isinstance(one, ast.FunctionDef) and is_public(one.name)
    }


def arguments_of(function: object) -> list[tuple[str, bool]]:
    """The arguments of a native function, as pybind11 writes them into its docstring."""
    signature = re.match(r"\w+\((.*)\) -> ", str(inspect.getdoc(function)))
    assert signature, inspect.getdoc(function)
    # A type such as Sequence[str] has commas only within brackets.
    text = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", signature[1]))
    found = [part.strip() for part in text.split(",") if part.strip()]
    named = [(part.partition(":")[0].strip(), "=" in part) for part in found]
    return [one for one in named if one[0] != "self"]


def functions_of(owner: ModuleType | type) -> Functions:
    return {
        name: arguments_of(one)
        for name, one in vars(owner).items()
        # A class without a constructor has object's, a slot.
        if is_public(name) and inspect.isroutine(one) and not isinstance(one, WrapperDescriptorType)
    }


def properties_of(owner: type) -> set[str]:
    return {name for name, one in vars(owner).items() if isinstance(one, property)}


@pytest.fixture(scope="module")
def stub() -> ast.Module:
    return ast.parse(STUB.read_text())


def test_functions_of_the_library_are_in_the_stub_with_their_arguments(stub: ast.Module) -> None:
    assert functions_in_stub(stub.body) == functions_of(native.load())


def test_classes_of_the_library_are_in_the_stub_with_all_that_they_have(stub: ast.Module) -> None:
    classes = {
        one.name: one for one in stub.body if isinstance(one, ast.ClassDef) and is_public(one.name)
    }
    native_classes = {
        name: one for name, one in vars(native.load()).items() if inspect.isclass(one)
    }
    assert set(classes) == set(native_classes)
    for name, one in classes.items():
        properties = {
            member.name
            for member in one.body
            if isinstance(member, ast.FunctionDef) and member.decorator_list
        }
        assert properties == properties_of(native_classes[name]), name
        methods = functions_in_stub(one.body)
        expected = functions_of(native_classes[name])
        assert {k: v for k, v in methods.items() if k not in properties} == expected, name


def test_metrics_in_the_stub_are_those_that_the_library_returns(stub: ast.Module) -> None:
    import torch.distributed as dist

    from gflow.backend import backend_of

    (fields,) = [
        [member.target.id for member in one.body if isinstance(member, ast.AnnAssign)]
        for one in stub.body
        if isinstance(one, ast.ClassDef) and one.name == "_Metrics"
    ]
    dist.init_process_group("gflow", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert set(fields) == set(native.load().metrics(backend_of(None)))
    finally:
        dist.destroy_process_group()
