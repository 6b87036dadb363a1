"""The native half of gflow. tests/test_stub.py compares this with the module itself."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TypedDict, final

from torch import Tensor
from torch._C._distributed_c10d import Backend

# --- making a group

@final
class Endpoint:
    """Where this rank listens for the others of a group that is being made; used up by ``join``."""

    def __init__(self, address: str) -> None: ...
    @property
    def address(self) -> str: ...
    @property
    def fd_socket(self) -> str: ...

@final
class Compression:
    """How gradients are exchanged."""

    def __init__(
        self,
        enabled: bool,
        method: str,
        density: float,
        chunk: int,
        warmup_steps: int,
        ramp_steps: int,
        wire: str,
        fusion_bytes: int,
        momentum: float,
        max_noise: str,
        audit_steps: int,
        cores_are_busy: bool,
    ) -> None: ...

@final
class GroupConfig:
    """What a rank has to know to join a group. The lists have one entry per rank."""

    def __init__(
        self,
        name: str,
        rank: int,
        labels: Sequence[str],
        addresses: Sequence[str],
        hosts: Sequence[str],
        fd_sockets: Sequence[str],
        key: bytes,
        timeout: timedelta,
        compression: Compression,
    ) -> None: ...

@final
class Group:
    """This rank's membership in a group; used up by ``make_backend``."""

    @property
    def notice(self) -> str: ...

def join(endpoint: Endpoint, config: GroupConfig) -> Group: ...
def make_backend(
    group: Group,
    rank: int,
    size: int,
    timeout: timedelta,
    gloo: Backend,
    accelerator: str | None = None,
    inner: Backend | None = None,
    known_to_engine: bool = False,
) -> Backend: ...
def close_all_groups() -> None: ...

# --- what a group has done

class _BucketMetrics(TypedDict):
    number: int
    steps: int
    gradient_bytes: int
    carried_bytes: int
    wire_bytes: int
    density: float
    residual_ratio: float

class _Certificate(TypedDict):
    bucket: int
    step: int
    steps: int
    method: str
    cosine: float
    relative_error: float
    noise: float
    window_cosine: float
    window_relative_error: float

class _Metrics(TypedDict):
    hosts: int
    ranks_here: int
    compresses: bool
    buckets: list[_BucketMetrics]
    other_carried_bytes: int
    other_wire_bytes: int
    stage_seconds: dict[str, float]
    hidden_seconds: float
    exposed_seconds: float
    method: str
    certificates: list[_Certificate]
    gradient_buckets: int
    gradient_bytes: int
    exact_tensors: int
    exact_bytes: int
    collectives: dict[str, int]

def metrics(backend: Backend) -> _Metrics: ...
def topology(backend: Backend) -> tuple[int, int, int, int]: ...
def look_for_gpus() -> list[tuple[str, str, bool]]: ...

# --- what it keeps of gradients

def live_buckets(backend: Backend) -> list[tuple[int, int, int]]: ...
def shard_of(backend: Backend, bytes: int) -> tuple[int, int]: ...
def bucket_state(
    backend: Backend, number: int, step: int | None = None
) -> tuple[int, Tensor, Tensor, Tensor]: ...
def load_bucket(
    backend: Backend,
    number: int,
    step: int,
    residual: Tensor,
    velocity: Tensor,
    sizes: Tensor,
    owes: bool,
) -> None: ...
def set_momentum(backend: Backend, factor: float, nesterov: bool) -> None: ...
def set_stepping(backend: Backend, stepping: str, buckets: Sequence[int]) -> None: ...
def chosen_method(backend: Backend) -> str: ...
def set_chosen_method(backend: Backend, method: str) -> None: ...
def keep_for_undo(backend: Backend, enabled: bool) -> None: ...
def keep_last_step(backend: Backend) -> None: ...
def add_layout(
    backend: Backend,
    parameters: int,
    buckets: Sequence[int],
    indices: Sequence[int],
    numels: Sequence[int],
) -> None: ...
def record_step(backend: Backend, skipped: bool, factor: float) -> None: ...
def replace_broadcasts(backend: Backend, replacements: Sequence[Tensor]) -> None: ...

# --- the engine's log

@final
class LogRecord:
    """A record of the engine's log."""

    @property
    def level(self) -> int: ...
    @property
    def module(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def created(self) -> float: ...

def start_log(level: int) -> None: ...
def next_log_records() -> list[LogRecord]: ...
def stop_log() -> None: ...

# --- for tests of failures

def provoke(what: str) -> None: ...
