"""A communication hook for torch.nn.parallel.DistributedDataParallel.

    state = onebit.torch.HookState(warmup_steps=20, optimizer=optimizer)
    model = DistributedDataParallel(model)
    model.register_comm_hook(state, onebit.torch.allreduce_hook)

Gradients are then averaged with one bit an element where the optimizer is SGD with momentum, and
with 8 bits where it is any other, or not known; what the bits could not say is added to the next
step's. Fewer bits than 8 spoil the variance that Adam divides by: with `bits=2` gradients are
normalised for it (see `HookState`). For one bit take onebit.torch.EfficientAdam, without
DistributedDataParallel.
"""

import queue
import threading
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onebit._native import Dtype, Status
from onebit.communicator import Communicator
from onebit.plan import Plan
from onebit.torch.transport import checked_group
from onebit.torch.width import Normaliser, choose

# Elements a message. Buckets overlap, so their messages need not: with the plan's own choice, 46 a
# segment in place of 3, an exchange takes half as much processor time again over sockets, and three
# times as much over gloo through Python (6 M elements, 4 ranks, 8 bits: 23 for 15 ms, 117 for 38).
_CHUNK = 2**19

_DTYPES = {
    torch.float32: Dtype.FLOAT32,
    torch.bfloat16: Dtype.BFLOAT16,
    torch.float16: Dtype.FLOAT16,
}


class _Job(NamedTuple):
    future: torch.futures.Future
    tensor: torch.Tensor
    index: int
    layout: Any  # which elements of which parameters lie where
    parameters: Any  # kept alive with the plan, so that no other gets the id of one
    dense: bool
    gradients: Any  # views of the tensor, one a parameter; None: they are not looked at


class HookState:
    """What the hook keeps between steps: a plan for each bucket, with its error. Collective: make
    it on all processes of the group.

    process_group: over gloo, of the same processes as the model's, and for this state's use alone;
        None: a new group of all processes
    warmup_steps: steps that are dense at the beginning, exactly as without a hook unless gradients
        are normalised. At least 1, since DistributedDataParallel lays its buckets out anew after
        the first step
    optimizer: what gets the gradients, a torch.optim.Optimizer, of which only the kind is looked
        at; None: not known
    bits: an element, 1, 2, 4 or 8; None: 1 for SGD with momentum, else 8. Where the norm of the
        gradients is clipped take 2 or more. docs/scales.md has what each costs in loss
    normalise: whether a rank divides its gradients by the root of their own second moments before
        they are averaged, also in the warm-up. For Adam, AdamW and their like, whose steps do not
        change by it, but for the weight of epsilon, and of clipping and coupled weight decay, which
        see gradients of magnitude 1. None: with 1 and 2 bits, where such an optimizer is known
    timeout: seconds that a rank waits for a message before that is an error; default 1800
    plan_options: as for `onebit.Plan` (scale, block_size, schedule, threads, chunk_size, ...)

    Buckets of another type than float32, bfloat16 and float16, sparse gradients, and steps where
    some rank's gradient is not finite, are averaged by torch, as without a hook.

    A thread of the state's own makes the exchanges, one bucket after the other, while the backward
    pass goes on. Counts, to look at:

    bits, normalise: as they were asked for, or chosen
    steps: made with this hook, the warm-up included
    skipped: buckets that were averaged by torch because some rank's gradient was not finite
    dropped: residuals that were dropped because a bucket was laid out anew
    """

    def __init__(
        self,
        process_group=None,
        warmup_steps=1,
        timeout=None,
        optimizer=None,
        bits=None,
        normalise=None,
        **plan_options,
    ):
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps is {warmup_steps}, not at least 1")
        self.bits, self.normalise = choose(optimizer, bits, normalise)
        self._normaliser = Normaliser() if self.normalise else None
        self.warmup_steps = warmup_steps
        self.steps = self.skipped = self.dropped = 0
        self._plan_options = {"bits": self.bits, "chunk_size": _CHUNK, **plan_options}
        self._group = checked_group(process_group)
        self.comm = Communicator.torch(self._group, timeout)
        self._plans = {}  # by the bucket's index: its layout, the plan, its parameters
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="onebit-hook")
        self._thread.start()

    def add(self, bucket):
        """Hands a bucket to the thread; the future has the average."""
        tensor = bucket.buffer()
        parameters = bucket.parameters()
        layout = (tensor.numel(), tensor.dtype, tuple(id(one) for one in parameters))
        done = torch.futures.Future()
        strided = tensor.layout == torch.strided
        dense = self.steps < self.warmup_steps or not strided or tensor.dtype not in _DTYPES
        gradients = bucket.gradients() if self.normalise and strided else None
        self._jobs.put(_Job(done, tensor, bucket.index(), layout, parameters, dense, gradients))
        if bucket.is_last():
            self.steps += 1
        return done.then(_unwrap)

    def close(self):
        """Ends the thread, and gives back plans and communicator. On all processes."""
        self._jobs.put(None)
        self._thread.join()
        self._plans.clear()
        self.comm.close()

    def _work(self):
        while (job := self._jobs.get()) is not None:
            reason = None
            try:
                self._average(job)
            except BaseException as caught:  # noqa: BLE001
                reason = caught
            job.future.set_result((job.tensor, reason))

    def _average(self, job):
        if job.gradients is not None:
            self._normaliser.divide(job.parameters, job.gradients)
        if not job.dense:
            status = self._plan(job).allreduce(job.tensor, job.tensor)
            if status != Status.SKIPPED:
                return
            self.skipped += 1
        self._average_dense(job.tensor)

    def _average_dense(self, tensor):
        """As DistributedDataParallel does, but in a group of its own, so that no collective of the
        program can come in between. Gloo does not know bfloat16."""
        tensor.div_(self.comm.size)
        summed = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        dist.all_reduce(summed, group=self._group)
        if summed is not tensor:
            tensor.copy_(summed)

    def _plan(self, job):
        """The bucket's plan. The layout changes on all ranks in the same step."""
        layout, plan, _ = self._plans.get(job.index, (None, None, None))
        if layout == job.layout:
            return plan
        if plan is not None:
            self.dropped += 1
            plan.close()
        dtype = _DTYPES[job.tensor.dtype]
        plan = Plan(self.comm, job.tensor.numel(), dtype=dtype, **self._plan_options)
        self._plans[job.index] = job.layout, plan, job.parameters
        return plan


def _unwrap(done):
    tensor, reason = done.value()
    if reason is not None:
        raise reason
    return tensor


def allreduce_hook(state, bucket):
    """The hook: give it to `register_comm_hook` with a `HookState`. What goes wrong in an exchange
    is raised by `backward`, on every rank."""
    return state.add(bucket)
