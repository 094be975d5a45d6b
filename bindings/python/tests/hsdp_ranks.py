"""What test_torch_hsdp.py runs: `python hsdp_ranks.py SCENARIOS RANKS`, as torch_ranks.py does. FSDP2
on a mesh of two replicas and two shards, over gloo, on processors."""

import os
import shutil
import sys
import tempfile
import warnings

import torch_ranks
from torch_common import alike, expect

import onebit
import onebit.torch
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WARMUP = {"warmup_steps": 4, "warmup_bits": 8}


def network(mesh, **options):
    """One shard of the last bias has no element, and others are of different sizes."""
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(wide, 95), nn.Tanh()) for wide in (20, 95)]
    model = nn.Sequential(*layers, nn.Linear(95, 1))
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def backward(model, step, spoil=1.0, group=None):
    """Each rank of the group has inputs of its own."""
    random = torch.Generator().manual_seed(7000 + 100 * dist.get_rank(group) + step)
    points = torch.randn(16, 20, generator=random)
    loss = ((model(points).float() - points[:, :1].sin()) ** 2).mean()
    (loss * spoil).backward()
    return loss.item()


def bits(model):
    return torch.cat([one.full_tensor().detach().flatten() for one in model.parameters()])


def adam(model, **options):
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return onebit.torch.compress(model, inner, **options)


def train(model, optimizer, first, end, group=None):
    for step in range(first, end):
        backward(model, step, group=group)
        optimizer.step()
        optimizer.zero_grad()


def in_full_precision(rank, size):
    """The steps are those of HSDP and torch's AdamW: which gradients are averaged over whom, and which
    values a gradient that came in two passes has."""
    mesh = mesh_of(2, size // 2)
    for policy in {}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}:
        plain, model = network(mesh, **policy), network(mesh, **policy)
        theirs = torch.optim.AdamW(plain.parameters(), lr=3e-3)
        ours = adam(model, kind=onebit.torch.Adam, freeze_step=onebit.FREEZE_NEVER)
        for step in range(6):
            for of, optimizer in (plain, theirs), (model, ours):
                for again in range(1 + step % 2):
                    of.set_requires_gradient_sync(again == step % 2)
                    backward(of, 10 * step + again)
                torch.nn.utils.clip_grad_norm_(of.parameters(), 1e3)
                optimizer.step()
                optimizer.zero_grad()
        off = (bits(plain) - bits(model)).abs().max()
        assert off < (1e-2 if policy else 2e-5), off
        ours.close()


def in_bits(rank, size):
    """Replicas stay alike; direct and staged copies have the same bits; an element travels in one."""
    mesh = mesh_of(2, size // 2)
    models = [network(mesh), network(mesh)]
    ours = [adam(one, stage=stage, **WARMUP) for one, stage in zip(models, ("auto", "host"))]
    losses, before = [], None
    for step in range(30):
        for model, optimizer in zip(models, ours):
            losses.append(backward(model, step))
            if step == 0:  # FSDP has left the replicas their own
                assert not alike(next(model.parameters()).grad.to_local(), mesh.get_group(0))
            optimizer.step()
            optimizer.zero_grad()
            if step == 10:
                with torch.no_grad():  # as a program may
                    next(model.parameters()).clamp_(-0.2, 0.2)
        if step == 10:
            before = ours[0].comm.bytes_sent
    whole = [bits(one) for one in models]
    assert alike(whole[0]) and torch.equal(*whole)
    assert sum(losses[-6:]) < 0.6 * sum(losses[:6]), losses
    elements = sum(one.to_local().numel() for one in models[0].parameters())
    sent = (ours[0].comm.bytes_sent - before) / 19
    assert ours[0].comm.size == 2 and sent < 0.2 * elements, (sent, elements)
    for one in ours:
        one.close()


def skipped(rank, size):
    """What one rank's shard finds all ranks skip, also those with other shards."""
    mesh = mesh_of(2, size // 2)
    model = network(mesh)
    optimizer = adam(model, **WARMUP)
    backward(model, 0)
    if rank == size - 1:  # an element of its shard alone
        next(model.parameters()).grad.to_local().view(-1)[3] = float("inf")
    before = bits(model)
    optimizer.step()
    assert optimizer.status is onebit.Status.SKIPPED and torch.equal(bits(model), before)
    optimizer.zero_grad()
    train(model, optimizer, 1, 3)
    assert optimizer.status is onebit.Status.OK and not torch.equal(bits(model), before)
    optimizer.close()


def checkpoints(rank, size):
    """torch.distributed.checkpoint: as many replicas go on to the bit, and one alone from the same
    parameters."""
    from torch.distributed.checkpoint import load, save
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    place = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(place)
    alone = dist.new_group([0, 1])
    few = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("replicate", "shard"))
    for stop in 3, 8:
        where = os.path.join(place[0], str(stop))
        model = network(mesh_of(2, 2))
        optimizer = adam(model, **WARMUP)
        train(model, optimizer, 0, stop)
        both = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        save(both, checkpoint_id=where)
        saved = bits(model)
        train(model, optimizer, stop, 12)
        for mesh, group in (mesh_of(2, 2), None), (few, alone):
            if group is alone and rank > 1:
                continue
            other = network(mesh)
            resumed = adam(other, **WARMUP)
            both = dict(zip(("model", "optimizer"), get_state_dict(other, resumed)))
            load(both, checkpoint_id=where, process_group=group)
            set_state_dict(other, resumed, model_state_dict=both["model"],
                           optim_state_dict=both["optimizer"])
            assert resumed.onebit.info()["steps"] == stop and torch.equal(bits(other), saved)
            train(other, resumed, stop, 12, group)
            assert group is alone or torch.equal(bits(other), bits(model)), stop
            assert bits(other).isfinite().all() and not torch.equal(bits(other), saved)
            resumed.close()
        optimizer.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(place[0])


def refusals(rank, size):
    mesh = mesh_of(2, size // 2)
    model = network(mesh)
    norms = "norms of parameters would be those of shards"
    expect(norms, lambda: adam(model, kind=onebit.torch.Lamb))
    expect(norms, lambda: adam(model, trust_ratio=1))
    expect("would see the norm of a shard", lambda: adam(model, max_norm=1.0))
    flat = network(init_device_mesh("cpu", (size,)))
    expect("for FSDP take onebit.torch.fsdp.compress", lambda: adam(flat))


SCENARIOS = (in_full_precision, in_bits, skipped, checkpoints, refusals)


def run(rank, names, size, path):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for name in names:
        next(one for one in SCENARIOS if one.__name__ == name)(rank, size)
        dist.barrier()
    if rank == 0:
        print("all well", flush=True)


if __name__ == "__main__":
    assert torch_ranks.PACKAGE
    with tempfile.TemporaryDirectory() as place:
        names, size = sys.argv[1].split(","), int(sys.argv[2])
        arguments = (names, size, os.path.join(place, "store"))
        torch.multiprocessing.start_processes(run, arguments, nprocs=size, start_method="fork")
