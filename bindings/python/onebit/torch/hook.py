"""A communication hook for torch.nn.parallel.DistributedDataParallel.

    state = onebit.torch.HookState(warmup_steps=20, optimizer=optimizer)
    model = DistributedDataParallel(model)
    model.register_comm_hook(state, onebit.torch.allreduce_hook)

docs/python-trainers.md#the-hook describes the hook.
"""

import gc
import queue
import threading
import time
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from onebit._native import Dtype, Status, argument_error
from onebit.communicator import Communicator
from onebit.plan import Plan
from onebit.torch.ranks import FLOATS, agree, gather, start_thread, wait_for
from onebit.torch.report import Report, ring
from onebit.torch.staged import Stage, is_staging_forced
from onebit.torch.width import Normaliser, choose

# The number of elements in a message. Buckets overlap, so the messages of one bucket need not overlap. The
# plan's own choice would be 46 messages a segment instead of 3. An exchange would then take 23 ms of a
# processor over sockets instead of 15, and 117 over gloo through Python instead of 38 (6 M elements, 4 ranks).
CHUNK = 2**19

DTYPES = {getattr(torch, one.name.lower()): one for one in Dtype}


class _Job:
    """The average of one bucket in one backward pass."""

    def __init__(self, tensor, index, numbers, warmup, gradients=None):
        self.tensor, self.index = tensor, index
        self.numbers = numbers  # numbers of the parameters, in the order of their elements
        self.strided = tensor.layout == torch.strided
        self.dense = warmup or not self.strided or tensor.dtype not in DTYPES
        self.gradients = gradients  # views of the tensor, one for each parameter; None: not needed
        self.on_device = tensor.device.type != "cpu"
        self.host = tensor  # the elements to exchange: a copy if the tensor is on a device
        self.future = future_of(tensor)
        self.done = threading.Event()
        self.copied = lambda: None  # a function that waits until the copy is complete
        self.work = self.summed = self.reason = None
        self.skipped = False


def future_of(tensor):
    """Returns a future for this tensor. Waiting for the future also waits for the tensor's device."""
    return torch.futures.Future(devices=[tensor.device] if tensor.device.type != "cpu" else [])


def wait_for_device(device):
    """Waits for the work on the current stream of a CUDA device."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.current_stream(device).synchronize()


def instances_of(kind):
    """Returns all objects of a class and of the classes derived from it."""
    kinds = [kind]
    for one in kinds:
        kinds += one.__subclasses__()
    # Each object refers to its class. gc.get_objects would also return tensors that C++ may free meanwhile.
    return [one for of in kinds for one in gc.get_referrers(of) if type(one) is of]


def models_of(parameters):
    """Returns each DistributedDataParallel that contains these parameters."""
    wanted = {id(one) for one in parameters}
    return [
        one
        for one in instances_of(DistributedDataParallel)
        if "process_group" in vars(one)
        and any(id(parameter) in wanted for parameter in one.parameters())
    ]


def _models_with(state, parameters):
    """Returns the models whose hook has this state: a bucket does not say to which model it belongs."""
    models = models_of(parameters)
    own = [one for one in models if any(of is state for _, of in getattr(one, "_comm_hooks", ()))]
    return own or models


def _group_of(models):
    groups = {id(one.process_group): one.process_group for one in models}
    if len(groups) != 1:
        raise argument_error(
            f"{len(groups)} process groups have models with these parameters: give HookState the "
            "model's as process_group"
        )
    return groups.popitem()[1]


class HookState:
    """The hook's state between steps. It has a plan for each bucket, with the bucket's residual.

    process_group: must have the same processes as the model's group; None: the model's group
    warmup_steps: the number of dense steps at the beginning, which equal those without a hook unless gradients
        are normalised. At least 1, since DistributedDataParallel creates new buckets after the first step
    optimizer: the torch.optim.Optimizer that uses the gradients; only its kind is read; None: not known
    bits: bits an element, 1, 2, 4 or 8; None: 8. With fewer bits the training may need a lower learning rate.
        If the program clips the norm of the gradients, use 2 or more. docs/scales.md says how much each costs in loss
    normalise: whether a rank divides its gradients by the root of their own second moments before they are
        averaged, also in the warm-up. This is for Adam, AdamW and similar optimizers, whose steps do not
        depend on such a factor; only epsilon, clipping and coupled weight decay get another weight, since they
        see gradients of magnitude 1. None: true with 1 and 2 bits, if such an optimizer is known
    timeout: seconds that a rank waits for a message before it raises an error; None: the timeout of the
        process group
    plan_options: options of `onebit.Plan` (scale, block_size, schedule, threads, chunk_size, ...)

    A state_dict must be loaded into a HookState with the same arguments, for a model that was made and wrapped
    in the same way. A state of fewer than two steps is ignored. The attributes are:

    bits, normalise: the requested or the chosen values
    steps: the steps that were made with this hook, including the warm-up
    compressed: buckets whose messages were compressed
    dense: buckets that torch has averaged
    skipped: those of the dense buckets for which some rank's gradient was not finite
    dropped: residuals that were dropped because torch had created new buckets
    bytes_sent: the bytes of compressed messages that this rank has sent
    comm: the communicator; None before the first backward pass
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
            raise ValueError(f"warmup_steps is {warmup_steps}: it must be at least 1")
        bits, normalise = choose(optimizer, bits, normalise)
        self._begin(process_group, warmup_steps, timeout, bits, normalise, plan_options)

    def _begin(self, process_group, warmup_steps, timeout, bits, normalise, plan_options):
        self._given_group, self.warmup_steps, self._timeout = process_group, warmup_steps, timeout
        self.bits, self.normalise, self._plan_options = bits, normalise, plan_options
        self.steps = self._loaded_steps = self.compressed = self.dense = self.skipped = self.dropped = 0
        self._normaliser = Normaliser() if normalise else None
        self._group = self.comm = self._loaded = self._model = None
        self._sent, self._closed = 0, False
        self.averaged = {}
        # Seconds of waiting for gradients at the end of the latest pass; true if exchanges begin only at that
        # time.
        self.waited, self.holds = 0.0, False
        self._gradients = self._sent_dense = 0  # bytes of all buckets; of those that torch averages
        self._checkpoint_bytes = self._counted = 0  # those sent for saved states; the part in the communicator's number
        self._numbers = {}  # number of each parameter, by the first step's order; keeps them alive
        self._layouts = {}  # by the bucket's index: the numbers of its parameters
        self._plans = {}  # by the bucket's index: (its layout, its plan)
        self._stage = Stage()  # copies of buckets that are on a device
        self._pass = []  # the jobs of a backward pass
        self._at_once = False  # whether the last bucket of the pass waits for all jobs

    def _open(self, group):
        comm = Communicator.torch(group, self._timeout)
        try:
            self._check(comm, self._loaded)
        except Exception:
            comm.close()
            raise
        self._group, self.comm = group, comm
        self._calls = queue.SimpleQueue()
        self._thread = start_thread(self._calls, "onebit-hook")
        self._end_thread = weakref.finalize(self, self._calls.put, None)

    @property
    def bytes_sent(self):
        """Returns the bytes of compressed messages that this rank has sent."""
        return self._sent if self.comm is None or self._closed else self.comm.bytes_sent - self._counted

    def _gather_state(self, comm, part):
        """Returns the parts of all ranks, and counts the bytes as those of a checkpoint. Collective."""
        before = comm.bytes_sent
        parts = gather(comm, part)
        sent = comm.bytes_sent - before
        self._checkpoint_bytes += sent
        self._counted += sent if comm is self.comm else 0
        return parts

    def report(self):
        ranks = self._group.size() if self._group is not None else 1
        sent = self.bytes_sent + ring(self._sent_dense, ranks)
        dense = ring(self._gradients, ranks)
        own = self.steps - self._loaded_steps
        return Report(self.steps, 0, own, sent, dense, self.averaged, self._checkpoint_bytes, self._loaded_steps)

    def add(self, bucket):
        """Returns the future of the average of a bucket. It completes when the backward pass ends."""
        if self._closed:
            raise argument_error("this HookState is closed: a backward pass needs a new one")
        parameters = bucket.parameters()
        if bucket.index() == 0:
            self._begin_pass(parameters)
        future = self._add(bucket, parameters)
        if bucket.is_last():
            self.end_pass()
        return future

    def _add(self, bucket, parameters):
        self.comm._check_process()
        numbers = self._number(parameters)
        job = _Job(bucket.buffer(), bucket.index(), numbers, self.steps < self.warmup_steps)
        if job.strided:
            self._layouts[job.index] = numbers
            job.gradients = bucket.gradients() if self.normalise else None
        self._pass.append(job)
        self._gradients += bytes_of(job.tensor)
        if self._loaded is None and not self.holds:
            self._start(job)
        return job.future

    def _number(self, parameters):
        """Returns the numbers of a bucket's parameters. A state names parameters by these numbers. So a hook
        that averages only later steps must number all buckets of the first step too."""
        return [self._numbers.setdefault(one, len(self._numbers)) for one in parameters]

    def end_pass(self):
        """Called when all buckets of a backward pass have been added."""
        self.steps += 1
        self._when_the_pass_ends()

    def _begin_pass(self, parameters):
        self._layouts, self._pass, self._at_once = {}, [], False
        if self.comm is not None and all(one in self._numbers for one in parameters):
            return
        models = [self._model()] if self._model else _models_with(self, parameters)
        # The first pass of a static graph fills all its buckets at the end of the pass.
        self._at_once = any(one.static_graph for one in models)
        group = _group_of(models) if self._given_group is None else self._given_group
        if self.comm is None:
            self._open(group)
        elif group is not self._group:
            raise argument_error("this HookState is used with another process group: make one HookState for each group")

    def close(self):
        """Ends the thread, and closes plans and the communicator. Call it on all ranks."""
        self._sent, self._closed = self.bytes_sent, True
        if self.comm is None:
            return
        self._end_thread()
        self._thread.join()
        self._plans.clear()
        self._numbers.clear()
        self.comm.close()

    # --- A backward pass -------------------------------------------------------------------------

    def _start(self, job, saved=None):
        """Passes compressed exchanges to the thread, and dense ones to torch at once: in a thread they could
        come between other collectives of the group."""
        if job.dense:
            self._normalise(job)
            self._start_dense(job)
            job.done.set()
            return
        if job.on_device or is_staging_forced():
            self._normalise(job)
            job.gradients = None
            job.host, job.copied = self._stage.begin(job.index, job.tensor)
        self._calls.put(lambda: self._exchange(job, saved))

    def _start_dense(self, job):
        """Averages in the way of DistributedDataParallel. Some versions of gloo do not support bfloat16."""
        self.dense += 1
        self._sent_dense += bytes_of(job.tensor)
        job.tensor.div_(self._group.size())
        bfloat16 = job.tensor.dtype == torch.bfloat16
        job.summed = job.tensor.float() if bfloat16 else job.tensor
        job.work = dist.all_reduce(job.summed, group=self._group, async_op=True)

    def _normalise(self, job):
        if job.gradients is not None:
            self._normaliser.divide(job.numbers, job.gradients)

    def _exchange(self, job, saved):
        """Exchanges a bucket. Runs on the thread. saved: the bucket of a loaded state, or None."""
        try:
            self._normalise(job)
            job.copied()
            plan = self._plan(job)
            if saved is not None and "worker" in saved:
                plan.import_residual(*_residual_of(plan, saved))
                plan.set_bits(saved["bits"])
            job.skipped = plan.allreduce(job.host, job.host) == Status.SKIPPED
        except BaseException as caught:  # noqa: BLE001
            job.reason = caught
        job.done.set()

    def _when_the_pass_ends(self):
        """Calls a function at the end of the backward pass, before DistributedDataParallel waits for its
        futures. Without a pass calls it at once: on a rank in the model's join() that has no inputs."""
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        try:
            if not self._at_once:
                queue_callback(lambda: self._finish(queue_callback))
        except RuntimeError:
            self._at_once = True
        if self._at_once:
            self._finish(lambda call: call())

    def _finish(self, at_the_end):
        jobs, self._pass = self._pass, []
        self._wait_for_device(jobs)
        began = time.perf_counter()
        try:
            for job in self._start_rest(jobs):
                self._wait(job)
        except BaseException as caught:  # noqa: BLE001: raised once the model has ended its pass
            reason = caught

            def fail():
                raise reason

            at_the_end(fail)
        self._wait_for_device(jobs)
        self.waited = time.perf_counter() - began
        for job in jobs:
            job.future.set_result(job.tensor)

    def _start_rest(self, jobs):
        """Starts the jobs that have not been started, and returns all jobs that the pass waits for."""
        if self._loaded is not None:
            return self._resume(jobs)
        for job in jobs if self.holds else ():
            self._start(job)
        return jobs

    def _wait_for_device(self, jobs):
        """Waits for the device's queue if exchanges are held, so that the time of the pass includes its
        work."""
        if self.holds and jobs:
            wait_for_device(jobs[0].tensor.device)

    def _wait(self, job):
        wait_for(self.comm, job.done)
        if job.reason is not None:
            raise job.reason
        if job.skipped:
            self.skipped += 1
            self._start_dense(job)
        if job.work is None:
            self.compressed += 1
            if job.host is not job.tensor:  # the next copy to the host runs after this one
                job.tensor.copy_(job.host, non_blocking=True)
            return
        job.work.wait()
        if job.summed is not job.tensor:
            job.tensor.copy_(job.summed)

    def _resume(self, jobs):
        """Averages gradients in the first step after loading. Uses the buckets of the saved state, since
        DistributedDataParallel's buckets differ in its first step. Returns the other jobs."""
        loaded, self._loaded = self._loaded, None
        pieces, sizes = {}, {}
        for job in jobs:
            if job.strided:
                pieces.update(zip(job.numbers, job.tensor.split(self._sizes(job.numbers))))
        for bucket in loaded["buckets"].values():
            sizes.update(zip(bucket["numbers"], bucket["sizes"]))
        if sizes != {number: piece.numel() for number, piece in pieces.items()}:
            raise argument_error("the state belongs to another model, or to a model that was wrapped differently")
        if self.normalise:
            self._normaliser.load(loaded["moments"])
        for job in jobs:
            self._normalise(job)
        for index, saved in loaded["buckets"].items():
            parts = [pieces[number] for number in saved["numbers"]]
            warmup = self.steps <= self.warmup_steps
            of_state = _Job(torch.cat(parts), index, saved["numbers"], warmup)
            self._start(of_state, saved)
            self._wait(of_state)
            for part, mean in zip(parts, of_state.tensor.split(saved["sizes"])):
                part.copy_(mean)
        others = [job for job in jobs if not job.strided]
        for job in others:
            self._start(job)
        return others

    # --- State -----------------------------------------------------------------------------------

    @property
    def differs_between_ranks(self):
        """True if the state has residuals, or moments of this rank's own gradients."""
        loaded = self._loaded["buckets"].values() if self._loaded else ()
        return self.normalise or bool(self._plans) or any("worker" in one for one in loaded)

    def state_dict(self):
        """Returns this rank's state as tensors and numbers. Must be called between steps. Local."""
        if self._closed:
            raise argument_error("this HookState is closed, and has no residuals: take its state before close()")
        if self._loaded is not None:
            return self._loaded
        buckets = {}
        for index, numbers in self._layouts.items():
            buckets[index] = {"numbers": numbers, "sizes": self._sizes(numbers)}
            layout, plan = self._plans.get(index, (None, None))
            if plan is not None and layout[2:] == tuple(numbers):
                worker, server = (as_tensor(one) for one in plan.export_residual())
                info = plan.info()
                buckets[index].update(bits=info["bits"], worker=worker, server=server,
                                      server_start=info["server_residual_start"])  # fmt: skip
        comm = self.comm
        return {
            "rank": comm.rank if comm else None, "ranks": comm.size if comm else None,
            "bits": self.bits, "normalise": self.normalise, "steps": self.steps,
            "skipped": self.skipped, "dropped": self.dropped, "buckets": buckets,
            "moments": self._normaliser.state() if self.normalise else {},
        }  # fmt: skip

    def load_state_dict(self, state_dict):
        """Continues from this rank's own state with the next step. None: starts from the beginning.
        Collective: raises `Error` on all ranks if some rank's state is of another rank or kind."""
        if self.comm is not None:
            self._check(self.comm, state_dict)
        self._take(state_dict)

    def drop(self):
        """Drops the residuals. Must be called between steps, on all ranks."""
        for _, plan in self._plans.values():
            plan.close()
        self._plans.clear()

    def _take(self, state_dict):
        self.drop()
        self._normaliser = Normaliser() if self.normalise else None
        goes_on = state_dict is not None and state_dict["steps"] > 1 and state_dict["buckets"]
        self._loaded = state_dict if goes_on else None  # without buckets the hook has averaged nothing
        for name in "steps", "skipped", "dropped":
            setattr(self, name, state_dict[name] if self._loaded else 0)
        self._loaded_steps = self.steps

    def _check(self, comm, state_dict):
        reason = None
        own = {"rank": comm.rank, "ranks": comm.size, "bits": self.bits}
        for name, value in {**own, "normalise": self.normalise}.items():
            if state_dict is not None and state_dict[name] not in (value, None):
                reason = argument_error(
                    f"{name} of the loaded state is {state_dict[name]}, but {name} of this HookState is {value}"
                )
        agree(comm, reason)

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

    def _plan(self, job):
        """Returns the bucket's plan. When torch creates new buckets, it does so on all ranks in the same
        step."""
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

    def _sizes(self, numbers):
        counts = [one.numel() for one in self._numbers]
        return [counts[number] for number in numbers]


def bytes_of(tensor):
    """Returns the bytes of a tensor's elements. For a sparse tensor includes those of the indices."""
    if tensor.layout == torch.strided:
        return tensor.numel() * tensor.element_size()
    return bytes_of(tensor._values()) + bytes_of(tensor._indices())


def _residual_of(plan, saved):
    """Returns the saved residuals for the plan. A state from another number of ranks has a worker residual for
    the whole bucket, and no server residual."""
    worker, info = saved["worker"], plan.info()
    if saved["server"] is None:
        first = info["worker_residual_start"]
        worker = worker[first : first + info["worker_residual_count"]].clone()
    return worker, saved["server"]


def as_tensor(values):
    """Returns an array of float32 as a tensor that shares its memory."""
    return torch.frombuffer(values, dtype=torch.float32) if len(values) else torch.empty(0, **FLOATS)


def allreduce_hook(state, bucket):
    """Is the hook: pass it to `register_comm_hook` with a `HookState`. `backward` raises the errors of an
    exchange, on every rank."""
    return state.add(bucket)
