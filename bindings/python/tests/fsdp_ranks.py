"""What the scenario `fsdp` of torch_ranks.py runs: FSDP2 over gloo, on processors."""

import unittest.mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import onebit
from onebit.torch.fsdp import compress


def network(**options):
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(wide, 96), nn.Tanh()) for wide in (20, 96, 96)]
    model = nn.Sequential(*layers, nn.Linear(96, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def backward(model, step, spoil=1.0):
    random = torch.Generator().manual_seed(7000 + 100 * dist.get_rank() + step)
    points = torch.randn(16, 20, generator=random)
    loss = ((model(points).float() - points[:, :1].sin()) ** 2).mean()
    (loss * spoil).backward()
    return loss.item()


def gradients(model):
    return torch.cat([one.grad.to_local().flatten().float() for one in model.parameters()])


def train(bits=(None, None), steps=30, error_feedback=True, **options):
    model = network(**options)
    compression = None
    if any(bits):
        compression = compress(model, *bits, error_feedback=error_feedback)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    loss = torch.tensor(losses[-10:]).mean()
    dist.all_reduce(loss)
    sent = compression.bytes_sent / steps if compression else 0
    if compression:
        assert compression.exchanges > 0 and compression.skipped == compression.dropped == 0
        compression.close()
    return loss.item() / dist.get_world_size(), sent


def close_to_plain(rank, size):
    """Losses, and the bytes of a step: gradients once, parameters twice but for the root's."""
    plain, (loss, _) = train()[0], train((8, 4))
    without, _ = train((8, 4), error_feedback=False)
    if rank == 0:
        print(f"FSDP2, Adam: plain {plain:.5f}, gradients in 8 bits, parameters in 4 {loss:.5f}, "
              f"without error feedback {without:.5f}")
    assert max(abs(loss - plain), abs(without - plain)) < 0.005 * plain, (loss, without, plain)
    sent = {bits: train(bits, steps=3)[1] for bits in ((8, None), (1, None), (None, 8))}
    assert 6 < sent[8, None] / sent[1, None] < 8 and 1.8 < sent[None, 8] / sent[8, None] < 2.1, sent
    half = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "steps": 10}
    mixed, loss = train(**half)[0], train((8, 4), **half)[0]
    assert abs(loss - mixed) < 0.03 * mixed, (loss, mixed)


def gradients_are_means(rank, size):
    """In 4 bits they are close, and their sum is closer, whatever the operation."""
    for policy, factor in ((torch.float16, None), (torch.float32, 2.0)):
        options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=policy)}
        models = [network(**options), network(**options)]
        compression = compress(models[1], 4)
        if factor:  # a sum that is multiplied by 1 / factor, of which gloo knows only the sum
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
                backward(model, step)
                got.append(gradients(model))
                totals[number] = totals[number] + got[-1]
                model.zero_grad()
            off = (got[1] - got[0]).norm() / got[0].norm()
            assert off < 0.4, (policy, factor, off)
        summed = (totals[1] - totals[0]).norm() / totals[0].norm()
        assert summed < 0.6 * off, (policy, factor, off, summed)
        compression.close()


class OnDevice:
    """A plan of the processor that behaves as one on a device: a call is OK at once, and only its
    result tells of one that was skipped."""

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


def on_a_device(rank, size):
    """A value that is not finite, in the first gather or later, is in that step's parameters alone."""
    host, device = network(), network()
    compressions = [compress(model, 4, 4) for model in (host, device)]
    for step, spoilt in enumerate((True, False, False, True, False, False)):
        shards = [next(one[1].parameters()).to_local() for one in (host, device)]
        before = [one.detach().clone() for one in shards]
        if spoilt and rank == 1:
            for one in shards:
                one.data.fill_(float("nan"))
        losses = [backward(host, step)]
        with unittest.mock.patch.object(onebit.torch.fsdp, "Plan", OnDevice):
            losses.append(backward(device, step))
        assert all(loss == loss for loss in losses) == (not spoilt), (step, losses)
        if not spoilt:
            assert gradients(device).isfinite().all(), step
            assert (gradients(device) - gradients(host)).norm() < 0.3 * gradients(host).norm(), step
        for one, value in zip(shards, before):
            one.data.copy_(value)
        for model in (host, device):
            model.zero_grad()
    assert compressions[1].skipped > 0
    for one in compressions:
        one.close()
    assert compressions[1].skipped > 0  # still


def without_error_feedback(rank, size):
    """Groups of one size have one plan, and a state has nothing."""
    model = network()
    compression = compress(model, 8, 8, error_feedback=False)
    for step in range(2):
        backward(model, step)
        gathers = [key for key in compression._free if key[0] == "allgather"]
        reduces = [key for key in compression._free if key[0] == "reduce_scatter"]
        # Of four groups two have one size. None is taken.
        assert len(reduces) == len(gathers) == 3, compression._free
        assert [len(compression._free[key]) for key in reduces] == [1] * 3
    assert compression.state_dict() == {} and compression.exchanges == 2 * (4 + 7)
    compression.load_state_dict({"": None})
    assert compression.dropped == 1
    compression.close()


def edges(rank, size):
    model = network()
    compression = compress(model, 4, 4)
    model._set_unshard_async_op(True)
    backward(model, 0)
    backward(model, 1, float("inf") if rank == 1 else 1.0)  # torch's own exchange
    assert compression.skipped == 4 and not all(gradients(model).isfinite())
    model.zero_grad()
    saved = compression.state_dict()
    backward(model, 2)
    wanted = gradients(model)
    model.zero_grad()
    assert set(saved) == {"", "0", "1", "2"}
    compression.load_state_dict(saved)
    compression.close()
    again = compress(model, 4, 4)
    again.load_state_dict(saved)
    backward(model, 2)
    assert again.dropped == 0 and (gradients(model) - wanted).norm() < 0.01 * wanted.norm()
    model.zero_grad()
    for one in model[1].parameters():
        one.requires_grad_(False)
    model[1][0].bias.requires_grad_(True)  # the group has another size
    backward(model, 3)
    assert again.dropped == 1
    again.close()
    double = network().double()
    typed = compress(double, 8, 8)
    points = torch.randn(4, 20, dtype=torch.float64)
    double(points).sum().backward()
    assert typed.exchanges == 0 and typed.dense > 0
    typed.close()
    for wrong, words in ((lambda: compress(model, 3), "reduce_bits is 3"),
                         (lambda: compress(nn.Linear(1, 1)), "no FSDP module")):
        try:
            wrong()
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
