"""Scenarios of test_torch.py: `python fsdp_ranks.py SCENARIOS RANKS`, started like torch_ranks.py. They test
FSDP2, also on a mesh of two replicas and two shards, and DistributedDataParallel on two hosts of two ranks, over
gloo, on processors."""

import os
import unittest.mock
import warnings

from torch_common import (
    broadcast_from_rank_0,
    draw_normal,
    expect_error,
    is_equal_on_ranks,
    load_checkpoint,
    make_shared_directory,
    run_scenarios,
    save_checkpoint,
)

import onebit
import onebit.torch
import torch
import torch.distributed as dist
from onebit.torch.fsdp import compress
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WARMUP = {"warmup_steps": 4, "warmup_bits": 8}


def make_network(mesh, widths=(20, 95, 95), **options):
    """Makes a network in which one shard of the last bias has no element, and other shards have different
    sizes."""
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(*one), nn.Tanh()) for one in zip(widths, widths[1:])]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def make_mesh(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def run_backward(model, step, spoil=1.0, group=None):
    """Runs a forward and a backward pass. Each rank of the group has its own inputs."""
    points = draw_normal(7000 + 100 * dist.get_rank(group) + step, 16, 20)
    loss = ((model(points).float() - points[:, :1].sin()) ** 2).mean()
    (loss * spoil).backward()
    return loss.item()


def gather_parameters(model):
    return torch.cat([one.full_tensor().detach().flatten() for one in model.parameters()])


def make_adam(model, **options):
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return onebit.torch.compress(model, inner, **options)


def train_model(model, optimizer, first, end, group=None):
    for step in range(first, end):
        run_backward(model, step, group=group)
        optimizer.step()
        optimizer.zero_grad()


def check_full_precision(rank, size):
    """Checks that steps in full precision equal those of HSDP with torch's AdamW: gradients are averaged over the
    same ranks, also if a gradient is the sum of two backward passes."""
    mesh = make_mesh(2, size // 2)
    for policy in {}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}:
        plain, model = make_network(mesh, **policy), make_network(mesh, **policy)
        theirs = torch.optim.AdamW(plain.parameters(), lr=3e-3)
        ours = make_adam(model, kind=onebit.torch.Adam, freeze_step=onebit.FREEZE_NEVER)
        for step in range(6):
            for of, optimizer in (plain, theirs), (model, ours):
                for again in range(1 + step % 2):
                    of.set_requires_gradient_sync(again == step % 2)
                    run_backward(of, 10 * step + again)
                torch.nn.utils.clip_grad_norm_(of.parameters(), 1e3)
                optimizer.step()
                optimizer.zero_grad()
        off = (gather_parameters(plain) - gather_parameters(model)).abs().max()
        assert off < (1e-2 if policy else 2e-5), off
        ours.close()


def check_compressed(rank, size):
    """Checks that compressed replicas stay equal and exchange one bit an element, also with copies in the host's
    memory."""
    mesh = make_mesh(2, size // 2)
    models = [make_network(mesh), make_network(mesh)]
    ours = [make_adam(one, stage=stage, **WARMUP) for one, stage in zip(models, ("auto", "host"))]
    losses, before = [], None
    for step in range(30):
        for model, optimizer in zip(models, ours):
            losses.append(run_backward(model, step))
            if step == 0:  # FSDP has not averaged over the replicas
                assert not is_equal_on_ranks(next(model.parameters()).grad.to_local(), mesh.get_group(0))
            optimizer.step()
            optimizer.zero_grad()
            if step == 10:
                with torch.no_grad():  # a write that a program may make
                    next(model.parameters()).clamp_(-0.2, 0.2)
        if step == 10:
            before = ours[0].comm.bytes_sent
    whole = [gather_parameters(one) for one in models]
    assert is_equal_on_ranks(whole[0]) and torch.equal(*whole)
    assert sum(losses[-6:]) < 0.6 * sum(losses[:6]), losses
    elements = sum(one.to_local().numel() for one in models[0].parameters())
    sent = (ours[0].comm.bytes_sent - before) / 19
    assert ours[0].comm.size == 2 and sent < 0.2 * elements, (sent, elements)
    for one in ours:
        one.close()


def check_skipped_steps(rank, size):
    """Checks that all ranks skip a step if one rank's shard has a gradient that is not finite, also ranks with
    other shards."""
    mesh = make_mesh(2, size // 2)
    model = make_network(mesh)
    optimizer = make_adam(model, **WARMUP)
    run_backward(model, 0)
    if rank == size - 1:  # an element that only this rank's shard has
        next(model.parameters()).grad.to_local().view(-1)[3] = float("inf")
    before = gather_parameters(model)
    optimizer.step()
    assert optimizer.status is onebit.Status.SKIPPED and torch.equal(gather_parameters(model), before)
    optimizer.zero_grad()
    train_model(model, optimizer, 1, 3)
    assert optimizer.status is onebit.Status.OK and not torch.equal(gather_parameters(model), before)
    optimizer.close()


def check_checkpoints(rank, size):
    """Checks torch.distributed.checkpoint: the same number of replicas continues to the bit; one replica, and
    then two from one, continue with the same parameters."""
    directory = make_shared_directory()
    alone = dist.new_group([0, 1])
    few = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("replicate", "shard"))

    def resume(mesh, where, group=None, partial=False):
        model = make_network(mesh)
        optimizer = make_adam(model, **WARMUP)
        load_checkpoint(model, optimizer, where, group, partial)
        return model, optimizer

    for stop in 3, 8:
        where = os.path.join(directory, str(stop))
        model = make_network(make_mesh(2, 2))
        optimizer = make_adam(model, **WARMUP)
        train_model(model, optimizer, 0, stop)
        save_checkpoint(model, optimizer, where)
        saved = gather_parameters(model)
        train_model(model, optimizer, stop, 12)
        other, resumed = resume(make_mesh(2, 2), where)
        assert resumed.onebit.info()["steps"] == stop and torch.equal(gather_parameters(other), saved)
        train_model(other, resumed, stop, 12)
        assert torch.equal(gather_parameters(other), gather_parameters(model)), stop
        optimizer.close(), resumed.close()
        if rank < 2:
            other, resumed = resume(few, where, alone)
            assert resumed.onebit.info()["steps"] == stop and torch.equal(gather_parameters(other), saved)
            save_checkpoint(other, resumed, where + "-few", alone)
            train_model(other, resumed, stop, 12, alone)
            assert gather_parameters(other).isfinite().all() and not torch.equal(gather_parameters(other), saved)
            resumed.close()
        dist.barrier()
        other, resumed = resume(make_mesh(2, 2), where + "-few", partial=True)
        assert resumed.onebit.info()["steps"] == stop and torch.equal(gather_parameters(other), saved)
        train_model(other, resumed, stop, 12)
        assert is_equal_on_ranks(gather_parameters(other)) and gather_parameters(other).isfinite().all()
        resumed.close()


def check_refused(rank, size):
    mesh = make_mesh(2, size // 2)
    model = make_network(mesh)
    norms = "Lamb and trust_ratio are not supported with shards"
    expect_error(norms, lambda: make_adam(model, kind=onebit.torch.Lamb))
    expect_error(norms, lambda: make_adam(model, trust_ratio=1))
    expect_error("max_norm is not supported with shards", lambda: make_adam(model, max_norm=1.0))
    flat = make_network(init_device_mesh("cpu", (size,)))
    expect_error("for FSDP use onebit.torch.fsdp.compress", lambda: make_adam(flat))
    first = onebit.torch.fsdp.compress(flat)
    expect_error("compressed already", lambda: onebit.torch.fsdp.compress(flat))
    first.close()
    onebit.torch.fsdp.compress(flat).close()


def check_norms(rank, size):
    """Checks that clip_grad_norm_ finds the norm of the mean over replicas and shards, also with shards inside
    hosts."""
    mesh = make_mesh(2, size // 2)
    plain, model = make_network(mesh), make_network(mesh)
    optimizer = make_adam(model)
    run_backward(plain, 0), run_backward(model, 0)
    wanted = torch.cat([one.grad.full_tensor().flatten() for one in plain.parameters()]).norm()
    found = optimizer.clip_grad_norm_(wanted / 2)
    assert is_equal_on_ranks(found) and abs(found / wanted - 1) < 0.06, (found, wanted)
    optimizer.step(), optimizer.close()
    dense, ours = Trainer(None, ours=False), Trainer(make_host_group(rank, size), **WARMUP)
    dense.step(0), ours.step(0)
    wanted = torch.cat([one.grad.flatten() for one in dense.module.parameters()]).norm()
    found = ours.optimizer.clip_grad_norm_(wanted / 2)  # gradients are still valid at this time
    assert is_equal_on_ranks(found) and abs(found / wanted - 1) < 0.06, (found, wanted)
    ours.optimizer.close()


# --- Shards inside a host ------------------------------------------------------------------------


class Trainer:
    """A program with DistributedDataParallel. inside: the group of the ranks of each host."""

    def __init__(self, inside, dtype=torch.float32, **options):
        torch.manual_seed(3)
        last = torch.channels_last
        self.module = nn.Sequential(
            nn.Unflatten(1, (5, 2, 2)), nn.Conv2d(5, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 95),
            nn.Tanh(), nn.Linear(95, 1),
        ).to(memory_format=last).to(dtype)  # fmt: skip
        self.dtype, self.model = dtype, nn.parallel.DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=3e-3)
        if options.pop("ours", True):
            self.optimizer = onebit.torch.compress(
                self.model, self.optimizer, inside=inside, **options
            )

    def step(self, step, spoil=1.0):
        self.optimizer.zero_grad()
        points = draw_normal(7000 + 100 * dist.get_rank() + step, 16, 20).to(self.dtype)
        loss = ((self.model(points) - points[:, :1].sin()) ** 2).mean()
        (loss * spoil).backward()
        self.optimizer.step()
        return loss.item()

    def get_parameters(self):
        return torch.cat([one.detach().flatten() for one in self.module.parameters()])


def make_host_group(rank, size):
    rows = [list(range(0, size, 2)), list(range(1, size, 2))]  # not in the order of ranks
    return next(group for row, group in [(one, dist.new_group(one)) for one in rows] if rank in row)


def check_inside_hosts(rank, size):
    """Checks that the steps are DistributedDataParallel's in full precision, and that ranks stay equal when
    compressed."""
    own = make_host_group(rank, size)
    for dtype in torch.float32, torch.bfloat16:
        plain = Trainer(None, dtype, ours=False)
        never = {"kind": onebit.torch.Adam, "freeze_step": onebit.FREEZE_NEVER}
        ours = Trainer(own, dtype, **never)
        for step in range(5):
            plain.step(step), ours.step(step)
        off = (plain.get_parameters() - ours.get_parameters()).abs().max()
        assert is_equal_on_ranks(ours.get_parameters()) and off < (3e-2 if dtype == torch.bfloat16 else 2e-5), off
        ours.optimizer.close()
    ways = [Trainer(own, **WARMUP), Trainer(own, stage="host", **WARMUP), Trainer(None, **WARMUP)]
    losses = [[one.step(step) for one in ways] for step in range(25)]
    assert torch.equal(ways[0].get_parameters(), ways[1].get_parameters())
    assert is_equal_on_ranks(ways[0].get_parameters())
    assert all(abs(one[0] - one[2]) < 0.1 * one[2] for one in losses), losses
    said = ways[1].optimizer.describe()
    assert "reduces gradients inside the host; shard " in said and "2 hosts, in the host's" in said
    sent = [one.optimizer.comm.bytes_sent for one in ways]
    assert sent[0] == sent[1] < 0.5 * sent[2], sent
    before = ways[0].get_parameters()
    ways[0].step(25, float("inf") if rank == 1 else 1.0)
    assert ways[0].optimizer.status is onebit.Status.SKIPPED
    assert torch.equal(ways[0].get_parameters(), before)
    for one in ways:
        one.optimizer.close()


def check_inside_resumed(rank, size):
    own = make_host_group(rank, size)
    first = Trainer(own, **WARMUP)
    for step in range(7):
        first.step(step)
    alone = first.optimizer.state_dict()
    first.optimizer.consolidate_state_dict()
    # The consolidated state has plain tensors. Rank 0 sends it to all ranks, instead of writing a file.
    whole = broadcast_from_rank_0(first.optimizer.state_dict() if rank == 0 else None)
    assert not any(hasattr(value, "to_local") for of in whole["state"].values() for value in of.values())
    model = {name: value.clone() for name, value in first.module.state_dict().items()}
    for step in range(7, 10):
        first.step(step)
    for saved in whole, alone:
        other = Trainer(own, **WARMUP)
        other.module.load_state_dict(model)
        other.optimizer.load_state_dict(saved)
        for step in range(7, 10):
            other.step(step)
        assert torch.equal(first.get_parameters(), other.get_parameters())
    for of in alone["state"].values():  # as if all ranks had loaded the first shard's file
        for name, value in of.items():
            if name.startswith("head_"):
                value.to_local()[:, -4:] = torch.tensor([1, 0, 0, 0], dtype=torch.uint8)
    shard = other.optimizer._shards.number
    words = "the state has shard 1 only" if shard == 2 else "a rank with another shard failed"
    expect_error(words, lambda: other.optimizer.load_state_dict(alone))
    first.optimizer.close(), other.optimizer.close()


def check_inside_refused(rank, size):
    rows = [0], list(range(1, size))
    groups = [dist.new_group(list(one)) for one in rows]
    expect_error("hosts have different numbers of ranks, 1 to 3", lambda: Trainer(groups[rank > 0]))
    own = make_host_group(rank, size)
    expect_error("max_norm is not supported with shards", lambda: Trainer(own, max_norm=1.0))
    flat = Trainer("auto")
    assert "each rank exchanges all elements (parameters are on" in flat.optimizer.describe()
    flat.optimizer.close()


# --- Gradients and parameters in few bits ---------------------------------------------------------


def make_sharded_model(**options):
    """Makes a model with a shard on each rank."""
    return make_network(init_device_mesh("cpu", (dist.get_world_size(),)), (20, 96, 96, 96), **options)


def local_gradients(model):
    return torch.cat([one.grad.to_local().flatten().float() for one in model.parameters()])


def train_alone(bits=(None, None), steps=30, error_feedback=True, **options):
    model = make_sharded_model(**options)
    compression = None
    if any(bits):
        compression = compress(model, *bits, error_feedback=error_feedback)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        losses.append(run_backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    loss = torch.tensor(losses[-10:]).mean()
    dist.all_reduce(loss)
    sent = compression.bytes_sent / steps if compression else 0
    if compression:
        assert compression.exchanges > 0 and compression.skipped == compression.dropped == 0
        compression.close()
    return loss.item() / dist.get_world_size(), sent


def check_losses(rank, size):
    """Checks losses, and a step's bytes: gradients are sent once, parameters twice except the root's."""
    plain, (loss, _) = train_alone()[0], train_alone((8, 4))
    without, _ = train_alone((8, 4), error_feedback=False)
    if rank == 0:
        print(f"FSDP2, Adam: plain {plain:.5f}, gradients in 8 bits, parameters in 4 {loss:.5f}, "
              f"without error feedback {without:.5f}")
    assert max(abs(loss - plain), abs(without - plain)) < 0.005 * plain, (loss, without, plain)
    sent = {bits: train_alone(bits, steps=3)[1] for bits in ((8, None), (1, None), (None, 8))}
    assert 6 < sent[8, None] / sent[1, None] < 8 and 1.8 < sent[None, 8] / sent[8, None] < 2.1, sent
    half = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "steps": 10}
    mixed, loss = train_alone(**half)[0], train_alone((8, 4), **half)[0]
    assert abs(loss - mixed) < 0.03 * mixed, (loss, mixed)


def check_mean_gradients(rank, size):
    """Checks that mean gradients in 4 bits are close to the exact ones, and their sum over steps closer, with
    each operation."""
    for policy, factor in ((torch.float16, None), (torch.float32, 2.0)):
        options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=policy)}
        models = [make_sharded_model(**options), make_sharded_model(**options)]
        compression = compress(models[1], 4)
        if factor:  # torch multiplies a sum by 1 / factor; gloo knows only the sum
            for one in [*models[0].modules(), *models[1].modules()]:
                if hasattr(one, "set_gradient_divide_factor"):
                    one.set_gradient_divide_factor(factor)
            for one in models[0].modules():
                if hasattr(one, "set_force_sum_reduction_for_comms"):
                    one.set_force_sum_reduction_for_comms(True)
        totals, off = [0, 0], 0
        for step in range(8):
            got = []
            for number, model in enumerate(models):
                run_backward(model, step)
                got.append(local_gradients(model))
                totals[number] = totals[number] + got[-1]
                model.zero_grad()
            off = (got[1] - got[0]).norm() / got[0].norm()
            assert off < 0.4, (policy, factor, off)
        summed = (totals[1] - totals[0]).norm() / totals[0].norm()
        assert summed < 0.6 * off, (policy, factor, off, summed)
        compression.close()


class OnDevice:
    """A plan of the processor that behaves like one on a device: a call returns OK at once, and only its result
    shows that it was skipped."""

    on_device = True

    def __init__(self, *arguments, **options):
        self._plan = onebit.Plan(*arguments, **options)
        self._status, self._skipped = None, 0

    def __getattr__(self, name):
        return getattr(self._plan, name)

    def _call(self, *buffers):
        self._status = getattr(self._plan, self._plan.operation.name.lower())(*buffers)
        self._skipped += self._status == onebit.Status.SKIPPED
        return onebit.Status.OK

    allgather = reduce_scatter = _call

    def scale_result(self, result, factor):
        result.mul_(float("nan") if self._status == onebit.Status.SKIPPED else factor)

    def calls(self):
        return 0, self._skipped


def check_device_plans(rank, size):
    """Checks that a value that is not finite, in the first gather or later, affects only the parameters of that
    step."""
    host, device = make_sharded_model(), make_sharded_model()
    compressions = [compress(model, 4, 4) for model in (host, device)]
    for step, spoilt in enumerate((True, False, False, True, False, False)):
        shards = [next(one[1].parameters()).to_local() for one in (host, device)]
        before = [one.detach().clone() for one in shards]
        if spoilt and rank == 1:
            for one in shards:
                one.data.fill_(float("nan"))
        losses = [run_backward(host, step)]
        with unittest.mock.patch.object(onebit.torch.fsdp, "Plan", OnDevice):
            losses.append(run_backward(device, step))
        assert all(loss == loss for loss in losses) == (not spoilt), (step, losses)
        if not spoilt:
            assert local_gradients(device).isfinite().all(), step
            assert (local_gradients(device) - local_gradients(host)).norm() < 0.3 * local_gradients(host).norm(), step
        for one, value in zip(shards, before):
            one.data.copy_(value)
        for model in (host, device):
            model.zero_grad()
    assert compressions[1].skipped > 0
    for one in compressions:
        one.close()
    assert compressions[1].skipped > 0  # the counter is unchanged


def check_without_error_feedback(rank, size):
    """Checks that groups of one size share a plan, and that a state is empty."""
    model = make_sharded_model()
    compression = compress(model, 8, 8, error_feedback=False)
    for step in range(2):
        run_backward(model, step)
        gathers = [key for key in compression._free if key[0] == "allgather"]
        reduces = [key for key in compression._free if key[0] == "reduce_scatter"]
        # Two of the four groups have the same size. No plan is in use at this time.
        assert len(reduces) == len(gathers) == 3, compression._free
        assert [len(compression._free[key]) for key in reduces] == [1] * 3
    assert compression.state_dict() == {} and compression.exchanges == 2 * (4 + 7)
    compression.load_state_dict({"": None})
    assert compression.dropped == 1
    compression.close()


def check_edge_cases(rank, size):
    model = make_sharded_model()
    compression = compress(model, 4, 4)
    model._set_unshard_async_op(True)
    run_backward(model, 0)
    run_backward(model, 1, float("inf") if rank == 1 else 1.0)  # torch makes this exchange itself
    assert compression.skipped == 4 and not all(local_gradients(model).isfinite())
    model.zero_grad()
    saved = compression.state_dict()
    run_backward(model, 2)
    wanted = local_gradients(model)
    model.zero_grad()
    assert set(saved) == {"", "0", "1", "2"}
    compression.load_state_dict(saved)
    compression.close()
    again = compress(model, 4, 4)
    again.load_state_dict(saved)
    run_backward(model, 2)
    assert again.dropped == 0 and (local_gradients(model) - wanted).norm() < 0.01 * wanted.norm()
    model.zero_grad()
    for one in model[1].parameters():
        one.requires_grad_(False)
    model[1][0].bias.requires_grad_(True)  # the group has another size now
    run_backward(model, 3)
    assert again.dropped == 1
    again.close()
    double = make_sharded_model().double()
    typed = compress(double, 8, 8)
    points = torch.randn(4, 20, dtype=torch.float64)
    double(points).sum().backward()
    assert typed.exchanges == 0 and typed.dense > 0
    typed.close()
    for wrong, words in ((lambda: compress(model, 3), "reduce_bits is 3"),
                         (lambda: compress(nn.Linear(1, 1)), "no FSDP module")):
        expect_error(words, wrong, ValueError)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_scenarios(globals())
