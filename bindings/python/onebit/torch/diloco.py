"""DiLoCo: local steps of any optimizer, and an exchange of the changes after a fixed number of steps.

    inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
    with onebit.torch.DiLoCo(model, inner, sync_every=30):
        for batch in batches:
            inner.zero_grad()
            loss(model, batch).backward()
            inner.step()            # every 30th call exchanges one bit an element
"""

import numbers

import torch
from torch.nn.parallel import DistributedDataParallel

from onebit._native import argument_error, warn
from onebit.communicator import Communicator
from onebit.outer import Outer
from onebit.torch.ranks import gather, interruptible
from onebit.torch.staged import Homes
from onebit.torch.state import flat


def _rule_of(outer):
    """Returns the options of `onebit.Outer` that apply the mean change as torch.optim.SGD would."""
    if outer is None:
        return {}
    if type(outer) is not torch.optim.SGD or len(outer.param_groups) != 1:
        raise argument_error(f"outer is a {type(outer).__name__}: a torch.optim.SGD of one group, or None")
    group = outer.param_groups[0]
    for name in "weight_decay", "dampening", "maximize":
        if group.get(name):
            raise argument_error(f"{name} of outer is {group[name]}, but the outer step has no {name}")
    rule = "nesterov" if group["nesterov"] else "momentum" if group["momentum"] else "mean"
    momentum = {"momentum": group["momentum"]} if group["momentum"] else {}
    return {"rule": rule, "learning_rate": group["lr"], **momentum}


class DiLoCo:
    """The outer step of a model. It is a context, in which each step of `inner` counts. Collective.

    model: its parameters must be equal on all ranks and of one type, on any torch device; untrained
        parameters do not change
    inner: the torch.optim.Optimizer of each rank
    sync_every: the number of steps from one exchange to the next
    bits: bits an element; None: the rule's default (docs/outer.md), which is 1 without momentum
    outer: a torch.optim.SGD, whose rate, momentum and nesterov are used; None: the plain mean
    comm: a `Communicator`; None: one of process_group (None: all processes) is created, and closed with this
        object; timeout: seconds that a rank then waits for others
    options: options of `onebit.Outer` (fragments, delay, weighted, stage, ...)

    outer: the `onebit.Outer`
    status: the status of the latest step, `Status.OK`, or `Status.SKIPPED` if some rank's change was not
        finite
    """

    def __init__(
        self, model, inner, sync_every=30, bits=None, outer=None, *, comm=None, process_group=None,
        timeout=None, **options,
    ):  # fmt: skip
        self.status = self._hook = None
        if not hasattr(inner, "register_step_post_hook"):
            raise argument_error("inner has no register_step_post_hook: torch.optim has it from torch 2.0 on")
        if isinstance(model, DistributedDataParallel):
            raise argument_error("the model is a DistributedDataParallel, which averages each step: give its module")
        options = {"local_steps": sync_every, **_rule_of(outer), **options}
        if bits is not None:
            options["bits"] = bits
        if not isinstance(sync_every, numbers.Integral) or sync_every < 1:
            raise argument_error(f"sync_every is {sync_every!r}, not a number of steps of at least 1")
        parameters = [one for one in model.parameters() if one.requires_grad]
        self._frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
        self._inner, self._owned = inner, comm is None
        self.comm = Communicator.torch(process_group, timeout) if comm is None else comm
        try:
            self.outer = Outer(self.comm, [self._elements(one) for one in parameters], **options)
        except Exception:
            if self._owned:
                self.comm.close()
            raise
        self._homes = Homes(parameters)

    @staticmethod
    def _elements(parameter):
        """Returns the elements in the order of memory; the parameter itself if it has gaps, which Outer refuses."""
        found = flat(parameter.detach())
        return parameter if found is None else found

    @torch.no_grad()
    def _call(self, function):
        return self._homes.during(lambda: interruptible(self.comm, function))

    def __enter__(self):
        if self._hook is not None:
            raise argument_error("this DiLoCo is entered already, and counts each step of inner once")
        self._hook = self._inner.register_step_post_hook(lambda *_: self._step())
        return self

    def __exit__(self, *_):
        self._hook.remove()
        self._hook = None

    def _step(self):
        thawed = [name for name, one in self._frozen if one.requires_grad]
        if thawed:
            self._frozen = []
            warn(f"{', '.join(thawed[:4])}: frozen when DiLoCo was made, so changes of these parameters are not "
                 "exchanged, and the ranks' models diverge: make another DiLoCo")
        self.status = self._call(self.outer.step)

    def synchronize(self):
        """Makes the parameters equal on all ranks. Call it before a validation and at the end of a training.
        Collective."""
        return self._call(self.outer.synchronize)

    def state_dict(self):
        """Returns this rank's state, with its parameters, but without the state of the inner optimizer. Each
        rank saves its own state."""
        part = self._call(self.outer.save)
        return {"part": torch.frombuffer(bytearray(part), dtype=torch.uint8)}

    def load_state_dict(self, state_dict):
        """Loads this rank's own state. It must have been saved by the same number of ranks. Collective."""
        parts = gather(self.comm, state_dict["part"].numpy().tobytes())
        self._call(lambda: self.outer.load(parts))

    def close(self):
        """Frees the outer step, and the communicator if this object has created it. Call it on all ranks."""
        self.outer.close()
        if self._owned:
            self.comm.close()
