"""Tests that every option is read, checked and refused in one place, with messages that help.

Options are resolved before there is a process group, so none is needed here.
"""

import dataclasses
import warnings
from collections.abc import Mapping

import pytest

import gflow
from gflow.options import OPTION_SPECS, resolve

EXAMPLES = {
    "compress": ("on", "on"),
    "method": ("int3", "int3"),
    "max_noise": ("any", "any"),
    "optimizer": ("adam", "adam"),
    "audit_steps": ("0", 0),
    "density": ("0.25", 0.25),
    "chunk": ("4096", 4096),
    "warmup_steps": ("7", 7),
    "ramp_steps": ("0", 0),
    "wire": ("bf16", "bf16"),
    "fusion_bytes": ("1048576", 1048576),
    "momentum": ("0.9", 0.9),
    "keep_last_step": ("on", "on"),
    "timeline": ("trace.json", "trace.json"),
    "ifname": ("eth0", "eth0"),
    "host_id": ("left", "left"),
    "secret": ("hush", "hush"),
}

WRONG = {
    "compress": ["yes", "ON", ""],
    "method": ["int2", "INT3", "topk", ""],
    "max_noise": ["much", "0.1"],
    "optimizer": ["AdamW", "lion"],
    "audit_steps": ["-1", "often"],
    "density": ["0", "-0.1", "1.5", "nan", "inf", "much", ""],
    "chunk": ["0", "-1", "1.5", "many", str(10**20)],
    "warmup_steps": ["1", "-3", "x"],
    "ramp_steps": ["-1", "1e3"],
    "wire": ["fp8", "FP16"],
    "fusion_bytes": ["-1", "25MB"],
    "momentum": ["1", "-0.1", "nan"],
    "keep_last_step": ["yes", ""],
    "timeline": [""],
    "ifname": [""],
    "host_id": [""],
    "secret": [""],
}


def quietly(options: gflow.Options | None, environ: Mapping[str, str]):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return resolve(options, environ)


def test_the_options_are_those_of_the_table() -> None:
    assert {field.name for field in dataclasses.fields(gflow.Options)} == set(OPTION_SPECS)
    assert set(EXAMPLES) == set(WRONG) == set(OPTION_SPECS)


def test_every_default_is_itself_allowed() -> None:
    for spec in OPTION_SPECS.values():
        if spec.default is not None:
            assert spec.check(spec.default, spec.name) == spec.default


@pytest.mark.parametrize("name", OPTION_SPECS)
def test_an_option_comes_from_its_variable(name: str) -> None:
    text, value = EXAMPLES[name]
    assert quietly(None, {OPTION_SPECS[name].variable: text})[name] == value


@pytest.mark.parametrize("name", OPTION_SPECS)
def test_an_option_wins_over_its_variable(name: str) -> None:
    _, value = EXAMPLES[name]
    other = {"compress": "off", "wire": "fp32"}.get(name, "0.5" if name == "density" else "3")
    environ = {OPTION_SPECS[name].variable: other if name != "momentum" else "0.1"}
    assert quietly(gflow.Options(**{name: value}), environ)[name] == value


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in WRONG.items() for t in texts])
def test_a_wrong_variable_is_refused_with_its_name_its_value_and_what_is_allowed(
    name: str, text: str
) -> None:
    with pytest.raises(ValueError, match=OPTION_SPECS[name].variable) as refused:
        quietly(None, {OPTION_SPECS[name].variable: text})
    message = str(refused.value)
    assert OPTION_SPECS[name].allowed in message
    assert repr(text) in message or (name == "secret" and "<hidden>" in message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("density", 2.0),
        ("density", "0.1"),
        ("density", True),
        ("chunk", 1.5),
        ("wire", "int8"),
        ("momentum", 1),
        ("ifname", 3),
    ],
)
def test_a_wrong_option_is_refused_when_it_is_made(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"Options\({name}=...\) is {value!r}"):
        gflow.Options(**{name: value})


def test_options_of_another_backend_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a gflow\.Options, got dict"):
        resolve({"density": 0.1}, {})


def test_variables_of_the_machine_are_known(recwarn: pytest.WarningsRecorder) -> None:
    resolve(None, {"GFLOW_NCCL": "/opt/libnccl.so.2", "GFLOW_CACHE": "/tmp/cache"})
    assert not recwarn.list


def test_an_unknown_variable_is_warned_about_with_the_nearest_name() -> None:
    with pytest.warns(UserWarning, match="GFLOW_DENSTIY is unknown.*did you mean GFLOW_DENSITY"):
        resolve(None, {"GFLOW_DENSTIY": "0.1"})


def test_an_option_that_does_nothing_yet_says_so() -> None:
    with pytest.warns(UserWarning, match="timeline has no effect yet"):
        resolve(gflow.Options(timeline="trace.json"), {})


def test_defaults_and_other_variables_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = resolve(gflow.Options(), {"PATH": "/bin", "GFLOW_DENSITY": "0.1"})
    assert settings["density"] == 0.1
    assert settings["compress"] == "auto"


def test_a_secret_is_never_shown() -> None:
    assert "hush" not in repr(gflow.Options(secret="hush"))
