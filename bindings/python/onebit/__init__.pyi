# The types of the public names: what type checkers and editors see. tests/test_types.py compares this
# with the package.

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypedDict

from typing_extensions import Self, Unpack

from onebit._native import BLOCK_BUFFER as BLOCK_BUFFER
from onebit._native import FREEZE_AUTOMATIC as FREEZE_AUTOMATIC
from onebit._native import FREEZE_NEVER as FREEZE_NEVER
from onebit._native import OUTER_DENSE as OUTER_DENSE
from onebit._native import OUTER_SPARSE as OUTER_SPARSE
from onebit._native import TABLE as TABLE
from onebit._native import WARMUP_NONE as WARMUP_NONE
from onebit._native import WARMUP_STEPS as WARMUP_STEPS
from onebit._native import AdamExchange as AdamExchange
from onebit._native import Device
from onebit._native import Dtype as Dtype
from onebit._native import Operation as Operation
from onebit._native import OuterRule as OuterRule
from onebit._native import Profile as Profile
from onebit._native import Scale as Scale
from onebit._native import Schedule as Schedule
from onebit._native import Shards as Shards
from onebit._native import Stage as Stage
from onebit._native import Status as Status
from onebit._native import Wire as Wire
from onebit._native import library_path as library_path
from onebit._native import package_version as package_version
from onebit._native import version as version
from onebit.errors import Error as Error
from onebit.errors import OnebitWarning as OnebitWarning
from onebit.methods import NAMES as NAMES
from onebit.transport import Operation as TransportOperation
from onebit.transport import Transport as Transport

__version__: str

# A numpy array, a torch tensor or a buffer of float32, bfloat16 or float16: numpy and torch need not
# be there, so their types are not named.
_Array = Any
_Path = str | os.PathLike[str]

class Communicator:
    transport: str
    @classmethod
    def self_(cls) -> Self: ...
    @classmethod
    def loopback(cls, size: int, hosts: int = 1) -> list[Self]: ...
    @classmethod
    def mpi(cls, comm: Any) -> Self: ...
    @classmethod
    def sockets(
        cls,
        rank: int | None = None,
        size: int | None = None,
        address: str | None = None,
        host: str | None = None,
        secret: str | None = None,
        streams: int = 0,
        timeout: float | None = None,
    ) -> Self: ...
    @classmethod
    def torch(
        cls,
        group: Any = None,
        timeout: float | None = None,
        transport: str = "automatic",
        streams: int = 0,
    ) -> Self: ...
    @classmethod
    def nccl(cls, group: Any = None, timeout: float | None = None) -> Self: ...
    @classmethod
    def custom(
        cls,
        transport: Transport,
        rank: int,
        size: int,
        host: str | None = None,
        largest_tag: int = 0,
        timeout: float = 0.0,
    ) -> Self: ...
    @property
    def handle(self) -> Any: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def hosts(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...
    def progress(self) -> None: ...
    def abort(self) -> None: ...
    def shrink(self) -> Self: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class _PlanOptions(TypedDict, total=False):
    operation: Operation | str
    dtype: Dtype | str
    wire: Wire | str
    profile: Profile | str
    scale: Scale | str
    block_size: int
    chunk_size: int
    no_error_feedback: int
    threads: int
    schedule: Schedule | str
    device: Device | str
    bits: int
    max_bits: int
    residual_copies: int

class Request:
    def test(self) -> Status: ...
    def wait(self) -> Status: ...

class Plan:
    count: int
    operation: Operation
    dtype: Dtype
    def __init__(
        self, comm: Communicator, count: int, **options: Unpack[_PlanOptions]
    ) -> None: ...
    @property
    def handle(self) -> Any: ...
    def allreduce(self, sendbuf: _Array, recvbuf: _Array) -> Status: ...
    def allgather(self, sendbuf: _Array, recvbuf: _Array) -> Status: ...
    def reduce_scatter(self, sendbuf: _Array, recvbuf: _Array) -> Status: ...
    def iallreduce(self, sendbuf: _Array, recvbuf: _Array) -> Request: ...
    def iallgather(self, sendbuf: _Array, recvbuf: _Array) -> Request: ...
    def ireduce_scatter(self, sendbuf: _Array, recvbuf: _Array) -> Request: ...
    def synchronize(self) -> Status: ...
    def calls(self) -> tuple[int, int]: ...
    def scale_result(self, recvbuf: _Array, factor: float) -> None: ...
    def info(self) -> dict[str, Any]: ...
    def explain(self) -> str: ...
    def export_residual(self) -> tuple[Any, Any]: ...
    def import_residual(self, worker: _Array = None, server: _Array = None) -> None: ...
    def set_bits(self, bits: int) -> None: ...
    def reset_residual(self) -> None: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class Tensor(NamedTuple):
    parameter: _Array
    gradient: _Array = None
    weight_decay: float = 0.0
    learning_rate_factor: float = 1.0
    uncompressed: int = 0

_Tensors = Iterable[Tensor | tuple[_Array, _Array]]

class _Stateful:
    @property
    def handle(self) -> Any: ...
    def save(self) -> bytes: ...
    def load(self, parts: Sequence[bytes]) -> None: ...
    def save_files(self, directory: _Path) -> None: ...
    def load_files(self, directory: _Path) -> None: ...
    def move(self, comm: Communicator) -> None: ...
    def shrink(self) -> Communicator: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class Optimizer(_Stateful):
    def __init__(self, comm: Communicator, tensors: _Tensors, **options: Any) -> None: ...
    def step(self, learning_rate: float) -> Status: ...
    def synchronize(self) -> Status: ...
    def begin(self, learning_rate: float) -> None: ...
    def ready(self, tensor: int) -> None: ...
    def set_gradient(self, tensor: int, gradient: _Array) -> None: ...
    def set_learning_rate_pointer(self, rate: _Array) -> None: ...
    def set_learning_rate_factor(self, tensor: int, factor: float) -> None: ...
    def set_weight_decay(self, tensor: int, weight_decay: float) -> None: ...
    def set_beta1(self, beta1: float) -> None: ...
    def set_tag(self, tag: int) -> None: ...
    def take_parameters(self) -> None: ...
    def compare(self) -> None: ...
    def save_whole(self) -> bytes: ...
    def set_compare_interval(self, steps: int) -> None: ...
    @property
    def loss_scale(self) -> float: ...
    def info(self) -> dict[str, Any]: ...
    def statistics(self) -> dict[str, Any]: ...
    def tensor_statistics(self, tensor: int) -> dict[str, Any]: ...
    def describe(self) -> str: ...
    def describe_json(self) -> dict[str, Any]: ...
    def check(self) -> tuple[int, str] | None: ...

class _OptimizerOptions(TypedDict, total=False):
    profile: Profile | str
    scale: Scale | str
    block_size: int
    chunk_size: int
    no_error_feedback: int
    threads: int
    bucket_size: int
    schedule: Schedule | str
    device: Device | str
    gradient_dtype: Dtype | str
    parameter_dtype: Dtype | str
    gradient_factor: float
    clip_norm: float
    initial_loss_scale: float
    loss_scale_interval: int
    min_loss_scale: float
    dense_below: int
    warmup_bits: int
    bits: int
    max_bits: int
    residual_copies: int

class _EfficientAdamOptions(_OptimizerOptions, total=False):
    beta1: float
    beta2: float
    epsilon: float
    gain: float
    trust_ratio: int
    min_ratio: float
    max_ratio: float
    warmup_steps: int

class _AdamOptions(_OptimizerOptions, total=False):
    beta1: float
    beta2: float
    epsilon: float
    freeze_step: int
    freeze_threshold: float
    no_bias_correction: int
    exchange: AdamExchange | str
    shards: Shards | str

class _LambOptions(_OptimizerOptions, total=False):
    beta1: float
    beta2: float
    epsilon: float
    freeze_step: int
    freeze_threshold: float
    no_bias_correction: int
    max_coefficient: float
    min_coefficient: float
    coefficient_beta: float
    max_factor: float
    min_factor: float
    factor_change: float

class _ZeroOneAdamOptions(_OptimizerOptions, total=False):
    beta1: float
    beta2: float
    epsilon: float
    no_bias_correction: int
    variance_freeze_step: int
    variance_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

class _MomentumOptions(_OptimizerOptions, total=False):
    momentum: float
    warmup_steps: int

class _LionOptions(_OptimizerOptions, total=False):
    beta1: float
    beta2: float
    beta3: float
    epsilon: float

class EfficientAdam(Optimizer):
    def __init__(
        self, comm: Communicator, tensors: _Tensors, **options: Unpack[_EfficientAdamOptions]
    ) -> None: ...

class Adam(Optimizer):
    def __init__(
        self, comm: Communicator, tensors: _Tensors, **options: Unpack[_AdamOptions]
    ) -> None: ...

class Lamb(Optimizer):
    def __init__(
        self, comm: Communicator, tensors: _Tensors, **options: Unpack[_LambOptions]
    ) -> None: ...

class ZeroOneAdam(Optimizer):
    def __init__(
        self, comm: Communicator, tensors: _Tensors, **options: Unpack[_ZeroOneAdamOptions]
    ) -> None: ...

class Momentum(Optimizer):
    def __init__(
        self, comm: Communicator, tensors: _Tensors, **options: Unpack[_MomentumOptions]
    ) -> None: ...

class Lion(Optimizer):
    def __init__(
        self, comm: Communicator, tensors: _Tensors, **options: Unpack[_LionOptions]
    ) -> None: ...

class _OuterOptions(TypedDict, total=False):
    local_steps: int
    rule: OuterRule | str
    learning_rate: float
    momentum: float
    bits: int
    fragments: int
    delay: int
    mixing: float
    weighted: int
    parameter_dtype: Dtype | str
    scale: Scale | str
    block_size: int
    chunk_size: int
    no_error_feedback: int
    threads: int
    schedule: Schedule | str
    device: Device | str
    dense_below: int

class Outer(_Stateful):
    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[_Array],
        uncompressed: Sequence[int] = (),
        stage: str = "auto",
        **options: Unpack[_OuterOptions],
    ) -> None: ...
    def step(self, weight: float = 1.0) -> Status: ...
    def synchronize(self) -> Status: ...
    def consensus(self, number: int, out: _Array) -> _Array: ...
    def info(self) -> dict[str, Any]: ...
    def check(self) -> str | None: ...

class OuterSites(Outer):
    def __init__(
        self,
        site: Communicator,
        between: Communicator | None,
        parameters: Sequence[_Array],
        uncompressed: Sequence[int] = (),
        patience: float = 0.0,
        quorum: int = 0,
        stage: str = "auto",
        **options: Unpack[_OuterOptions],
    ) -> None: ...
    def sites(self) -> dict[str, Any]: ...
    def move(self, between: Communicator | None) -> None: ...
    def shrink(self) -> Communicator | None: ...
