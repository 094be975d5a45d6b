"""The C library: where it is, its numbers, structures and functions.

tests/test_layout.py compares every structure and number here with the headers, by a C compiler.
"""

import ctypes
import enum
import functools
import glob
import importlib.util
import mmap
import os
import re
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)

from onebit.methods import METHODS

# --- Numbers -------------------------------------------------------------------------------------


class Status(enum.IntEnum):
    """onebit_status_t"""

    OK = 0
    IN_PROGRESS = 1
    WARNING = 2
    SKIPPED = -1
    ERROR_ARGUMENT = -2
    ERROR_MISMATCH = -3
    ERROR_MEMORY = -4
    ERROR_BUSY = -5
    ERROR_MESSAGE = -6
    ERROR_PEER = -7
    ERROR_TRANSPORT = -8
    ERROR_UNSUPPORTED = -9
    ERROR_DEVICE = -10
    ERROR_CHECKPOINT = -11
    ERROR_FILE = -12


class Operation(enum.IntEnum):
    """onebit_operation_t"""

    ALLREDUCE = 0
    ALLGATHER = 1
    REDUCE_SCATTER = 2


class Dtype(enum.IntEnum):
    """onebit_dtype_t"""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


class Scale(enum.IntEnum):
    """onebit_scale_t"""

    SCALE_RMS = 0
    SCALE_MEAN_ABSOLUTE = 1
    SCALE_LARGEST = 2


class Wire(enum.IntEnum):
    """onebit_wire_t"""

    WIRE_BITS = 0
    WIRE_DENSE = 1


class Profile(enum.IntEnum):
    """onebit_profile_t"""

    PROFILE_DEFAULT = 0
    PROFILE_DEEPSPEED = 1


class Schedule(enum.IntEnum):
    """onebit_schedule_t"""

    SCHEDULE_AUTOMATIC = 0
    SCHEDULE_EXCHANGE = 1
    SCHEDULE_ALLGATHER = 2
    SCHEDULE_HIERARCHICAL = 3


class Device(enum.IntEnum):
    """onebit_device_t"""

    DEVICE_HOST = 0
    DEVICE_CUDA = 1


class AdamExchange(enum.IntEnum):
    """onebit_adam_exchange_t"""

    ADAM_EXCHANGE_DEFAULT = 0
    ADAM_EXCHANGE_MOMENTUM = 1
    ADAM_EXCHANGE_STEP = 2


class Shards(enum.IntEnum):
    """onebit_shards_t"""

    SHARDS_NONE = 0
    SHARDS_STEP = 1
    SHARDS_PARAMETERS = 2


class Stage(enum.IntEnum):
    """onebit_stage_t"""

    STAGE_WARMUP = 0
    STAGE_COMPRESSED = 1


class OuterRule(enum.IntEnum):
    """onebit_outer_rule_t"""

    OUTER_MEAN = 0
    OUTER_MOMENTUM = 1
    OUTER_NESTEROV = 2


class Method(enum.IntEnum):
    """onebit_method_t"""

    METHOD_DENSE = 0
    METHOD_EIGHT_BITS = 1
    METHOD_ONE_BIT = 2
    METHOD_LOCAL_STEPS = 3


class Format(enum.IntEnum):
    """onebit_format_t"""

    FORMAT_TEXT = 0
    FORMAT_JSON = 1


ENUMS = (
    Status,
    Operation,
    Dtype,
    Scale,
    Wire,
    Profile,
    Schedule,
    Device,
    AdamExchange,
    Shards,
    Stage,
    OuterRule,
    Method,
    Format,
)

BLOCK_BUFFER = c_size_t(-1).value
FREEZE_AUTOMATIC = 0
FREEZE_NEVER = c_size_t(-1).value
WARMUP_STEPS = 40
WARMUP_NONE = c_size_t(-1).value
TABLE = -1
OUTER_DENSE = 32
OUTER_SPARSE = -1
CONSTANTS = {
    "ONEBIT_BLOCK_BUFFER": BLOCK_BUFFER,
    "ONEBIT_FREEZE_AUTOMATIC": FREEZE_AUTOMATIC,
    "ONEBIT_FREEZE_NEVER": FREEZE_NEVER,
    "ONEBIT_WARMUP_STEPS": WARMUP_STEPS,
    "ONEBIT_WARMUP_NONE": WARMUP_NONE,
    "ONEBIT_TABLE": c_size_t(TABLE).value,
    "ONEBIT_OUTER_DENSE": OUTER_DENSE,
    "ONEBIT_OUTER_SPARSE": c_size_t(OUTER_SPARSE).value,
}

# --- Structures: the fields are those of the headers, in their order ------------------------------


class PlanOptions(Structure):
    c_name = "onebit_plan_options_t"
    _fields_ = [
        ("size", c_size_t),
        ("operation", c_int),
        ("dtype", c_int),
        ("wire", c_int),
        ("profile", c_int),
        ("scale", c_int),
        ("block_size", c_size_t),
        ("chunk_size", c_size_t),
        ("no_error_feedback", c_int),
        ("threads", c_int),
        ("schedule", c_int),
        ("device", c_int),
        ("bits", c_int),
        ("max_bits", c_int),
        ("residual_copies", c_int),
    ]


class PlanInfo(Structure):
    c_name = "onebit_plan_info_t"
    _fields_ = [
        ("size", c_size_t),
        ("worker_residual_start", c_size_t),
        ("worker_residual_count", c_size_t),
        ("server_residual_start", c_size_t),
        ("server_residual_count", c_size_t),
        ("block_size", c_size_t),
        ("chunks", c_size_t),
        ("wire_bytes", c_uint64),
        ("memory_bytes", c_uint64),
        ("codec", c_char_p),
        ("transport", c_char_p),
        ("schedule", c_int),
        ("wire", c_int),
        ("chunk_size", c_size_t),
        ("hosts", c_int),
        ("ranks_per_host", c_int),
        ("bits", c_int),
        ("min_bits", c_int),
        ("max_bits", c_int),
        ("moves", c_uint64),
        ("residual_ratio", c_double),
    ]


class TensorDescription(Structure):
    c_name = "onebit_tensor_t"
    _fields_ = [
        ("parameter", c_void_p),
        ("gradient", c_void_p),
        ("count", c_size_t),
        ("weight_decay", c_float),
        ("learning_rate_factor", c_float),
        ("uncompressed", c_int),
    ]


class OptimizerOptions(Structure):
    c_name = "onebit_optimizer_options_t"
    _fields_ = [
        ("profile", c_int),
        ("scale", c_int),
        ("block_size", c_size_t),
        ("chunk_size", c_size_t),
        ("no_error_feedback", c_int),
        ("threads", c_int),
        ("bucket_size", c_size_t),
        ("schedule", c_int),
        ("device", c_int),
        ("gradient_dtype", c_int),
        ("parameter_dtype", c_int),
        ("gradient_factor", c_double),
        ("clip_norm", c_double),
        ("initial_loss_scale", c_double),
        ("loss_scale_interval", c_size_t),
        ("min_loss_scale", c_double),
        ("dense_below", c_size_t),
        ("warmup_bits", c_int),
        ("bits", c_int),
        ("max_bits", c_int),
        ("residual_copies", c_int),
    ]


def _options_of(method):
    """The structure of an optimizer's options."""
    types = {"double": c_double, "int": c_int, "size_t": c_size_t}
    fields = [(name, types[type_name]) for name, type_name in method.typed()]
    body = {
        "c_name": f"onebit_{method.name}_options_t",
        "_fields_": [("size", c_size_t), *fields, ("common", OptimizerOptions)],
    }
    return type(f"{method.kind}Options", (Structure,), body)


OPTIONS = {method.kind: _options_of(method) for method in METHODS}


class OptimizerInfo(Structure):
    c_name = "onebit_optimizer_info_t"
    _fields_ = [
        ("size", c_size_t),
        ("stage", c_int),
        ("steps", c_uint64),
        ("skipped", c_uint64),
        ("freeze_step", c_uint64),
        ("variance_ratio", c_double),
        ("momentum_norm", c_double),
        ("residual_norm", c_double),
        ("warmup_bytes", c_uint64),
        ("compressed_bytes", c_uint64),
        ("memory_bytes", c_uint64),
        ("name", c_char_p),
        ("loss_scale", c_double),
        ("gradient_norm", c_double),
        ("synchronized", c_int),
        ("exchanges", c_uint64 * 3),
        ("bits", c_double),
        ("moves", c_uint64),
    ]


class OptimizerStatistics(Structure):
    c_name = "onebit_optimizer_statistics_t"
    _fields_ = [
        ("size", c_size_t),
        ("info", OptimizerInfo),
        ("residual_ratio", c_double),
        ("dense_bytes", c_uint64),
        ("bits_bytes", c_uint64),
        ("seconds", c_double),
        ("compress_seconds", c_double),
        ("network_seconds", c_double),
        ("update_seconds", c_double),
    ]


class TensorStatistics(Structure):
    c_name = "onebit_tensor_statistics_t"
    _fields_ = [
        ("size", c_size_t),
        ("count", c_size_t),
        ("uncompressed", c_int),
        ("parameter_norm", c_double),
        ("momentum_norm", c_double),
        ("residual_norm", c_double),
        ("residual_ratio", c_double),
        ("coefficient", c_double),
        ("factor", c_double),
        ("bits", c_int),
        ("moves", c_uint64),
    ]


class OuterOptions(Structure):
    c_name = "onebit_outer_options_t"
    _fields_ = [
        ("size", c_size_t),
        ("local_steps", c_size_t),
        ("rule", c_int),
        ("learning_rate", c_double),
        ("momentum", c_double),
        ("bits", c_int),
        ("fragments", c_size_t),
        ("delay", c_size_t),
        ("mixing", c_double),
        ("weighted", c_int),
        ("parameter_dtype", c_int),
        ("scale", c_int),
        ("block_size", c_size_t),
        ("chunk_size", c_size_t),
        ("no_error_feedback", c_int),
        ("threads", c_int),
        ("schedule", c_int),
        ("device", c_int),
        ("dense_below", c_size_t),
    ]


class OuterInfo(Structure):
    c_name = "onebit_outer_info_t"
    _fields_ = [
        ("size", c_size_t),
        ("local_steps", c_size_t),
        ("rule", c_int),
        ("learning_rate", c_double),
        ("momentum", c_double),
        ("mixing", c_double),
        ("bits", c_int),
        ("fragments", c_size_t),
        ("delay", c_size_t),
        ("steps", c_uint64),
        ("exchanges", c_uint64),
        ("skipped", c_uint64),
        ("exchange_bytes", c_uint64),
        ("memory_bytes", c_uint64),
        ("drift_norm", c_double),
        ("residual_norm", c_double),
        ("momentum_norm", c_double),
        ("checksum", c_uint32),
        ("in_flight", c_int),
    ]


class SitesOptions(Structure):
    c_name = "onebit_sites_options_t"
    _fields_ = [("size", c_size_t), ("patience", c_double), ("quorum", c_int)]


class SitesInfo(Structure):
    c_name = "onebit_sites_info_t"
    _fields_ = [
        ("size", c_size_t),
        ("sites", c_int),
        ("site", c_int),
        ("quorum", c_int),
        ("patience", c_double),
        ("late", c_uint64),
        ("rounds", c_uint64),
        ("left_out", c_uint64),
        ("caught_up", c_uint64),
    ]


SEND = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(c_void_p))
RECEIVE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, POINTER(c_void_p))
TEST = CFUNCTYPE(c_int, c_void_p, c_void_p, c_double, POINTER(c_size_t))
CANCEL = CFUNCTYPE(None, c_void_p, c_void_p)
ABORT = CFUNCTYPE(None, c_void_p)
MESSAGE = CFUNCTYPE(c_void_p, c_void_p, c_int)
PROGRESS = CFUNCTYPE(None, c_void_p)
RELEASE = CFUNCTYPE(None, c_void_p)


class TransportCallbacks(Structure):
    c_name = "onebit_transport_callbacks_t"
    _fields_ = [
        ("size", c_size_t),
        ("context", c_void_p),
        ("send", SEND),
        ("receive", RECEIVE),
        ("test", TEST),
        ("cancel", CANCEL),
        ("abort", ABORT),
        ("message", MESSAGE),
        ("progress", PROGRESS),
        ("release", RELEASE),
        ("host", c_char_p),
        ("largest_tag", c_int),
        ("timeout", c_double),
    ]


class SocketsOptions(Structure):
    c_name = "onebit_sockets_options_t"
    _fields_ = [
        ("size", c_size_t),
        ("rank", c_int),
        ("ranks", c_int),
        ("rendezvous", c_char_p),
        ("host", c_char_p),
        ("secret", c_char_p),
        ("streams", c_int),
        ("timeout", c_double),
    ]


class MethodChoice(Structure):
    c_name = "onebit_method_choice_t"
    _fields_ = [
        ("size", c_size_t),
        ("elements", c_size_t),
        ("compute", c_double),
        ("methods", c_int),
        ("blocking", c_int),
        ("current", c_int),
        ("step", c_double),
        ("extra", c_double * len(Method)),
        ("bytes_a_day", c_double),
        ("exchange", c_double * len(Method)),
        ("method", c_int),
        ("expected", c_double * len(Method)),
        ("local_steps", c_size_t),
        ("warmup_steps", c_size_t),
        ("dense_below", c_size_t),
        ("text", c_char * 256),
    ]


EXCHANGE = CFUNCTYPE(c_int, c_void_p, c_int, c_size_t, POINTER(c_double))

STRUCTURES = (
    PlanOptions,
    PlanInfo,
    TensorDescription,
    OptimizerOptions,
    *OPTIONS.values(),
    OptimizerInfo,
    OptimizerStatistics,
    TensorStatistics,
    OuterOptions,
    OuterInfo,
    SitesOptions,
    SitesInfo,
    TransportCallbacks,
    SocketsOptions,
    MethodChoice,
)


def sized(structure):
    """A structure of zeros that knows its size, as the _INIT macros make them."""
    made = structure()
    if structure._fields_[0][0] == "size":
        made.size = ctypes.sizeof(structure)
    return made


def fields_of(structure):
    """A structure as a dictionary: without `size`, text as str."""
    found = {}
    for name, *_ in structure._fields_:
        value = getattr(structure, name)
        if isinstance(value, Structure):
            found[name] = fields_of(value)
        elif isinstance(value, bytes):
            found[name] = value.decode()
        elif isinstance(value, ctypes.Array):
            found[name] = tuple(value)
        elif name != "size":
            found[name] = value
    return found


# --- Functions: those that return an onebit_status_t, then the others ----------------------------

HANDLE = c_void_p
OUT = POINTER(c_void_p)
STATUS_FUNCTIONS = {
    "onebit_comm_create_self": [OUT],
    "onebit_comm_create_loopback": [c_int, OUT],
    "onebit_comm_create_loopback_hosts": [c_int, c_int, OUT],
    "onebit_comm_create_custom": [POINTER(TransportCallbacks), c_int, c_int, OUT],
    "onebit_comm_create_sockets": [POINTER(SocketsOptions), OUT],
    "onebit_progress": [HANDLE],
    "onebit_comm_abort": [HANDLE],
    "onebit_comm_shrink": [HANDLE, OUT],
    "onebit_plan_create": [HANDLE, c_size_t, POINTER(PlanOptions), OUT],
    "onebit_plan_destroy": [HANDLE],
    "onebit_plan_get_info": [HANDLE, POINTER(PlanInfo)],
    "onebit_plan_export_residual": [HANDLE, c_void_p, c_void_p],
    "onebit_plan_import_residual": [HANDLE, c_void_p, c_void_p],
    "onebit_plan_reset_residual": [HANDLE],
    "onebit_plan_set_bits": [HANDLE, c_int],
    "onebit_plan_fit_budget": [POINTER(HANDLE), c_size_t, c_double],
    "onebit_plan_reset": [HANDLE],
    "onebit_allreduce": [c_void_p, c_void_p, HANDLE],
    "onebit_allgather": [c_void_p, c_void_p, HANDLE],
    "onebit_reduce_scatter": [c_void_p, c_void_p, HANDLE],
    "onebit_iallreduce": [c_void_p, c_void_p, HANDLE, OUT],
    "onebit_iallgather": [c_void_p, c_void_p, HANDLE, OUT],
    "onebit_ireduce_scatter": [c_void_p, c_void_p, HANDLE, OUT],
    "onebit_test": [OUT],
    "onebit_wait": [OUT],
    **{
        f"onebit_{method.name}_create": [
            HANDLE,
            POINTER(TensorDescription),
            c_size_t,
            POINTER(OPTIONS[method.kind]),
            OUT,
        ]
        for method in METHODS
    },
    "onebit_optimizer_step": [HANDLE, c_float],
    "onebit_optimizer_begin": [HANDLE, c_float],
    "onebit_optimizer_ready": [HANDLE, c_size_t],
    "onebit_optimizer_set_gradient": [HANDLE, c_size_t, c_void_p],
    "onebit_optimizer_set_learning_rate_factor": [HANDLE, c_size_t, c_float],
    "onebit_optimizer_set_weight_decay": [HANDLE, c_size_t, c_float],
    "onebit_optimizer_set_beta1": [HANDLE, c_double],
    "onebit_optimizer_move": [HANDLE, HANDLE],
    "onebit_optimizer_shrink": [HANDLE, OUT],
    "onebit_optimizer_compare": [HANDLE],
    "onebit_optimizer_set_compare_interval": [HANDLE, c_uint64],
    "onebit_optimizer_set_tag": [HANDLE, c_uint64],
    "onebit_optimizer_take_parameters": [HANDLE],
    "onebit_optimizer_get_loss_scale": [HANDLE, POINTER(c_double)],
    "onebit_optimizer_get_info": [HANDLE, POINTER(OptimizerInfo)],
    "onebit_optimizer_get_statistics": [HANDLE, POINTER(OptimizerStatistics)],
    "onebit_optimizer_get_tensor_statistics": [HANDLE, c_size_t, POINTER(TensorStatistics)],
    "onebit_optimizer_describe": [HANDLE, c_int, c_char_p, c_size_t, POINTER(c_size_t)],
    "onebit_optimizer_check": [HANDLE, POINTER(c_size_t)],
    "onebit_optimizer_save": [HANDLE, c_void_p, c_size_t, POINTER(c_size_t)],
    "onebit_optimizer_save_whole": [HANDLE, c_void_p, c_size_t, POINTER(c_size_t)],
    "onebit_optimizer_load": [HANDLE, POINTER(c_void_p), POINTER(c_size_t), c_int],
    "onebit_optimizer_save_files": [HANDLE, c_char_p],
    "onebit_optimizer_load_files": [HANDLE, c_char_p],
    "onebit_outer_create": [
        HANDLE,
        POINTER(TensorDescription),
        c_size_t,
        POINTER(OuterOptions),
        OUT,
    ],
    "onebit_outer_create_sites": [
        HANDLE,
        HANDLE,
        POINTER(TensorDescription),
        c_size_t,
        POINTER(OuterOptions),
        POINTER(SitesOptions),
        OUT,
    ],
    "onebit_outer_get_sites": [HANDLE, POINTER(SitesInfo)],
    "onebit_outer_step": [HANDLE, c_double],
    "onebit_outer_synchronize": [HANDLE],
    "onebit_outer_get_consensus": [HANDLE, c_size_t, c_void_p],
    "onebit_outer_get_info": [HANDLE, POINTER(OuterInfo)],
    "onebit_outer_check": [HANDLE],
    "onebit_outer_save": [HANDLE, c_void_p, c_size_t, POINTER(c_size_t)],
    "onebit_outer_load": [HANDLE, POINTER(c_void_p), POINTER(c_size_t), c_int],
    "onebit_outer_save_files": [HANDLE, c_char_p],
    "onebit_outer_load_files": [HANDLE, c_char_p],
    "onebit_outer_move": [HANDLE, HANDLE],
    "onebit_outer_shrink": [HANDLE, OUT],
    "onebit_method_measure": [HANDLE, POINTER(MethodChoice), EXCHANGE, c_void_p],
    "onebit_method_choose": [HANDLE, POINTER(MethodChoice)],
}
# Of a library that is built with CUDA.
DEVICE_FUNCTIONS = {
    "onebit_allreduce_stream": [c_void_p, c_void_p, HANDLE, c_void_p],
    "onebit_allgather_stream": [c_void_p, c_void_p, HANDLE, c_void_p],
    "onebit_reduce_scatter_stream": [c_void_p, c_void_p, HANDLE, c_void_p],
    "onebit_plan_synchronize": [HANDLE],
    "onebit_plan_get_calls": [HANDLE, POINTER(c_uint64), POINTER(c_uint64)],
    "onebit_scale_result_stream": [c_void_p, c_float, HANDLE, c_void_p],
    "onebit_optimizer_begin_stream": [HANDLE, c_float, c_void_p],
    "onebit_optimizer_ready_stream": [HANDLE, c_size_t, c_void_p],
    "onebit_optimizer_step_stream": [HANDLE, c_float, c_void_p],
    "onebit_optimizer_set_learning_rate_pointer": [HANDLE, c_void_p],
    "onebit_optimizer_synchronize": [HANDLE],
}
OTHER_FUNCTIONS = {
    "onebit_last_error": (c_char_p, []),
    "onebit_version": (c_char_p, []),
    "onebit_plan_explain": (c_char_p, [HANDLE]),
    "onebit_comm_rank": (c_int, [HANDLE]),
    "onebit_comm_size": (c_int, [HANDLE]),
    "onebit_comm_hosts": (c_int, [HANDLE]),
    "onebit_comm_bytes_sent": (c_uint64, [HANDLE]),
    "onebit_comm_destroy": (None, [HANDLE]),
    "onebit_optimizer_destroy": (None, [HANDLE]),
    "onebit_outer_destroy": (None, [HANDLE]),
}


HERE = os.path.dirname(os.path.abspath(__file__))


def candidates():
    """Where the library may be, the first that is said to be there: what ONEBIT_LIBRARY names and
    nothing else; the package's own; the system's."""
    named = os.environ.get("ONEBIT_LIBRARY")
    if named:
        return [named]
    own = os.path.join(HERE, "libonebit_python.so")
    if os.path.exists(own):
        return [own]
    import ctypes.util  # which asks compilers, by programs that it starts

    return [ctypes.util.find_library("onebit"), "libonebit.so.0", "libonebit.so"]


def _open_nvidia_libraries(path):
    """Of a library with kernels: CUDA's runtime and NCCL as torch's packages have them, before it.
    The linker then takes these by their names, here and when torch is imported later: any other NCCL
    that came first would be torch's too, and may lack what torch calls."""
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as all_of_it:
        needed = set(re.findall(rb"\0(lib(?:cudart|nccl)\.so\.\d+)\0", all_of_it))
    if needed:
        found = importlib.util.find_spec("nvidia")
        for folder in found.submodule_search_locations if found else ():
            for name in sorted(needed):
                for one in glob.glob(os.path.join(folder, "*/lib", name.decode())):
                    ctypes.CDLL(one)


def _open():
    reasons = []
    for name in filter(None, candidates()):
        try:
            _open_nvidia_libraries(name)
            return ctypes.CDLL(name)
        except OSError as reason:
            reasons.append(str(reason))
    raise ImportError(
        "the library was not found: `pip install` builds it into the package, `make install` into the "
        "system; or set ONEBIT_LIBRARY to its path\n  "
        + "\n  ".join(reasons)
    )


def package_version():
    """The package's version: what the build wrote down, or in a checkout that of the headers."""
    try:
        from onebit._version import version as built
    except ImportError:
        with open(os.path.join(HERE, "../../../include/onebit/status.h")) as header:
            numbers = re.findall(r"define ONEBIT_VERSION_\w+ (\d+)", header.read())
        return ".".join(numbers)
    return built


def _check_version(found):
    """Before 1.0 a minor version may change the interface."""
    wanted = package_version().rsplit(".", 1)[0]
    version = found.onebit_version().decode()
    if version.rsplit(".", 1)[0] != wanted:
        raise ImportError(f"{found._name} is onebit {version}; this package is for {wanted}")


@functools.lru_cache(maxsize=None)
def library():
    """The library, opened by the first call."""
    found = _open()
    try:
        for name, (result, arguments) in OTHER_FUNCTIONS.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
        _check_version(found)
        for name, arguments in STATUS_FUNCTIONS.items():
            function = getattr(found, name)
            function.restype, function.argtypes = c_int, arguments
        for name, arguments in DEVICE_FUNCTIONS.items():
            if hasattr(found, name):
                function = getattr(found, name)
                function.restype, function.argtypes = c_int, arguments
    except AttributeError as reason:  # the reason names the library and the function
        raise ImportError(f"the library is older than this package: {reason}") from None
    return found


def library_path() -> str:
    """What the library was opened as."""
    return library()._name


def version() -> str:
    """The library's version, "major.minor.patch"."""
    return library().onebit_version().decode()


def enum_value(kind, value, argument):
    """A member of `kind` from itself, its number, or a part of its name ("rms", "deepspeed")."""
    from onebit.errors import wrong

    if isinstance(value, str):
        prefix = next(iter(kind)).name.rpartition("_")[0]
        names = {member.name.lower(): member for member in kind}
        found = names.get(value.lower(), names.get(f"{prefix}_{value}".lower()))
        if found is None:
            raise wrong(f"{argument} is {value!r}, not one of {', '.join(names)}")
        return found
    try:
        return kind(value)
    except ValueError:
        raise wrong(f"{argument} is {value!r}, not a {kind.__name__}") from None


# Fields that are numbers of an enum.
ENUM_FIELDS = {
    "operation": Operation,
    "dtype": Dtype,
    "wire": Wire,
    "profile": Profile,
    "scale": Scale,
    "schedule": Schedule,
    "device": Device,
    "exchange": AdamExchange,
    "shards": Shards,
    "gradient_dtype": Dtype,
    "parameter_dtype": Dtype,
    "rule": OuterRule,
}


def fill(structure, options, common=None):
    """Options by keyword into a structure, and what it has not into its `common`."""
    names = {name for name, *_ in structure._fields_} - {"size", "common"}
    for name, value in options.items():
        if name in names:
            kind = ENUM_FIELDS.get(name)
            setattr(structure, name, value if kind is None else enum_value(kind, value, name))
        elif common is not None:
            fill(common, {name: value})
        else:
            raise TypeError(f"there is no option {name!r}")
    return structure
