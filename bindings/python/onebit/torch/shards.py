"""Parameters of which each rank has a shard: what the library gets of them, and what a shard's values
are to torch. The ranks that share parameters agree on what the library tells only those that have
the same shard: that a step is skipped.

    mesh = init_device_mesh("cuda", (hosts, gpus), mesh_dim_names=("replicate", "shard"))
    fully_shard(layer, mesh=mesh) ...; fully_shard(model, mesh=mesh)
    optimizer = onebit.torch.compress(model, torch.optim.AdamW(model.parameters()))
"""

import torch
import torch.distributed as dist

from onebit.errors import wrong

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Replicate, Shard
except (ImportError, ValueError):  # before torch 2.6; 1.13 cannot be imported there by Python 3.11
    FSDPModule = DTensor = ()


class Whole:
    """Each rank has all of each parameter."""

    def local(self, tensor):
        """The elements that this rank has; None stays None."""
        return tensor

    def like(self, parameter, values):
        """This rank's values, one for each of its elements, as a tensor like the parameter."""
        return values

    def row(self, values):
        """A row of bytes that belongs to this rank's shard."""
        return values

    def gradients(self, parameters):
        """Of this rank's elements, final."""
        return [self.local(one.grad) for one in parameters]


class Sharded(Whole):
    """DTensors of FSDP2 on a mesh of two dimensions (HSDP): the first has the replicas, which
    compress what they exchange, and the second the shards."""

    def __init__(self, mesh):
        self._mesh, self._group = mesh, mesh.get_group(1)
        self.replicas = mesh.get_group(0)

    def local(self, tensor):
        if not isinstance(tensor, DTensor):
            return tensor
        with torch.no_grad():
            return tensor.to_local()

    def like(self, parameter, values):
        return DTensor.from_local(
            values, self._mesh, parameter.placements, run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip

    def row(self, values):
        shape = self._mesh.size(1), len(values)
        return DTensor.from_local(
            values[None], self._mesh, (Replicate(), Shard(0)), run_check=False, shape=shape,
            stride=(shape[1], 1),
        )  # fmt: skip

    def gradients(self, parameters):
        found = super().gradients(parameters)
        _skip_together(found, [self.local(one) for one in parameters], self._group)
        return found


def _skip_together(gradients, parameters, group):
    """Where a gradient of some shard is not finite, this one has one that is not either: all shards
    skip the step. Sums of the elements say so."""
    sums = [one.sum(dtype=torch.float32) for one in gradients if one is not None]
    device = parameters[0].device if parameters else "cpu"
    found = torch.stack(sums).sum() if sums else torch.zeros((), device=device)
    spoilt = (~found.isfinite()).to(torch.int32)
    dist.all_reduce(spoilt, dist.ReduceOp.MAX, group)
    if spoilt:
        number = next((number for number, one in enumerate(parameters) if one.numel()), None)
        if number is not None:
            like = parameters[number] if gradients[number] is None else gradients[number]
            gradients[number] = torch.full_like(like, torch.nan)


def shards_of(parameters):
    """What the parameters are. Raises `Error` for those that cannot be used."""
    kinds = {isinstance(one, DTensor) for one in parameters}
    if kinds <= {False}:
        return Whole()
    meshes = {one.device_mesh if isinstance(one, DTensor) else None for one in parameters}
    if len(meshes) > 1:
        raise wrong(f"the parameters have {len(meshes)} meshes, or some have none: all want the same")
    mesh = meshes.pop()
    if mesh.ndim != 2:
        raise wrong(
            f"the parameters are on a mesh of {mesh.ndim} dimension{'s' * (mesh.ndim != 1)}, not on one "
            "of replicas and shards (HSDP): for FSDP take onebit.torch.fsdp.compress"
        )
    for number, one in enumerate(parameters):
        if not (one.placements[0].is_replicate() and one.placements[1].is_shard()):
            raise wrong(f"parameter {number} has the placements {one.placements}, not those of HSDP")
    return Sharded(mesh)


class _Done(dist.Work):
    def wait(self, timeout=None):
        return True


class _Alone(dist.ProcessGroup):
    """This rank: sums over it change nothing. It is no group of torch's, whose numbers other ranks
    count too."""

    def __init__(self):
        super().__init__(0, 1)

    def allreduce(self, tensors, options=None):
        return _Done()


def stop_all_reduce(model):
    """FSDP makes the sums inside the shards' groups, and leaves those of the replicas."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is not None:
                # set_requires_all_reduce(False) would keep what it leaves out to itself, for the next
                # backward pass.
                group.mesh_info.replicate_process_group = _Alone()
