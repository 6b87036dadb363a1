"""The options of a process group: where they are named, typed and checked.

Every option can be given in ``pg_options=gflow.Options(...)`` or as an environment variable; the
option wins. A wrong value is refused when the group is made, with the name, the value and what is
allowed. Only this file reads ``GFLOW_…`` variables.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "GFLOW_"
#: These belong to the machine, not to a group: the engine reads them when it first uses a GPU.
MACHINE_VARIABLES = ("GFLOW_NCCL", "GFLOW_CACHE")
#: This one belongs to the process: how much gflow logs.
LOG_VARIABLE = "GFLOW_LOG"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for ``init_process_group(..., pg_options=...)`` and ``new_group``.

    An option that is not given comes from its environment variable (``density`` from
    ``GFLOW_DENSITY``), or else has its default.

    Example:
        >>> options = gflow.Options(density=0.01, ifname="eth1")
        >>> dist.init_process_group("gflow", pg_options=options)  # doctest: +SKIP

    Attributes:
        compress: ``auto`` (what crosses hosts), ``on`` (every rank is a host), ``off`` (exact).
        method: what gradients are sent as between hosts: ``auto`` (what promises the shortest time
            to a loss), ``exact``, ``fp32``, ``fp16``, ``bf16``, ``int8``, ``int4``, ``int3``,
            ``quinary`` (5 levels), ``ternary`` (3 levels) or ``chunks`` (the most important ones).
        max_noise: how far ``auto`` may go: ``none`` (fp16), ``low`` (5 levels), ``any`` (3 levels).
        optimizer: what steps by the gradients: ``auto`` (seen at the first step), ``adam`` (and all
            that divide each element by its usual size) or ``sgd``. Three levels need to know it;
            the others are better for it.
        audit_steps: how often a part of a bucket is also exchanged exactly, to compare; 0: never.
        density: with ``chunks``, fraction of chunks sent, over 0 and up to 1.
        chunk: with ``chunks``, elements in a chunk.
        warmup_steps: exact steps at the start; ``auto`` may take ``fp16`` or ``int8`` in them.
        ramp_steps: with ``chunks``, steps from dense to ``density``.
        wire: with ``chunks``, element type on the wire, ``fp16``, ``bf16`` or ``fp32``.
        fusion_bytes: how much gradient one exchange carries; 0 fuses nothing.
        momentum: momentum correction of the residual, from 0 up to, not including, 1.
        keep_last_step: ``on``: after a failure, ``gflow.state_dict()`` gives what was kept as of
            the last complete step. Takes as much memory again as what is kept.
        timeline: file to write a trace to.
        ifname: network interface; by default the one that leads to the master address.
        host_id: who shares memory with whom; by default this machine.
        secret: key that peers must prove; by default made anew for each group.
    """

    compress: str | None = None
    method: str | None = None
    max_noise: str | None = None
    optimizer: str | None = None
    audit_steps: int | None = None
    density: float | None = None
    chunk: int | None = None
    warmup_steps: int | None = None
    ramp_steps: int | None = None
    wire: str | None = None
    fusion_bytes: int | None = None
    momentum: float | None = None
    keep_last_step: str | None = None
    timeline: str | None = None
    ifname: str | None = None
    host_id: str | None = None
    secret: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        for spec in OPTION_SPECS.values():
            value = getattr(self, spec.name)
            if value is not None:
                spec.check(value, f"Options({spec.name}=...)")


@dataclass(frozen=True)
class OptionSpec:
    """One option: how it is read from text, what is allowed, and its default."""

    name: str
    parse: Callable[[str], Any]
    types: tuple[type, ...]
    allowed: str
    is_allowed: Callable[[Any], bool]
    default: Any = None
    #: Whether all ranks need the same value.
    must_agree: bool = True
    #: Whether it has an effect in this version.
    in_use: bool = True

    @property
    def variable(self) -> str:
        """The environment variable of this option."""
        return PREFIX + self.name.upper()

    def check(self, value: Any, source: str) -> Any:
        """Return ``value`` if it is allowed, or raise an error that says what is."""
        right_type = isinstance(value, self.types) and not isinstance(value, bool)
        if not right_type or not self.is_allowed(value):
            raise self.refusal(value, source)
        return value

    def read(self, text: str) -> Any:
        """Return the value that an environment variable gives."""
        try:
            return self.check(self.parse(text), self.variable)
        except ValueError:
            # Quote the text as given: 'nan' is easier to find than nan.
            raise self.refusal(text, self.variable) from None

    def refusal(self, value: Any, source: str) -> ValueError:
        """The error for a value that is not allowed."""
        # A secret must not end up in a log because it was mistyped.
        shown = "<hidden>" if self.name == "secret" else repr(value)
        return ValueError(f"gflow: {source} is {shown}, but must be {self.allowed}.")


def _choice(name: str, *values: str) -> OptionSpec:
    allowed = "one of " + ", ".join(map(repr, values))
    return OptionSpec(name, str, (str,), allowed, lambda value: value in values, default=values[0])


def _count(name: str, least: int, default: int, unit: str = "") -> OptionSpec:
    allowed = f"a whole number{unit}, at least {least}"
    # The engine holds it in 64 bits.
    return OptionSpec(
        name, int, (int,), allowed, lambda value: least <= value < 2**63, default=default
    )


def _fraction(
    name: str, allowed: str, check: Callable[[float], bool], default: float
) -> OptionSpec:
    return OptionSpec(name, float, (int, float), allowed, check, default=default)


def _text(name: str, allowed: str, *, in_use: bool = True) -> OptionSpec:
    # Each rank may write to or connect through something else.
    return OptionSpec(name, str, (str,), allowed, bool, must_agree=False, in_use=in_use)


OPTION_SPECS: dict[str, OptionSpec] = {
    spec.name: spec
    for spec in (
        _choice("compress", "auto", "on", "off"),
        _choice(
            "method",
            "auto",
            "exact",
            "fp16",
            "bf16",
            "fp32",
            "int8",
            "int4",
            "int3",
            "quinary",
            "ternary",
            "chunks",
        ),
        _choice("max_noise", "low", "none", "any"),
        _choice("optimizer", "auto", "adam", "sgd"),
        _count("audit_steps", 0, 500),
        _fraction("density", "a number over 0 and at most 1", lambda value: 0 < value <= 1, 0.1),
        _count("chunk", 1, 32768),
        _count("warmup_steps", 2, 100),
        _count("ramp_steps", 0, 100),
        _choice("wire", "fp16", "bf16", "fp32"),
        _count("fusion_bytes", 0, 4 << 20, " of bytes"),
        _fraction("momentum", "a number from 0, below 1", lambda value: 0 <= value < 1, 0.0),
        _choice("keep_last_step", "off", "on"),
        _text("timeline", "the path of a file", in_use=False),
        _text("ifname", "the name of a network interface, such as 'eth0'"),
        _text("host_id", "a word that is the same for ranks that share memory"),
        _text("secret", "a word that all ranks of the job know"),
    )
}


@dataclass(frozen=True)
class Settings:
    """The options of one group: every value set and checked."""

    values: Mapping[str, Any] = dataclasses.field(repr=False)  # the secret is among them

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def to_agree_on(self) -> dict[str, Any]:
        """The values that must be the same on every rank; of the secret, only whether there is
        one."""
        agreed = {name: self.values[name] for name, spec in OPTION_SPECS.items() if spec.must_agree}
        return agreed | {"secret": "set" if self.values["secret"] else "not set"}


def resolve(options: Options | None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Combine options, environment and defaults, and refuse wrong values."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"gflow: pg_options must be a gflow.Options, got {type(options).__name__}. "
            "Options of another backend do not apply here."
        )
    _warn_about_unknown_variables(environ)
    values: dict[str, Any] = {}
    without_effect = []
    for name, spec in OPTION_SPECS.items():
        given = getattr(options, name) if options is not None else None
        if given is None and spec.variable in environ:
            given = spec.read(environ[spec.variable])
        values[name] = spec.default if given is None else given
        if given is not None and not spec.in_use and given != spec.default:
            without_effect.append(name)
    if without_effect:
        warnings.warn(
            f"gflow: {', '.join(without_effect)} has no effect yet in this version.",
            stacklevel=2,
        )
    return Settings(values)


#: The levels of ``GFLOW_LOG``, as Python's ``logging`` counts them.
_LOG_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}


def log_level(environ: Mapping[str, str] = os.environ) -> int | None:
    """The level that ``GFLOW_LOG`` asks for, or ``None`` if it is not set."""
    text = environ.get(LOG_VARIABLE)
    if not text:
        return None
    if text.lower() not in _LOG_LEVELS:
        allowed = ", ".join(map(repr, _LOG_LEVELS))
        raise ValueError(f"gflow: {LOG_VARIABLE} is {text!r}, but must be one of {allowed}.")
    return _LOG_LEVELS[text.lower()]


def _warn_about_unknown_variables(environ: Mapping[str, str]) -> None:
    known = [*(spec.variable for spec in OPTION_SPECS.values()), *MACHINE_VARIABLES, LOG_VARIABLE]
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            nearest = difflib.get_close_matches(variable, known, n=1, cutoff=0.0)
            hint = f"did you mean {nearest[0]}?" if nearest else ""
            warnings.warn(
                f"gflow: the environment variable {variable} is unknown and ignored; {hint}",
                stacklevel=3,
            )
