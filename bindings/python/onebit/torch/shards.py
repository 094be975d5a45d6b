"""Converts between torch's parameters and the shards of them that ranks work on. The library connects only the
ranks that have the same shard. So if it skips a step on these ranks, all other ranks must skip the step too.
"""

import math
import socket

import torch
import torch.distributed as dist

from onebit._native import argument_error
from onebit.torch.ranks import FLOATS
from onebit.torch.rendezvous import Rendezvous
from onebit.torch.state import flat, in_order_of

try:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Replicate, Shard
except (ImportError, ValueError):  # before torch 2.6; Python 3.11 cannot import this with torch 1.13
    FSDPModule = DTensor = ()


# The number of elements that are reduced, or gathered, at a time.
_BUCKET_SIZE = 2**22


class Whole:
    """The layout in which each rank has all of each parameter."""

    number = 0  # this rank's shard, from 1 on
    overlaps = True  # whether backward passes may exchange

    def __init__(self, reason=None):
        self._reason = reason

    def ranks(self, comm):
        """Returns this rank's number among the ranks that train, and the number of these ranks."""
        return comm.rank, comm.size

    def local(self, tensor):
        """Returns those elements of a tensor that this rank works on; None for None."""
        return tensor

    def distribute_like(self, parameter, values):
        """Returns this rank's values, which are one for each of its elements, as a tensor that is distributed
        like the parameter."""
        return values

    def row(self, values):
        """Returns a row of bytes that belongs to this rank's shard."""
        return values

    def complete(self, state):
        """Adds the other shards' elements to a state of this shard. Collective over the shards."""

    def gradients(self, parameters):
        """Returns the final gradients of this rank's elements. Collective over the shards."""
        return [self.local(one.grad) for one in parameters]

    def spread(self, parameters):
        """Gathers the updated elements of the other shards. Returns True if there are any."""
        return False

    def agree(self, reason):
        """Returns this rank's error, or an error that says that another shard has one. None: no shard has an
        error. Collective over the shards."""
        return reason

    def mean(self, values):
        """Returns the mean over the host's ranks of numbers that each rank has. Collective over the shards."""
        return values

    def sum(self, values):
        """Returns the sum over all shards of the ranks' numbers. Collective over the shards."""
        return values

    def describe(self):
        why = f" ({self._reason})" if self._reason else ""
        return f"each rank exchanges all elements{why}"


class _Shards(Whole):
    """The base of both kinds of shards. Along the first dimension of the mesh are the ranks with the same
    shard, along the second the shards."""

    overlaps = False

    def __init__(self, mesh):
        self.mesh, self._group = mesh, mesh.get_group(1)
        self.number = mesh.get_local_rank(1) + 1

    def _any(self, flag):
        flag = torch.tensor(int(bool(flag)), dtype=torch.int32, device=self.mesh.device_type)
        dist.all_reduce(flag, dist.ReduceOp.MAX, self._group)
        return flag.item() != 0

    def _sum(self, values):
        values = values.to(self.mesh.device_type, copy=True)
        dist.all_reduce(values, group=self._group)
        return values.cpu()

    def agree(self, reason):
        failed = self._any(reason is not None)
        if failed and not reason:
            return argument_error("a rank with another shard failed: read its error message")
        return reason

    def _skip_together(self, gradients, parameters):
        """If a gradient of another shard is not finite, sets one of this shard to NaN, so that all shards skip
        the step. The check uses sums of the elements."""
        sums = [one.sum(dtype=torch.float32) for one in gradients if one is not None]
        if not self._any(sums and not math.isfinite(torch.stack(sums).sum().item())):
            return
        for number, one in enumerate(parameters):
            if one.numel():
                like = one if gradients[number] is None else gradients[number]
                gradients[number] = torch.full_like(like, torch.nan)
                return

    def row(self, values):
        return self._distributed(values[None], (self.mesh.size(1), len(values)))

    def _distributed(self, values, shape):
        """Returns this rank's shard of a tensor whose rows are shards."""
        stride = (shape[1], 1) if len(shape) > 1 else (1,)
        return DTensor.from_local(
            values, self.mesh, (Replicate(), Shard(0)), run_check=False, shape=shape, stride=stride
        )


class Sharded(_Shards):
    """DTensors of FSDP2 on a mesh of two dimensions (HSDP): replicas and shards."""

    def local(self, tensor):
        if not isinstance(tensor, DTensor):
            return tensor
        with torch.no_grad():
            return tensor.to_local()

    def distribute_like(self, parameter, values):
        return DTensor.from_local(
            values, self.mesh, parameter.placements, run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip

    def gradients(self, parameters):
        found = super().gradients(parameters)
        self._skip_together(found, [self.local(one) for one in parameters])
        return found

    def sum(self, values):
        return self._sum(values)

    def describe(self):
        return f"FSDP shard {self.number} of {self.mesh.size(1)} is exchanged between replicas"


class Inside(_Shards):
    """Parameters that all ranks have. Each rank of a host works on a shard of them: before that torch's group
    inside the host reduces the gradients, and afterwards it gathers the parameters."""

    def ranks(self, comm):
        return dist.get_rank(), dist.get_world_size()

    def local(self, tensor):
        if isinstance(tensor, DTensor):
            return tensor.to_local()
        if tensor is None or tensor.dim() == 0:
            return tensor
        if tensor.dtype == torch.uint8:  # rows of bytes
            return tensor[self.number - 1]
        elements = flat(tensor.detach())
        if elements is None:
            return None
        count = -(-len(elements) // self.mesh.size(1))
        return elements[(self.number - 1) * count :][:count]

    def distribute_like(self, parameter, values):
        return self._distributed(values, (parameter.numel(),))

    def complete(self, state):
        for parameter, values in state.items():
            names = [None] * self.mesh.size(1)  # without elements a rank has few names for a parameter
            dist.all_gather_object(names, list(values), group=self._group)
            for name in dict.fromkeys(sum(names, [])):
                value = values.get(name)
                if value is None:
                    value = self.distribute_like(parameter, torch.zeros(len(self.local(parameter)), **FLOATS))
                values[name] = value.full_tensor() if isinstance(value, DTensor) else value

    def _buckets(self, parameters):
        """Yields buckets of parameters with the same type, as (their numbers, the size of a shard of each)."""
        some, count, size = [], 0, self.mesh.size(1)
        for number, one in enumerate(parameters):
            if some and (count >= _BUCKET_SIZE or one.dtype != parameters[some[0]].dtype):
                yield some, [-(-parameters[of].numel() // size) for of in some]
                some, count = [], 0
            some.append(number)
            count += one.numel()
        if some:
            yield some, [-(-parameters[of].numel() // size) for of in some]

    def gradients(self, parameters):
        size, found = self.mesh.size(1), [None] * len(parameters)
        for numbers, counts in self._buckets(parameters):
            dtype = next((parameters[one].grad.dtype for one in numbers
                          if parameters[one].grad is not None), parameters[numbers[0]].dtype)
            rows = parameters[numbers[0]].new_zeros((size, sum(counts)), dtype=dtype)
            for number, to in zip(numbers, rows.split(counts, 1)):
                gradient = parameters[number].grad
                if gradient is not None:
                    _fill_rows(to, flat(in_order_of(gradient.detach(), parameters[number])))
            mine = torch.empty_like(rows[0])
            dist.reduce_scatter_tensor(mine, rows.div_(size).view(-1), group=self._group)
            for number, some in zip(numbers, mine.split(counts)):
                found[number] = some[: len(self.local(parameters[number]))]
        self._skip_together(found, [self.local(one) for one in parameters])
        return found

    def spread(self, parameters):
        size = self.mesh.size(1)
        for numbers, counts in self._buckets(parameters):
            mine = parameters[numbers[0]].new_zeros(sum(counts))
            for number, to in zip(numbers, mine.split(counts)):
                some = self.local(parameters[number])
                to[: len(some)] = some
            rows = mine.new_empty((size, len(mine)))
            dist.all_gather_into_tensor(rows.view(-1), mine, group=self._group)
            for number, some in zip(numbers, rows.split(counts, 1)):
                elements = flat(parameters[number].detach())
                elements.copy_(some.reshape(-1)[: len(elements)])
        return True

    def mean(self, values):
        return self._sum(values).div_(self.mesh.size(1))

    def describe(self):
        hosts, size = self.mesh.shape
        return (f"torch's group reduces gradients inside the host; shard {self.number} of {size} is "
                f"exchanged between {hosts} hosts")


def _fill_rows(rows, elements):
    """Copies elements into rows, one row after the other. The rest of the last row does not change."""
    count = rows.shape[1]
    full = len(elements) // count if count else 0
    rows[:full] = elements[: full * count].view(full, count)
    if full < len(rows):
        rows[full, : len(elements) - full * count] = elements[full * count :]


def shards_of(parameters):
    """Returns the layout of the parameters. Raises `Error` if they cannot be used."""
    kinds = {isinstance(one, DTensor) for one in parameters}
    if kinds <= {False}:
        return Whole()
    meshes = {one.device_mesh if isinstance(one, DTensor) else None for one in parameters}
    if len(meshes) > 1:
        raise argument_error(
            f"the parameters have {len(meshes)} device meshes (None counts as one): all must have the same mesh"
        )
    mesh = meshes.pop()
    if mesh.ndim != 2:
        raise argument_error(
            f"the parameters are on a mesh of {mesh.ndim} dimension{'s' * (mesh.ndim != 1)}, not on one "
            "of replicas and shards (HSDP): for FSDP use onebit.torch.fsdp.compress"
        )
    for number, one in enumerate(parameters):
        if not (one.placements[0].is_replicate() and one.placements[1].is_shard()):
            raise argument_error(f"parameter {number} has the placements {one.placements}, not those of HSDP")
    return Sharded(mesh)


def inside_of(group, inside, device_type, reason, timeout):
    """Returns the shards of a model whose parameters all ranks have. Collective.

    group: the model's group; None: all processes
    inside: "auto": each rank of a host gets a shard, if several hosts have the same number of ranks; a process
        group of this rank's host; None: there are no shards
    reason: the reason why "auto" makes no shards
    """
    if inside is None or (inside == "auto" and reason):
        return Whole(reason) if reason else Whole()
    if not DTensor:
        raise argument_error("inside: this torch has no torch.distributed.tensor")
    rendezvous = Rendezvous(group, timeout)
    auto = inside == "auto"
    said = rendezvous.share(socket.gethostname() if auto else dist.get_process_group_ranks(inside))
    rows = {}
    for rank, one in enumerate(said):
        rows.setdefault(str(one), []).append(rank)
    reason = _reason_for_none(rows, said, rendezvous.size, auto)
    if not reason:
        names = {"mesh_dim_names": ("replicate", "shard")}
        return Inside(DeviceMesh(device_type, list(rows.values()), **names))
    if not auto:
        raise argument_error(f"inside cannot be used: {reason}")
    return Whole(reason)


def _reason_for_none(rows, said, size, auto):
    """Returns the reason why shards are impossible; None: they are possible. rows: the ranks of each host"""
    sizes = sorted({len(one) for one in rows.values()})
    if size != dist.get_world_size():
        return "the model's process group does not contain all processes"
    if not auto and any(rank not in one for rank, one in enumerate(said)):
        return "a rank is not a member of the group that it passed as inside"
    if len(sizes) > 1:
        return f"hosts have different numbers of ranks, {sizes[0]} to {sizes[-1]}"
    if len(rows) == 1:
        return "all ranks share a host"
    return "each rank has a host of its own" if sizes == [1] else None


class _Done(dist.Work):
    def wait(self, timeout=None):
        return True


class _Alone(dist.ProcessGroup):
    """A group of this rank alone. torch.distributed cannot create it, since all ranks must create its
    groups."""

    def __init__(self):
        super().__init__(0, 1)

    def allreduce(self, tensors, options=None):
        return _Done()


def stop_all_reduce(model):
    """Makes FSDP reduce gradients only inside the shards' groups, not between replicas."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is not None:
                # set_requires_all_reduce(False) would not do: it keeps the gradients that it does not reduce
                # for the next backward pass.
                group.mesh_info.replicate_process_group = _Alone()
