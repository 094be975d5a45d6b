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
from onebit.errors import wrong
from onebit.plan import Plan
from onebit.torch.gather import agree
from onebit.torch.transport import checked_group
from onebit.torch.width import Normaliser, choose

# Elements a message. Buckets overlap, so their messages need not: with the plan's own choice, 46 a
# segment in place of 3, an exchange takes half as much processor time again over sockets, and three
# times as much over gloo through Python (6 M elements, 4 ranks, 8 bits: 23 for 15 ms, 117 for 38).
CHUNK = 2**19

DTYPES = {
    torch.float32: Dtype.FLOAT32,
    torch.bfloat16: Dtype.BFLOAT16,
    torch.float16: Dtype.FLOAT16,
}


class _Job(NamedTuple):
    future: torch.futures.Future
    tensor: torch.Tensor
    index: int
    parameters: Any
    numbers: Any  # of the parameters, whose elements lie in this order
    warmup: bool
    gradients: Any  # views of the tensor, one a parameter; None: they are not looked at

    def is_strided(self):
        return self.tensor.layout == torch.strided


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
    timeout: seconds that a rank waits for a message before that is an error; default 600
    plan_options: as for `onebit.Plan` (scale, block_size, schedule, threads, chunk_size, ...)

    Buckets of another type than float32, bfloat16 and float16, sparse gradients, and steps where
    some rank's gradient is not finite, are averaged by torch, as without a hook.

    A thread of the state's own makes the exchanges, one bucket after the other, while the backward
    pass goes on.

    `state_dict` is of this rank: each saves its own, and loads it with as many ranks into a state
    that was made with the same arguments, for a model that was made and wrapped alike. Steps then go
    on to the bit, if two or more were made; a state of fewer is as none. A pickled state, as of
    torch.save, and a copy have it in them, and make their communicator in the first backward pass,
    which all ranks make together. Counts, to look at:

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
        bits, normalise = choose(optimizer, bits, normalise)
        self._begin(process_group, warmup_steps, timeout, bits, normalise, plan_options)
        self._open()

    def _begin(self, process_group, warmup_steps, timeout, bits, normalise, plan_options):
        self._given_group, self.warmup_steps, self._timeout = process_group, warmup_steps, timeout
        self.bits, self.normalise, self._plan_options = bits, normalise, plan_options
        self.steps = self.skipped = self.dropped = 0
        self._normaliser = Normaliser() if normalise else None
        self.comm = self._loaded = None
        self._closed = False
        self._numbers = {}  # of parameters, in the order of the first step; keeps them alive
        self._layouts = {}  # by the bucket's index: the numbers of its parameters
        self._plans = {}  # by the bucket's index: its layout, the plan
        self._held = []  # jobs of a step that are not with the thread yet

    def _open(self):
        self._group = checked_group(self._given_group)
        self.comm = Communicator.torch(self._group, self._timeout)
        try:
            self._check(self._loaded)
        except Exception:
            self.comm.close()
            self.comm = None
            raise
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="onebit-hook")
        self._thread.start()

    def add(self, bucket):
        """Hands a bucket to the thread; the future has the average."""
        if self._closed:
            raise wrong("the hook's state is closed")
        if self.comm is None:
            self._open()
        tensor, parameters = bucket.buffer(), bucket.parameters()
        if bucket.index() == 0:
            self._layouts, self._held = {}, []  # also those of a pass that was cut short
        numbers = [self._numbers.setdefault(one, len(self._numbers)) for one in parameters]
        done = torch.futures.Future()
        warmup = self.steps < self.warmup_steps
        job = _Job(done, tensor, bucket.index(), parameters, numbers, warmup, None)
        if job.is_strided():
            self._layouts[bucket.index()] = numbers
            if self.normalise:
                job = job._replace(gradients=bucket.gradients())
        self._held.append(job)
        if bucket.is_last():
            self.steps += 1
        if bucket.is_last() or self._loaded is None:
            self._jobs.put(self._held)
            self._held = []
        return done.then(_unwrap)

    def close(self):
        """Ends the thread, and gives back plans and communicator. On all processes."""
        self._closed = True
        if self.comm is None:
            return
        self._jobs.put(None)
        self._thread.join()
        self._plans.clear()
        self.comm.close()

    # --- State -----------------------------------------------------------------------------------

    def state_dict(self):
        """Tensors and numbers of this rank, between steps. Local."""
        if self._loaded is not None:
            return self._loaded
        buckets, sizes = {}, _sizes(self._numbers)
        for index, numbers in self._layouts.items():
            buckets[index] = {"numbers": numbers, "sizes": [sizes[number] for number in numbers]}
            layout, plan = self._plans.get(index, (None, None))
            if plan is not None and layout[2:] == tuple(numbers):
                worker, server = (as_tensor(one) for one in plan.export_residual())
                buckets[index].update(bits=plan.info()["bits"], worker=worker, server=server)
        comm = self.comm
        return {
            "rank": comm.rank if comm else None, "ranks": comm.size if comm else None,
            "bits": self.bits, "normalise": self.normalise, "steps": self.steps,
            "skipped": self.skipped, "dropped": self.dropped, "buckets": buckets,
            "moments": self._normaliser.state(self._numbers) if self.normalise else {},
        }  # fmt: skip

    def load_state_dict(self, state_dict):
        """Goes on from this rank's own state, with the next step. Collective: raises `Error` on all
        ranks where some rank's is of another rank, or of another kind."""
        if self.comm is not None:
            self._check(state_dict)
        self._take(state_dict)

    def _take(self, state_dict):
        for _, plan in self._plans.values():
            plan.close()
        self._plans.clear()
        self._normaliser = Normaliser() if self.normalise else None
        self._loaded = state_dict if state_dict["steps"] > 1 else None
        for name in "steps", "skipped", "dropped":
            setattr(self, name, state_dict[name] if self._loaded else 0)

    def _check(self, state_dict):
        reason = None
        own = {"rank": self.comm.rank, "ranks": self.comm.size, "bits": self.bits}
        for name, value in {**own, "normalise": self.normalise}.items():
            if state_dict is not None and state_dict[name] not in (value, None):
                reason = wrong(f"{name} of the state is {state_dict[name]}, and here {value}")
        agree(self.comm, reason)

    def __getstate__(self):
        if self._given_group is not None:
            raise TypeError(
                "a HookState with a process_group of its own cannot be copied or pickled: take its "
                "state_dict(), and load that into one that is made with such a group"
            )
        names = ("warmup_steps", "_timeout", "bits", "normalise", "_plan_options")
        return {**{one.lstrip("_"): getattr(self, one) for one in names},
                "state": self.state_dict()}  # fmt: skip

    def __setstate__(self, saved):
        state = saved.pop("state")
        self._begin(None, **saved)
        self._take(state)

    # --- The thread ------------------------------------------------------------------------------

    def _work(self):
        while (jobs := self._jobs.get()) is not None:
            reason = None
            try:
                (self._go_on if self._loaded else self._make)(jobs)
            except BaseException as caught:  # noqa: BLE001
                reason = caught
            for job in jobs:
                job.future.set_result((job.tensor, reason))

    def _make(self, jobs):
        self._normalise(jobs)
        for job in jobs:
            self._average(job)

    def _normalise(self, jobs):
        for job in jobs:
            if job.gradients is not None:
                self._normaliser.divide(job.parameters, job.gradients)

    def _go_on(self, jobs):
        """A step whose gradients go into the buckets of the state, and back: those that
        DistributedDataParallel has in its first step are others than later."""
        loaded, self._loaded = self._loaded, None
        strided = [job for job in jobs if job.is_strided()]
        pieces = {}
        for job in strided:
            pieces.update(zip(job.numbers, job.tensor.split(_sizes(job.parameters))))
        known = {}
        for bucket in loaded["buckets"].values():
            known.update(zip(bucket["numbers"], bucket["sizes"]))
        if known != {number: piece.numel() for number, piece in pieces.items()}:
            raise wrong("the state is of another model, or of one that was wrapped otherwise")
        if self.normalise:
            self._normaliser.load(self._numbers, loaded["moments"])
        self._normalise(jobs)
        for index, bucket in loaded["buckets"].items():
            parts = [pieces[number] for number in bucket["numbers"]]
            job = strided[0]._replace(
                tensor=torch.cat(parts), index=index, numbers=bucket["numbers"]
            )
            if "worker" in bucket:
                plan = self._plan(job)
                plan.import_residual(bucket["worker"], bucket["server"])
                plan.set_bits(bucket["bits"])
            self._average(job)
            for part, mean in zip(parts, job.tensor.split(bucket["sizes"])):
                part.copy_(mean)
        for job in jobs:
            if not job.is_strided():
                self._average(job)

    def _average(self, job):
        dense = job.warmup or not job.is_strided() or job.tensor.dtype not in DTYPES
        if not dense:
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
        wanted = (job.tensor.numel(), job.tensor.dtype, *job.numbers)
        layout, plan = self._plans.get(job.index, (None, None))
        if layout == wanted:
            return plan
        if plan is not None:
            self.dropped += 1
            plan.close()
        options = {"bits": self.bits, "chunk_size": CHUNK, **self._plan_options}
        plan = Plan(self.comm, job.tensor.numel(), dtype=DTYPES[job.tensor.dtype], **options)
        self._plans[job.index] = wanted, plan
        return plan


def _sizes(parameters):
    return [one.numel() for one in parameters]


def as_tensor(values):
    """An array of float32, as a tensor on the same memory."""
    return torch.frombuffer(values, dtype=torch.float32) if len(values) else torch.empty(0)


def _unwrap(done):
    tensor, reason = done.value()
    if reason is not None:
        raise reason
    return tensor


def allreduce_hook(state, bucket):
    """The hook: give it to `register_comm_hook` with a `HookState`. What goes wrong in an exchange
    is raised by `backward`, on every rank."""
    return state.add(bucket)
