"""FSDP2 (torch.distributed.fsdp.fully_shard) with compressed gradients and parameters.

    fully_shard(layer) ...; fully_shard(model)
    compression = onebit.torch.fsdp.compress(model, reduce_bits=8, gather_bits=8)

docs/python-trainers.md#fsdp2 describes which values are sent.
"""

import itertools

import torch
import torch.distributed as dist

from onebit._native import Error, Status, argument_error
from onebit.communicator import Communicator
from onebit.plan import Plan
from onebit.torch.hook import DTYPES, as_tensor

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except (ImportError, ValueError):  # before torch 2.8; Python 3.11 cannot import this with torch 1.13
    FSDPModule, AllGather, ReduceScatter = None, object, object

_BITS = (1, 2, 4, 8)
_MARK = "_onebit_compression"  # an attribute of modules that have compressed collectives


class Compression:
    """The collectives that `compress` has put into a model. It has these counters:

    exchanges: compressed reduce-scatters and all-gathers
    skipped: exchanges that torch made instead, since some rank's input was not finite; on a device those
        whose result is not-a-number, as far as the host knows at this time
    dense: exchanges that torch made because of their type, or because they were the first of a `change`
    dropped: residuals and copies that were dropped because a group of parameters has changed its size, for
        example when other parameters have gradients
    """

    def __init__(self, modules, error_feedback, timeout, transport, options):
        self.exchanges = self.dense = self.dropped = self._skipped = 0
        self._on_device = set()  # the plans that are on a device
        self._modules, self._error_feedback = modules, error_feedback
        self._comms, self._free = {}, {}
        self._timeout, self._transport, self._options = timeout, transport, options
        self.parts = {}  # by the module's name: (gradients' part, parameters' part), each None if torch exchanges

    @property
    def skipped(self):
        return self._skipped + sum(plan.calls()[1] for plan in self._on_device)

    @property
    def bytes_sent(self):
        """Returns the bytes of compressed exchanges that this rank has sent."""
        return sum(comm.bytes_sent for comm in self._comms.values())

    def _comm(self, group, device):
        """Returns the group's communicator. All ranks of the group create it in their first exchange."""
        key = group, device.type
        if key not in self._comms:
            if device.type == "cuda":
                comm = Communicator.nccl(group, self._timeout)
            else:
                comm = Communicator.torch(group, self._timeout, self._transport)
            self._comms[key] = comm
        return self._comms[key]

    def plan(self, group, device, count, operation, **options):
        """Creates a plan for a group of parameters. Collective."""
        if device.type == "cuda":
            options["device"] = "cuda"
        options = {"operation": operation, **self._options, **options}
        plan = Plan(self._comm(group, device), count, **options)
        if plan.on_device:
            self._on_device.add(plan)
        return plan

    def retire(self, plan):
        if plan.on_device:
            self._skipped += plan.calls()[1]
            self._on_device.discard(plan)
        plan.close()

    def take(self, key, make):
        """Returns a plan without a residual that no exchange uses at this time. All ranks take and return
        plans in the same order."""
        free = self._free.setdefault(key, [])
        return free.pop() if free else make()

    def give_back(self, key, plan):
        self._free[key].append(plan)

    def state_dict(self):
        """Returns this rank's residuals by the module's name. The copies for `change` are not included: a
        resumed run begins with an exact gather."""
        return {
            name: reduce.residual()
            for name, (reduce, _) in self.parts.items()
            if reduce is not None and reduce.plan is not None and self._error_feedback
        }

    def load_state_dict(self, state_dict):
        """Loads residuals in the first exchange of each group of parameters. If the size of a group has
        changed, its residual is dropped and counted. Also calls `reset`."""
        if not self._error_feedback:
            self.dropped += len(state_dict)
        for name, residual in state_dict.items() if self._error_feedback else ():
            self.parts[name][0].loaded = residual
        self.reset()

    def reset(self):
        """Drops the copies for `change`, so that the next gather of each module is exact. Call it on all
        ranks after something other than a step has changed parameters, such as loading a checkpoint."""
        for _, gather in self.parts.values():
            if gather is not None:
                gather.copy = None

    def close(self):
        """Makes torch exchange again, and frees plans and communicators. Call it on all ranks."""
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as own

        for name, (reduce, gather) in self.parts.items():
            vars(self._modules[name]).pop(_MARK, None)
            if reduce is not None:
                self._modules[name].set_custom_reduce_scatter(own.DefaultReduceScatter())
                reduce.forget()
            if gather is not None:
                self._modules[name].set_custom_all_gather(own.DefaultAllGather())
                gather.forget()
        for plan in itertools.chain(*self._free.values()):
            self.retire(plan)
        self._free.clear()
        for comm in self._comms.values():
            comm.close()
        self._comms.clear()


class _Exchange:
    """The base of both collectives. With error feedback each group of parameters has its own plan, which
    is created again when the group's size changes. Without error feedback, groups of one size share a
    plan."""

    operation = None

    def __init__(self, compression, bits, **options):
        self._compression = compression
        self._options = {"bits": bits, **options}
        self._keeps = not options.get("no_error_feedback")
        self._key = self.plan = None

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def forget(self):
        if self.plan is not None and self._keeps:
            self._compression.retire(self.plan)
        self._key = self.plan = None

    def _prepare(self, group, tensor, count, dtype):
        """Prepares the plan of this call. Returns True if it is not the same plan as before. All ranks
        have the same sizes."""
        key = group, tensor.device, count, dtype
        options = {"dtype": DTYPES[dtype], **self._options}

        def make():
            return self._compression.plan(group, tensor.device, count, self.operation, **options)

        changed = key != self._key
        if changed:
            self._compression.dropped += self._key is not None
            self.forget()
            self._key = key
        if not self._keeps:
            self.plan = self._compression.take((self.operation, *key), make)
        elif changed:
            self.plan = make()
        return changed

    def _start(self, send, receive, factor=1.0):
        """Begins an exchange. Returns a function that waits for the exchange and returns its status. On a
        device this function does not wait: the exchange and the scaling are then on the current stream."""
        self._compression.exchanges += 1
        plan = self.plan
        if plan.on_device:
            status = getattr(plan, self.operation)(send, receive)
            # The host does not know yet if some rank's input was not finite; the result will show it.
            plan.scale_result(receive, factor)
        else:
            request = getattr(plan, f"i{self.operation}")(send, receive)

        def finish():
            found = status if plan.on_device else request.wait()
            if not self._keeps:
                self._compression.give_back((self.operation, *self._key), plan)
            return found

        return finish

    def _end(self, end, async_op):
        """Ends an exchange, or returns its work object. On a device torch itself waits for the stream."""
        if async_op and not self.plan.on_device:
            return _Work(end)
        end()
        return None


def _wait_for(work):
    if work is not None:
        work.wait()


def _factor(op, size):
    """Returns the factor that converts the mean to the result of the operation."""
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.AVG:
        return 1.0
    if kind == dist.ReduceOp.SUM:
        return float(size)
    if kind == dist.ReduceOp.PREMUL_SUM:
        return size * op.__getstate__()[1]
    raise Error(Status.ERROR_UNSUPPORTED, f"a reduce-scatter of {op} cannot be compressed")


class CompressedReduceScatter(_Exchange, ReduceScatter):
    """An argument of `FSDPModule.set_custom_reduce_scatter`. Each module has one, with the module's
    residual."""

    operation = "reduce_scatter"
    loaded = None

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        factor, dtype = _factor(op, group.size()), input_tensor.dtype

        def dense():
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)

        if dtype not in DTYPES:
            self._compression.dense += 1
            return dense()
        if self._prepare(group, input_tensor, output_tensor.numel(), dtype):
            self._load()
        finish = self._start(input_tensor, output_tensor, factor)

        def end():
            if finish() == Status.SKIPPED:
                self._compression._skipped += 1
                _wait_for(dense())
            elif factor != 1 and not self.plan.on_device:
                output_tensor.mul_(factor)

        return self._end(end, async_op)

    def residual(self):
        return as_tensor(self.plan.export_residual()[0])

    def _load(self):
        if self.loaded is None:
            return
        if self.loaded.numel() == self.plan.info()["worker_residual_count"]:
            self.plan.import_residual(self.loaded)
        else:
            self._compression.dropped += 1
        self.loaded = None


class CompressedAllGather(_Exchange, AllGather):
    """An argument of `FSDPModule.set_custom_all_gather`. Each module has one.

    change: as in `compress`
    copy: the parameters that all ranks have; the next change is added to them
    """

    operation = "allgather"

    def __init__(self, compression, bits, change):
        # No residual is needed: the next change includes the error of this one, and values are rounded
        # again.
        super().__init__(compression, bits, no_error_feedback=1)
        self._change = change
        self.copy = None

    def forget(self):
        super().forget()
        self.copy = None

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        dtype = input_tensor.dtype

        def dense():
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)

        if dtype not in DTYPES:
            self._compression.dense += 1
            return dense()
        work = torch.float32 if self._change else dtype
        self._prepare(group, input_tensor, input_tensor.numel(), work)
        if not self._change:
            finish, keep = self._start(input_tensor, output_tensor), None
        elif self.copy is None:
            self._compression.dense += 1
            _wait_for(dense())
            self.copy = output_tensor.float().nan_to_num(0, 0, 0)  # makes each difference finite
            return None
        else:
            mine = self.copy.view(group.size(), -1)[group.rank()]
            keep = input_tensor.float() - mine, torch.empty_like(self.copy)
            finish = self._start(*keep)

        def end():
            if finish() == Status.SKIPPED:
                self._compression._skipped += 1
                _wait_for(dense())
                self.copy = None  # begins again when all values are finite
            elif keep:
                output_tensor.copy_(keep[1].add_(self.copy))
                if self.plan.on_device:  # the copy does not change if the call was skipped
                    torch.where(keep[1].isnan(), self.copy, keep[1], out=keep[1])
                self.copy = keep[1]

        return self._end(end, async_op)


class _Work(dist.Work):
    """An exchange in flight, with the interface of torch's work objects."""

    def __init__(self, end):
        super().__init__()
        self._end = end

    def wait(self, timeout=None):
        end, self._end = self._end, None
        if end is not None:
            end()
        return True


def _check_bits(name, bits):
    if bits is not None and bits not in _BITS:
        raise ValueError(f"{name} is {bits}, not 1, 2, 4, 8 or None")


def compress(
    model,
    reduce_bits=8,
    gather_bits=None,
    change=None,
    error_feedback=True,
    timeout=None,
    transport="automatic",
    **options,
):
    """Puts compressed exchanges into all FSDP modules of a model, before its first step. Returns the
    `Compression`. All ranks must give the same arguments.

    reduce_bits: bits an element of gradients, 1, 2, 4 or 8; None: torch exchanges gradients
    gather_bits: the same for parameters
    change: whether the changes of parameters are sent instead of their values, which takes 4 bytes a
        parameter on every rank; None: true with fewer bits than 8
    error_feedback: for gradients; without it there is no residual, and groups of one size share a plan
    timeout, transport: as in `Communicator.torch`
    options: options of `onebit.Plan` (scale, block_size, threads, chunk_size, ...)

    torch exchanges types other than float32, bfloat16 and float16, such as groups of mixed types.
    Gradients of groups that also have replicas (HSDP) are compressed only inside the shards' group.
    """
    if FSDPModule is None:
        raise Error(Status.ERROR_UNSUPPORTED, "this torch has no set_custom_reduce_scatter")
    _check_bits("reduce_bits", reduce_bits)
    _check_bits("gather_bits", gather_bits)
    modules = {n: one for n, one in model.named_modules() if isinstance(one, FSDPModule)}
    if not modules:
        raise ValueError("model has no FSDP module: call fully_shard first")
    if any(hasattr(one, _MARK) for one in modules.values()):
        raise argument_error("the model's exchanges are compressed already: close() that Compression first")
    change = gather_bits is not None and gather_bits < 8 if change is None else change
    made = Compression(modules, error_feedback, timeout, transport, options)
    kept = {} if error_feedback else {"no_error_feedback": 1}
    for name, module in modules.items():
        reduce = gather = None
        if reduce_bits is not None:
            reduce = CompressedReduceScatter(made, reduce_bits, **kept)
            module.set_custom_reduce_scatter(reduce)
        if gather_bits is not None:
            gather = CompressedAllGather(made, gather_bits, change)
            module.set_custom_all_gather(gather)
        made.parts[name] = reduce, gather
        setattr(module, _MARK, True)
    return made
