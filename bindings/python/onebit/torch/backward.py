"""The communication hook for an optimizer. With it DistributedDataParallel leaves each rank its own gradients,
and the optimizer exchanges its updates: a bucket as soon as the backward pass has filled it, and the rest in
the optimizer's step.

    optimizer = onebit.torch.EfficientAdam(model.parameters(), lr=1e-3)
    model = DistributedDataParallel(model)
    optimizer.attach(model)
"""

import sys
import weakref

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from onebit import _native
from onebit._native import Error, argument_error, warn
from onebit.torch.hook import bytes_of
from onebit.torch.ranks import interruptible

# The number of steps that are observed before a step may begin in the backward pass. After the first step
# torch creates new buckets.
_OBSERVED = 2
# The smallest number of a gradient's elements that are compared, to notice changes that torch does not count.
_SAMPLES = 8


class HookHandle:
    """The state with which the hook is registered. It refers to an optimizer, or another object with the
    method `add`, which is not copied or pickled with the model, and has the model's group."""

    def __init__(self, optimizer=None, group=None):
        self.optimizer, self.group = optimizer, group

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        return {"optimizer": None}


_handles = weakref.WeakKeyDictionary()  # by model: torch can not remove a hook from a model


def optimizer_hook(state, bucket):
    """Is the hook. `optimizer.attach(model)` registers it, or
    `model.register_comm_hook(optimizer.hook_state(), onebit.torch.optimizer_hook)`."""
    optimizer = getattr(state, "optimizer", None)
    if optimizer is None:
        raise argument_error("the hook's state is not optimizer.hook_state(), or was pickled")
    if optimizer._closed:  # the model averages as without the hook
        return default_hooks.allreduce_hook(state.group, bucket)
    return optimizer.add(bucket)


def register(model, optimizer):
    """Makes the model's hook use this optimizer. The previous optimizer must be closed."""
    if model not in _handles:
        handle = HookHandle(optimizer, model.process_group)
        model.register_comm_hook(handle, optimizer_hook)
        _handles[model] = handle
    _handles[model].optimizer = optimizer


def wrapped_of(model):
    """Returns the only DistributedDataParallel that a model is or contains, also inside a model of
    torch.compile or Fabric."""
    model = getattr(model, "_orig_mod", model)
    found = _wrapped_in(model)
    return next(iter(found.values())) if len(found) == 1 else model


def _wrapped_in(model):
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    return {name: one for name, one in modules if isinstance(one, DistributedDataParallel)}


def check_wrapped(model):
    if not isinstance(model, DistributedDataParallel):
        several = _wrapped_in(model)
        if several:
            raise argument_error(f"model is a {type(model).__name__} with {len(several)} DistributedDataParallel models "
                                 f"({', '.join(several)}): make a call for each of them")  # fmt: skip
        raise argument_error(
            f"model is a {type(model).__name__}, not a DistributedDataParallel: wrap it in one first "
            "(with Accelerate, call this after accelerator.prepare), or for FSDP2 use onebit.torch.fsdp.compress"
        )
    handle = _handles.get(model)
    if handle is not None and not handle.optimizer._closed:
        raise argument_error("the model has a communication hook already: close() the optimizer that set it")
    if handle is None and getattr(model, "_comm_hooks", None):
        raise argument_error("the model has a communication hook already")


def sparse_modules(model):
    """Returns the modules whose weight has sparse gradients, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "sparse", False)
        and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
    }


def check_model(model, parameters, ranks, remainder):
    """Raises `Error` unless the hook can work for this model and this optimizer's parameters. Without a
    remainder these must be all parameters of the model.

    ranks: this rank's number, and the number of ranks of the optimizer
    """
    check_wrapped(model)
    group = model.process_group
    if (group.rank(), group.size()) != ranks:
        raise argument_error(
            f"the model's group has rank {group.rank()} of {group.size()}, the optimizer's "
            f"communicator rank {ranks[0]} of {ranks[1]}"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise argument_error("the model has DistributedDataParallel's own mixed_precision: use autocast")
    for name in sparse_modules(model.module) if remainder is None else ():
        raise argument_error(f"{name} has sparse gradients: make it with sparse=False")
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    names = {id(one): name for name, one in model.module.named_parameters() if name not in ignored}
    known = {id(one) for one in parameters}
    for name, one in model.module.named_parameters():
        if remainder is None and one.requires_grad and id(one) in names and id(one) not in known:
            raise argument_error(f"parameter {name} of the model is not one of the optimizer's")
    for number, one in enumerate(parameters):
        if id(one) not in names:
            raise argument_error(f"parameter {number} of the optimizer is not one of the model's")


def scalers_of(optimizer):
    """Returns the scalers with which the program makes the current step: those whose step() is among the
    callers."""
    kind = getattr(getattr(torch, "amp", None), "GradScaler", torch.cuda.amp.GradScaler)
    frame, found = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_name == "step":
            caller = frame.f_locals.get("self")
            if isinstance(caller, kind) and caller.is_enabled() and caller not in found:
                found.append(caller)
        frame = frame.f_back
    return [one for one in found if one._found_inf_per_device(optimizer)]


def tell_scalers(optimizer):
    """Tells GradScalers that all ranks have skipped a step, so that the scale is lowered on every rank.
    Gradients that are averaged in the backward pass need the same scale on all ranks."""
    for scaler in scalers_of(optimizer):
        for found in scaler._found_inf_per_device(optimizer).values():
            found.fill_(1.0)


def is_in_join(model):
    return getattr(getattr(model, "_join_config", None), "enable", False)


class Backward:
    """Watches backward passes for an optimizer, and begins exchanges in them.

    An exchange begins in the backward pass only if earlier gradients were final when their pass ended. It
    begins in the step if the program clips or scales gradients between backward and step, or makes several
    passes a step. The ranks need not agree on this, since no bit of a result depends on it. If gradients
    change after the step has begun, the step begins again.
    """

    def __init__(self, optimizer, model=None, overlap=True):
        # These references are weak, so that the program's objects are freed without the help of the garbage
        # collector.
        self._optimizer_of = weakref.ref(optimizer)
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self.overlap = overlap
        self._numbers = {id(one): number for number, one in enumerate(optimizer._parameters)}
        self._views = {}  # by number: the view of a bucket in which the library reads the gradient
        self._old = []  # views that only the open step still reads
        self.open = False  # a step of the library has begun
        self.holds = False  # no step begins in the pass, so that the pass's time is that of the computation
        self._clean = 0  # the number of latest steps in a row whose gradients were final
        self._passes = 0  # backward passes since the latest step
        self._rates = None  # the rates at the beginning of the pass
        self._marks = None  # values that identify the gradients at the end of the pass
        self._places = None  # addresses of the gradients at its end, and values that show writes
        self._warned_of_no_sync = self._warned_of_writes = False
        self.gradients = self.overlapped = 0  # bytes of all buckets; number of steps that began before step()

    @property
    def _optimizer(self):
        return self._optimizer_of()

    @property
    def model(self):
        return self._model()

    # --- In the backward pass --------------------------------------------------------------------

    def add(self, bucket):
        """Called when a bucket is full. Returns the future of those gradients that are averaged; None: there
        are none."""
        self.gradients += bytes_of(bucket.buffer())
        follows = self.is_joining() and not _is_in_a_pass()  # this rank has no inputs: its buckets are zeros
        if bucket.index() == 0 and not follows:
            self._begin()
        remainder, averaged = self._optimizer._remainder, None
        if remainder is not None:
            averaged = remainder.add(bucket, lambda one: id(one) in self._numbers)
        if follows:
            if bucket.is_last():  # the step follows the last bucket
                self._optimizer.follow()
            return averaged
        for number, parameter, view in self._carried(bucket, remainder is None):
            if parameter.stride() != view.stride():  # the bucket has the elements in the parameter's order
                view = view.as_strided(parameter.size(), parameter.stride())
            self._add(number, view)
        if self.open and self._optimizer._stage is not None:
            self._optimizer._stage.end_bucket(self._optimizer.onebit.ready)
        if bucket.is_last():  # `_end` must run after DistributedDataParallel's own work at the end of the pass
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._end))
        return averaged

    def is_joining(self):
        """True in the model's join(), in which ranks may have no inputs."""
        model = self._model()
        if not is_in_join(model):
            return False
        if not model._divide_by_initial_world_size:
            raise argument_error("the model is in join() with divide_by_initial_world_size=False, so a hook "
                                 "cannot know the number of ranks of the mean: pass True")
        if model.find_unused_parameters or self._optimizer._shards.number:
            raise argument_error("join() is not supported with find_unused_parameters, or if the ranks of a "
                                 "host have shards (inside): call onebit.torch.compress with "
                                 "kind=onebit.torch.HookState")  # fmt: skip
        return True

    def _carried(self, bucket, all_are):
        """Yields (number, parameter, gradient) of those parameters of a bucket that the optimizer has."""
        parameters, strided = bucket.parameters(), bucket.buffer().layout == torch.strided
        gradients = bucket.gradients() if strided else parameters
        for parameter, view in zip(parameters, gradients):
            number = self._numbers.get(id(parameter))
            if number is None and all_are:
                raise argument_error(
                    f"a parameter of shape {tuple(parameter.shape)} of the model is not one of the "
                    "optimizer's"
                )
            if number is None:
                continue
            if not strided:
                raise argument_error("a bucket of gradients is sparse: the optimizer cannot use that")
            yield number, parameter, view

    def _begin(self):
        """Begins a backward pass. Ends an open step of an earlier pass if the optimizer made no step after
        that pass."""
        self._passes += 1
        self._marks = self._places = None
        if self._passes > 1:
            self.discard()
            if self.is_joining():  # ranks without inputs make one pass a step
                raise argument_error("join() is not supported with several backward passes before a step: call "
                                     "onebit.torch.compress with kind=onebit.torch.HookState")
        if not self.overlap or self._passes > 1 or self.is_joining():
            return
        self._rates = self._optimizer._wanted_rates()
        if self.holds or self._clean < _OBSERVED or len(self._views) < len(self._numbers):
            return
        if self._optimizer._is_coupled():  # a weight decay was set since then
            return
        try:
            self._optimizer._refresh()
        except Error:
            return  # step() raises it again
        self._optimizer._set_rates(self._rates)
        self._optimizer._set_passes(1)
        for number, view in self._views.items():
            self._optimizer._set_gradient(number, view, final=False)
        self._optimizer.onebit.begin(self._rates.rate)
        self.open = True

    def _add(self, number, view):
        known = self._views.get(number)
        if self.open:
            if known.data_ptr() != view.data_ptr():
                known.copy_(view)  # the buckets have changed since then, which the next step notices
                self._old.append(known)
            self._optimizer._ready(number, known)
        if self.overlap and (known is None or known.data_ptr() != view.data_ptr()):
            self._views[number] = view

    def _end(self):
        self._places = self._find_places()
        if self.overlap:
            self._marks = self._mark()

    def _find_places(self):
        gradients = [one.grad for one in self._optimizer._parameters]
        return [None if one is None else (one.data_ptr(), one._version) for one in gradients]

    def _mark(self):
        """Returns a value that changes if a gradient is replaced by another tensor or is written to. A write
        through `.data` changes it if one of a few sampled elements changes."""
        gradients = [one.grad for one in self._optimizer._parameters]
        samples = {}  # by device: copying all samples takes as long as copying one
        for one in gradients:
            if one is not None:
                samples.setdefault((one.device, one.dtype), []).append(_sample_elements(one))
        return (
            self._find_places(),
            [one._version for one in self._optimizer._parameters],
            [torch.cat(ones).cpu().view(torch.uint8).numpy().tobytes() for ones in samples.values()],
        )

    # --- In the step -----------------------------------------------------------------------------

    def finish_passes(self, rates, scaled, unscaled):
        """Called at the beginning of a step. Returns the number of backward passes since the latest step. Also
        returns whether the library's step has already begun, with the same rates and gradients.

        scaled: a GradScaler has checked the gradients; unscaled: it has also divided them
        """
        self._check_sync()
        self._check_writes(unscaled)
        final = (
            self._passes == 1
            and not scaled
            and rates == self._rates
            and self._marks is not None
            and self._marks == self._mark()
        )
        if self._passes and self.overlap:
            self._clean = self._clean + 1 if final else 0
            if not final:
                self.discard()
        passes, self._passes = self._passes, 0
        was_open, self.open = self.open, False
        self.overlapped += was_open
        return passes, was_open

    def _check_sync(self):
        if getattr(self._model(), "require_backward_grad_sync", True) or self._warned_of_no_sync:
            return
        self._warned_of_no_sync = True
        warn(
            "step() was called inside the model's no_sync(), and exchanges gradients nevertheless. While gradients "
            "are accumulated, do not call step(); with Accelerate pass the optimizer to prepare(), whose step() then "
            "does nothing. For local steps, as Accelerate's LocalSGD makes, use onebit.torch.DiLoCo"
        )

    def _check_writes(self, unscaled):
        places, self._places = self._places, None
        if self._warned_of_writes or places is None or self._optimizer.comm.size == 1:
            return
        self._warned_of_writes = any(
            None not in (before, now) and before[0] == now[0] and now[1] - before[1] > unscaled
            for before, now in zip(places, self._find_places())
        )
        if self._warned_of_writes:
            warn(
                "gradients were written to between backward and step. At that time they are this rank's own, "
                "not the mean of all ranks'. If torch's clip_grad_norm_ wrote to them, it took the norm of "
                "this rank's gradients: call optimizer.clip_grad_norm_(max_norm) instead"
            )

    def end_clipping(self):
        """Called when the optimizer itself has clipped the gradients, on all ranks."""
        self.discard()
        self._places = None

    def end_step(self):
        self._old.clear()

    def skip_step(self):
        overlap = self.overlap
        self.discard()
        self.overlap, self._clean, self._passes = overlap, 0, 0

    def discard(self):
        """Called when gradients are not final after a backward pass. Ends an open step as failed on all ranks,
        and begins no more steps in backward passes."""
        self.overlap = False
        if self.open:
            self.open = False
            fail_step(self._optimizer.onebit)
            if self._optimizer._stage is not None:
                self._optimizer._stage.wait()
        self._views.clear()


def _sample_elements(gradient):
    """Returns some elements of a gradient, as a view of its memory from the first element on."""
    if not gradient.is_contiguous():
        gradient = gradient.as_strided((gradient.numel(),), (1,))
    flat = gradient.view(-1)
    return flat[:: max(flat.numel() // _SAMPLES, 1)]


def _is_in_a_pass():
    try:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: None)
    except RuntimeError:
        return False
    return True


def fail_step(optimizer):
    """Makes the step fail on all ranks. The step changes nothing, and no rank waits."""
    function = _native.library().onebit_optimizer_step
    interruptible(optimizer._comm, lambda: function(optimizer.handle, float("nan")))
