"""Reads the state of DeepSpeed's 1-bit optimizers, from its checkpoints and from a running process."""

import os
from typing import Any, NamedTuple

import torch

from onebit._native import argument_error

KIND_OF = {"exp_avg_sq_fresh": "lamb", "var_interval": "zero_one_adam"}
_ARRAYS = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "momentum_accumulator")


class Rank(NamedTuple):
    """The state that only one rank has, as float32 arrays.

    worker, server: the residuals of each buffer that DeepSpeed compresses; empty: none exist yet
    tail: the padding of 1-bit LAMB's buffer
    own: the "parameter", "exp_avg" and "momentum_accumulator" of each tensor, between two synchronisations
        of 0/1 Adam
    """

    worker: Any
    server: Any
    tail: Any
    own: Any


class State(NamedTuple):
    """The state of all ranks.

    kind: one of part.KINDS
    step: DeepSpeed's count, which is one more than the number of steps
    world: the number of ranks
    tensors: the arrays and scalars of each tensor by DeepSpeed's names, and "parameter"
    flat: whether each tensor is a whole group, as in DeepSpeed's fp16 and bf16 wrappers
    ranks: a `Rank` for each rank; None: these states are not known
    """

    kind: str
    step: int
    world: int
    tensors: Any
    flat: bool
    ranks: Any


def array(tensor):
    """Returns a flat copy as float32."""
    return tensor.detach().to("cpu", torch.float32).reshape(-1).numpy().copy()


def _collect_residuals(states, name):
    found = [one[name] for one in states if name in one]
    return found if len(found) == len(states) else []


def save_residuals(engine, directory, tag=None):
    """Saves the state that `engine.save_checkpoint(directory, tag)` of DeepSpeed up to 0.19.6 leaves out.
    Writes it into the same folder, on every rank. With it a run continues exactly in onebit; without it
    residuals begin with zeros, as they do when DeepSpeed loads the checkpoint."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)  # the optimizer inside a wrapper
    given = [one for group in optimizer.param_groups for one in group["params"]]
    states = [optimizer.state[one] for one in given if optimizer.state.get(one)]
    worker, server = _collect_residuals(states, "worker_error"), _collect_residuals(states, "server_error")
    tail = []
    if hasattr(optimizer, "worker_errors"):  # 1-bit LAMB
        worker, server = optimizer.worker_errors, optimizer.server_errors
        tail = list(optimizer.dummy_exp_avg.values())
    own = [
        {"parameter": one, **{name: optimizer.state[one][name] for name in ("exp_avg", _ARRAYS[3])}}
        for one in given
        if _ARRAYS[3] in optimizer.state.get(one, {})
    ]
    saved = {"worker": worker, "server": server, "tail": tail, "own": own}
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    folder = os.path.join(directory, tag or f"global_step{engine.global_steps}")
    os.makedirs(folder, exist_ok=True)
    copies = torch.utils._pytree.tree_map(lambda one: one.detach().cpu().clone(), saved)
    path = os.path.join(folder, f"onebit-rank-{rank}.pt")
    torch.save({**copies, "ranks": world, "step": states[0]["step"]}, path)


def _read_file(path):
    """Reads a file of tensors and plain values, without running code in it."""
    return torch.load(path, map_location="cpu", weights_only=True)


def read_folder(directory, tag=None):
    """Returns (the folder of a checkpoint, the contents of rank 0's file)."""
    if tag is None:
        try:
            with open(os.path.join(directory, "latest"), encoding="utf-8") as file:
                tag = file.read().strip()
        except OSError as reason:
            words = f"{directory} has no file 'latest', and no tag is given"
            raise argument_error(f"{words}: {reason}") from None
    folder = os.path.join(directory, tag)
    path = os.path.join(folder, "mp_rank_00_model_states.pt")
    if not os.path.exists(path):
        raise argument_error(f"{path} does not exist")
    return folder, _read_file(path)


def _read_ranks(folder, world, step):
    """Returns the ranks' states that `save_residuals` wrote to the folder; None: it was not called."""
    ranks = []
    for rank in range(world):
        path = os.path.join(folder, f"onebit-rank-{rank}.pt")
        if not os.path.exists(path):
            if ranks:
                raise argument_error(f"{path} is missing, but the file of rank 0 exists: copy the files of "
                                     "all ranks")  # fmt: skip
            return None
        saved = _read_file(path)
        if (saved["ranks"], saved["step"]) != (world, step):
            raise argument_error(f"{path} has {saved['ranks']} ranks and step {saved['step']}, but the "
                                 f"checkpoint has {world} and {step}")  # fmt: skip
        own = [{name: array(one) for name, one in each.items()} for each in saved["own"]]
        lists = ([array(one) for one in saved[name]] for name in ("worker", "server", "tail"))
        ranks.append(Rank(*lists, own))
    return ranks


def _split_wrapper_state(saved):
    """Splits the state of a wrapper: (the state inside, the wrapper's parameters in float32, True if these
    are flat groups). Without a wrapper the parameters are None."""
    if "optimizer_state_dict" not in saved:
        return saved, None, False
    if "fp32_groups_flat" in saved:
        return saved["optimizer_state_dict"], list(saved["fp32_groups_flat"]), True
    groups = saved["fp32_groups"]
    return saved["optimizer_state_dict"], [one for group in groups for one in group], False


def _make_tensor_state(parameter, saved):
    """Returns a tensor's state. A parameter that never had a gradient gets zeros: DeepSpeed saves no state
    for it."""
    made = {"parameter": array(parameter), **saved}
    for name in _ARRAYS:
        zeros = torch.zeros(1, dtype=torch.float32).expand(parameter.numel())
        made[name] = array(saved.get(name, zeros))
        if len(made[name]) != parameter.numel():
            raise argument_error(f"{name} has {len(made[name])} elements, but its parameter has "
                                 f"{parameter.numel()}: name parameters in the order in which DeepSpeed's "
                                 "optimizer had them")  # fmt: skip
    return made


def read_state(folder, checkpoint, parameters):
    """Returns the `State` in a checkpoint. parameters: (number, values) of the trained parameters, with
    DeepSpeed's numbers; not used if a wrapper has saved its own values"""
    if not checkpoint.get("optimizer"):
        raise argument_error(f"{folder} has no optimizer state")
    saved, masters, flat = _split_wrapper_state(checkpoint["optimizer"])
    states = saved["state"]
    if masters is not None:
        parameters = list(enumerate(masters))
    tensors = [_make_tensor_state(one, states.get(number, {})) for number, one in parameters]
    known = [one for one in states.values() if "step" in one]
    if not known or "exp_avg" not in known[0]:
        raise argument_error(f"{folder} has no state of a 1-bit optimizer that has made a step")
    kind = next((KIND_OF[name] for name in KIND_OF if name in known[0]), "adam")
    step, world = int(known[0]["step"]), int(checkpoint["dp_world_size"])
    return State(kind, step, world, tensors, flat, _read_ranks(folder, world, step))
