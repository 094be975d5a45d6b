"""The state of torch's Adam, AdamW and SGD from one of Efficient-Adam or 1-bit momentum SGD: the way
back to dense steps."""

import torch
import torch.distributed as dist

from onebit.torch.gather import FLOATS


def _mean_share(gradient, group, hosts):
    """How large the squares of the mean gradient are beside those whose moments a rank keeps, which is
    of its own gradient, or of a host's: of independent gradients one in so many hosts."""
    ranks = group.size()
    own = gradient.float().square().sum()
    mean = gradient.float().clone()
    dist.all_reduce(mean, group=group)
    dist.all_reduce(own, group=group)
    own, mean = float(own) / ranks, float((mean / ranks).square().sum())
    if not 0 < mean < float("inf") or ranks == 1:
        return 1 / hosts
    noise = max(own - mean, 0.0) / (1 - 1 / ranks)  # own is signal + noise, mean signal + noise / ranks
    of_host = max(mean - noise / ranks, 0.0) + noise * hosts / ranks
    return min(max(mean / of_host, 1 / hosts), 1.0)


def _variance(parameter, state, group, rank):
    """Second moments of the mean gradient, of the ranks' own."""
    own = state[f"own_variance_{rank}"].to(parameter.device).clone()
    known = (own > 0).float()
    dist.all_reduce(own, group=group)
    dist.all_reduce(known, group=group)
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    hosts = max(float(known.max()), 1.0)
    return own / known.clamp(min=1.0) * _mean_share(gradient, group, hosts)


def _of_adam(made, parameter, state, group, is_plain):
    """is_plain: the parameter was exchanged in full precision, as dense Adam's is."""
    steps, defaults = float(state["step"]), made.defaults
    over = steps >= made._warmup_steps and not is_plain
    momentum = state["momentum"].to(parameter.device)
    if over:
        variance = _variance(parameter, state, group, made.comm.rank)
    else:
        variance = state["variance"].to(parameter.device)
    if not is_plain:
        root = (variance / (1 - defaults["betas"][1] ** steps)).sqrt() + defaults["eps"]
        momentum = momentum * root * (1 - made._beta1**steps if over else 1)
    of = {"exp_avg": momentum, "exp_avg_sq": variance}
    of = {name: one.to(parameter.dtype) for name, one in of.items()}
    return {"step": torch.tensor(steps, **FLOATS), **of}


@torch.no_grad()
def moments_of(made, group):
    """By parameter. The second moments of what was compressed are the mean of the ranks' own, and what
    the latest gradients say a mean over the ranks leaves of them; residuals are dropped. Collective."""
    states, found = made.state, {}
    for parameter, number in zip(made._parameters, made._group_of):
        state = states[parameter]
        if "momentum" in made.defaults:
            found[parameter] = {"momentum_buffer": state["momentum"].to(parameter)}
        else:
            is_plain = made._uncompressed[number]
            found[parameter] = _of_adam(made, parameter, state, group, is_plain)
    return found
