"""The automatic choice of a method: `onebit.torch.auto(model, optimizer)`.

The ranks time small exchanges of each method. At the beginning of a training that could use one bit, the first steps
are the warm-up of one bit, with 8 bits, if that exchanges faster than dense sums. Other trainings begin dense, with
DistributedDataParallel's steps, or in 8 bits if dense exchanges would take long. A few of these first steps are
timed, and their exchanges begin only when the gradients are computed: an exchange beside the computation would use
time of the same cores. If overlapped steps were not as much shorter as expected, as on cores that are all busy, no
exchange counts as overlapped. Then `onebit_method_choose` chooses (include/onebit/method.h): the slowest rank counts,
and all ranks make the same choice. From then on the times of steps are compared with the expected times. Before
another choice the computation is timed again.
"""

import collections
import copy
import ctypes
import json
import math
import statistics
import sys
import time
import types
import weakref

import torch

from onebit import _native
from onebit._native import Error, Status, argument_error, check, warn
from onebit.communicator import Communicator
from onebit.plan import Plan
from onebit.torch.backward import scalers_of, tell_scalers
from onebit.torch.hook import DTYPES, wait_for_device
from onebit.torch.local import LAST, LocalSteps, average_moments, averaged_moments, saved_parts, shares_of
from onebit.torch.meter import DENSE, EIGHT, LOCAL, METHODS, ONE, Meter
from onebit.torch.ranks import FLOATS, gather, interruptible
from onebit.torch.remainder import (
    SavedHook, copied, is_in_warmup, means, moments_of, of_parameters, records, save_with, states_of, take,
)  # fmt: skip
from onebit.torch.report import Report
from onebit.torch.schedule import ALLGATHER, AUTOMATIC

# An obstacle prevents local steps, in which the ranks' models differ. The latest obstacle is reported.
_OBSTACLES = _NONE, _SWITCH, _OTHERS, _UNUSED, _SCALER, _JOIN = (
    None, "local_steps=False", "not all parameters belong to one optimizer with a one-bit form",
    "find_unused_parameters", "a GradScaler, with which each rank would skip other steps", "join()")
_DIFFER = ("; the ranks' models differ until all ranks call optimizer.automatic.synchronize(); "
           "local_steps=False keeps them equal")  # fmt: skip
# Seconds. If a dense exchange takes longer, the first steps are in 8 bits. If an exchange in 8 bits takes longer,
# local steps may end the warm-up early.
_SLOW = 0.1
_FIRST, _MEASURED = 3, 4  # steps before a choice, after the first step: as they are, and then not overlapped
_PATIENCE = 8  # the first choice ends a warm-up whose steps take this many times as long as local steps
_SETTLING = 3  # steps after a change that are ignored
_VISIBLE = 0.05  # overlapping must save at least this part of a step, by the model, to be compared
_HIDDEN = 0.75  # overlapping must save at least this part of what it saves by the model, or it counts as useless
_DEVIATION = 0.3  # relative to the expected time of a step
_WINDOW = 20  # the largest number of steps that are compared at once; fewer if steps take more than 0.25 s
_PROBES, _CHECKS = 1 / 200, 1 / 200  # parts of the time: at most for new measurements, and for comparisons

# A decorator of functions that torch.compile must call, not trace, as torch does with its optimizers' steps.
_not_compiled = getattr(getattr(torch, "compiler", None), "disable", lambda function: function)


def _format_seconds(value):
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


def _without_hook(dicts):
    """Returns states without the values that a hook has saved in them. An earlier version saved such values while it
    waited for one bit with 8 bits."""
    found = [{**one, "state": states_of(one)} for one in dicts]
    for one in found:
        take(one["state"])
    return found if len(found) > 1 else found[0]


class Automatic:
    """Chooses a method for the exchange of a model, and steps the optimizer with the chosen method.

    comm: a `Communicator` of the model's ranks; this object closes it
    optimizers: the program's optimizers; the one at index `lead` is stepped here
    hook: the `HookState` that averages gradients, dense and in 8 bits
    make: a function that creates the library's optimizer, which replaces the lead; it takes what the state also has
        to save. None: the library has no such optimizer
    warmup: the steps in 8 bits at the beginning of a training in one bit; 0: no warm-up
    words: the lines to print when the library's optimizer is created
    bytes_a_day: the most bytes that a host may send; None: any number
    local_steps: whether local steps may be chosen; None: only if each other method sends more than bytes_a_day
    first: the `FirstSum` of the ranks
    """

    def __init__(self, comm, model, optimizers, lead, hook, make, warmup, words, bytes_a_day, local_steps, first):
        self.comm, self.hook, self._make, self._words = comm, hook, make, words
        self._warmup = warmup
        self.lead, self._model = optimizers[lead], weakref.ref(model)
        every = [one for one in model.parameters() if one.requires_grad]
        self._elements = sum(one.numel() for one in every if one.dtype in DTYPES)
        self._frozen = [(name, one) for name, one in model.module.named_parameters() if not one.requires_grad]
        self._scaling, self._once_frozen = False, [one for _, one in self._frozen]
        self.meter = Meter(comm, model.process_group, every[0].device)
        whole = make is not None and len(optimizers) == 1 and not hook.averaged
        self._obstacle = (_SWITCH if local_steps is False else _OTHERS if not whole else
                          _UNUSED if model.find_unused_parameters else _NONE)  # fmt: skip
        self._every_step = METHODS[: 2 + (make is not None)]
        self._choice = _native.make_structure(_native.MethodChoice)
        self._choice.elements, self._choice.bytes_a_day = self._elements, bytes_a_day or 0.0
        self._local_steps = local_steps
        self._choice.methods = self._allowed()
        self.made = self.local = self._plan = self._saved = None
        self._said = False
        self._shares = None  # for moments that differ between ranks after `close`
        self._group = model.process_group
        self._reports, self._own, self._end = [], 0.0, None
        self._length, self._cost_of_comparing = _WINDOW, 0.0
        self._device = every[0].device
        self._dense_step = self.lead.step
        self._begin({"method": DENSE})
        record = self._agreed_record([self.lead.state], first.wait())
        if record.get("waits"):
            take(self.lead.state)
        self._switch_method(record["method"])
        save_with(self.lead, SavedHook(hook, model, self._elements, self._record, comm))
        self._dense_state = self.lead.state_dict, self.lead.load_state_dict, (
            self.lead.consolidate_state_dict)
        self._own_state = self.lead.torch_state_dict
        self._begin(record)
        if not self.decided:
            self._measure()
        self.meter.of_small_sum = 0.0  # the next measurements are of another time
        self._begin_training()
        self._give_methods(optimizers)

    def _begin_training(self):
        """Chooses the method of the first steps, unless a state has one."""
        dense, eight = self._choice.exchange[:2]
        if self.steps or self.method != DENSE:
            return
        if eight < dense and self._is_early():
            self._switch_method(ONE)
            may_be_local = not self._obstacle and (self._local_steps or self._choice.bytes_a_day)
            if eight < _SLOW or not may_be_local:  # local steps will not end the warm-up
                self._skip_next_steps(max(self._warmup_left() - _MEASURED - 2, _FIRST))
        else:
            self._switch_method(self._method_without_warmup())

    def _method_without_warmup(self):
        dense, eight = self._choice.exchange[:2]
        return EIGHT if dense > max(_SLOW, eight) else DENSE

    def _give_methods(self, optimizers):
        def step(_, *arguments, **named):
            return self._step(*arguments, **named)

        step = _not_compiled(step)
        step._wrapped_by_lr_sched = step._with_counter = True
        lead = self.lead
        lead.step = types.MethodType(step, lead)
        lead._opt_called, lead._step_count = True, 1  # schedulers that exist already check these attributes
        lead.state_dict, lead.load_state_dict = self._state_dict, self._load_state_dict
        lead.consolidate_state_dict, lead.automatic = self._consolidate, self
        lead.torch_state_dict = self._torch_state_dict
        for one in optimizers:
            one.close, one.report, one.describe = self.close, self.report, self.describe
            one.clip_grad_norm_ = self._clip
            if one is not lead:
                one.torch_state_dict = one.state_dict

    @property
    def _closed(self):
        return self.comm is None

    @property
    def ended_in_one_bit(self):
        """True if this object is closed, and its optimizer's moments were closed with it."""
        return self._closed and self.made is not None

    @property
    def methods(self):
        return self._every_step if self._obstacle else METHODS

    def _allowed(self):
        """Returns the methods that may be chosen, as a sum for the library; 0 is its default."""
        return 0 if self._local_steps is None and not self._obstacle else 2 ** len(self.methods) - 1

    def add(self, bucket):
        """Returns the future of a bucket of gradients in the backward pass, with each method."""
        joins = self._joins()
        if joins and self._obstacle is _NONE:
            self._obstacle = _JOIN
        if joins and self.made is not None and not self.decided and bucket.index() == 0:
            self._switch_method(self._method_without_warmup())  # all ranks come here, also those without inputs
        self.hook._number(bucket.parameters())
        if self.local is None:
            return (self.made or self.hook).add(bucket)
        if not joins:
            return self._own_gradients(bucket.buffer())
        future = self.hook.add(bucket)
        if bucket.is_last():  # ranks without inputs make no step after this
            self._change(EIGHT)
        return future

    def _own_gradients(self, buffer):
        future = torch.futures.Future(devices=[buffer.device] if buffer.device.type != "cpu" else [])
        future.set_result(buffer)
        return future

    def _joins(self):
        """True inside the model's join(), in which a rank may make no step."""
        return getattr(getattr(self._model(), "_join_config", None), "enable", False)

    # --- A step ----------------------------------------------------------------------------------

    def _step(self, *arguments, **named):
        """Makes a step. The arguments are those of the optimizer, of which torch's have a closure."""
        if self._closed:
            self.average_own_moments()
            return (self._dense_step if self.made is None else self.made.step)(*arguments, **named)
        if not self._has_begun:
            self._print_beginning()
        if self._holds:
            wait_for_device(self._device)
        begin = self.meter.now()
        if self.local is not None and "found_inf" in vars(self.lead):
            result = self._leave_to_scaler()
        elif self.made is None:
            self._look_for_thawed()
            result = self._dense_step(*arguments, **named)
            if self.local is not None:
                self.lead.status = self.local.step()
                self.hook.steps += 1  # the hook's statistics include these steps
        else:
            result = self._step_made(*arguments, **named)
        self._note_step(begin, self.meter.now())
        self._hold_next_step()
        self._end = self.meter.now()
        return result

    def average_own_moments(self):
        """Makes the moments equal, if `close` has ended local steps. Most programs make no further step, so `close`
        does not send them. Collective."""
        if self._shares:
            with Communicator.torch(self._group) as comm:
                average_moments(self.lead, comm, self._shares)
            self._shares = None

    def _leave_to_scaler(self):
        """Ends local steps because the program uses a new scaler: the next step averages gradients."""
        self._obstacle = _SCALER
        tell_scalers(self.lead)
        self._change(EIGHT)

    def _look_for_thawed(self):
        """Warns once of gradients for which DistributedDataParallel has no bucket."""
        known = self.hook._numbers
        thawed = [name for name, one in self._frozen if one.grad is not None and one not in known]
        if thawed:
            self._frozen = []
            warn(f"{', '.join(thawed[:4])}: frozen when DistributedDataParallel was made, which "
                 "therefore does not average the gradients: each rank updates these parameters by its "
                 "own gradients, and the models diverge. Wrap the model again")

    def _step_made(self, *arguments, **named):
        # A scaler gives these attributes to the lead, whose own step, for the remainder, must not see them.
        scaled = {name: vars(self.lead).pop(name) for name in ("grad_scale", "found_inf")
                  if name in vars(self.lead)}  # fmt: skip
        vars(self.made).update(scaled)
        try:
            result = self.made.step(*arguments, **named)
            if scaled and self.made.status == Status.SKIPPED:
                tell_scalers(self.lead)
            return result
        finally:
            self.lead.status = self.made.status
            vars(self.lead).update(scaled)
            for name in scaled:
                del vars(self.made)[name]

    def _clip(self, max_norm, norm_type=2.0):
        if self.made is not None:
            return self.made.clip_grad_norm_(max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(self._model().parameters(), max_norm, norm_type)

    def _switch_method(self, method, convert=True):
        """Switches to a method. convert: whether the lead continues from the state of the previous method"""
        if self.local is not None:
            self._end_local(convert, method)
        if self.made is not None and method != ONE:
            self._return_to_lead(convert, method)
        self.method = method
        if method == LOCAL:
            self._begin_local()
        if method == ONE and self.made is None:
            self._begin_one_bit()
        if method != EIGHT:
            self.hook.drop()
        self.hook.warmup_steps = 0 if method in (EIGHT, LOCAL) else math.inf

    def _is_early(self):
        """True if the lead has made fewer steps than the warm-up of one bit has, so that it could still be in that
        warm-up."""
        made = [float(one["step"]) for one in of_parameters(self.lead.state) if "step" in one]
        return self._warmup > max(made, default=0)

    def _warmup_left(self):
        """Returns how many steps of the warm-up of one bit, which are in 8 bits, remain."""
        if self.made is None or not is_in_warmup(self.made):
            return 0
        return max(self.made._warmup_steps - self.made.onebit.stage()[1], 1)

    def _begin_one_bit(self):
        self.made = self._make(self._record)
        self._set_schedule(self.made.gather_seconds)
        self.lead.param_groups = self.made.param_groups
        self.lead.add_param_group = self.made.add_param_group
        self._scaling = getattr(self.lead, "_step_supports_amp_scaling", False)
        self.lead._step_supports_amp_scaling = True
        if self.made._remainder is not None:  # also done when its first pass has the buckets of the first step
            carried = set(self.made._parameters)
            self.made._remainder.state._number([one for one in self.hook._numbers if one not in carried])
        for one in self._words if not self.comm.rank else ():  # the same on all ranks
            warn(one)
        self._words = ()

    def _set_schedule(self, gather_seconds):
        """Sets the schedule of exchanges in one bit, and their time, to those of the optimizer that was made."""
        self.meter.schedule = ALLGATHER if gather_seconds else AUTOMATIC
        if gather_seconds:
            self._choice.exchange[METHODS.index(ONE)] = self._choice.exchange[METHODS.index(LOCAL)] = gather_seconds

    def _return_to_lead(self, convert, method):
        """Makes the lead run its own steps again."""
        made, self.made = self.made, None
        if convert:
            self.lead.state.update(moments_of(made, method != LOCAL))
        del self.lead.add_param_group
        self.lead._step_supports_amp_scaling = self._scaling
        self._reports.append(made.report())
        made.close()

    def _begin_local(self):
        """Begins local steps, from parameters that are equal on all ranks, or from a saved state."""
        steps, parts = self._saved or (self._choice.local_steps, None)
        if parts is None:
            self._average_thawed()
        self.local, self._saved = LocalSteps(self.comm, self.lead, int(steps), parts, self.meter.schedule), None
        self._scaling = getattr(self.lead, "_step_supports_amp_scaling", False)
        self.lead._step_supports_amp_scaling = True
        self.hook.waited = 0.0

    @torch.no_grad()
    def _average_thawed(self):
        """Averages layers that each rank has stepped by its own gradients, so that they become equal. Collective."""
        thawed = [one for one in self._once_frozen if one.requires_grad]
        for one, mean in zip(thawed, means(thawed, self.comm)):
            one.copy_(mean.view_as(one))

    def _end_local(self, convert, method):
        """Ends local steps. convert: whether the ranks' parameters become equal, and the lead gets moments for a
        method with an exchange in each step"""
        local, self.local = self.local, None
        if convert:
            local.end() if method != LOCAL else local.synchronize()
        self.lead._step_supports_amp_scaling = self._scaling
        self._reports.append(local.report(self.hook.averaged))
        local.close()

    def synchronize(self):
        """Makes the parameters equal on all ranks, for example before a validation or before one rank saves a
        checkpoint. Collective."""
        if self.local is not None:
            self.local.synchronize()

    # --- Measurements ----------------------------------------------------------------------------

    def _begin(self, record):
        """Continues from a saved record, with new times of steps."""
        self.method = record["method"]
        self.steps = self._loaded_steps = record.get("steps", 0)
        self.changes = record.get("changes", 0)
        self.decided, self._has_begun = record.get("decided", False), False
        self.expected = record.get("expected")
        self._extras, self._cost = dict(record.get("extras", {})), record.get("cost", 0.0)
        self._since, self._looks, self._compute = 0, 0, record.get("compute", 0.0)
        self._vain = 0  # the number of deviations since the last change, which changed nothing
        self._holds = self.hook.holds = False
        self._hides = record.get("hides", True)  # whether overlapped exchanges make steps shorter
        self._overlapped = collections.deque([], 4 * _MEASURED)  # seconds of the latest steps with overlapped exchanges
        self._pending = None  # a choice that waits for a timed step: the seconds of a step, and whether they deviate
        self._skip_next_steps(_SETTLING if self.decided else _FIRST)

    def _skip_next_steps(self, steps):
        self._window, self._skip = [], steps
        self._length = self._length if self.decided else _MEASURED
        if self.decided:
            self._skip += self._warmup_left()
        if self.local is not None and self.local.seconds is None:  # skips steps until an exchange has been measured
            self._skip += self.local.steps

    def _hold_next_step(self):
        """Makes the next step's exchange begin only when its gradients are computed, if its computation is to be
        timed."""
        is_timed = (not self.decided or self._pending is not None) and not self._joins()
        self._holds = self.hook.holds = is_timed and not self._skip and self.local is None
        if self.made is not None:
            self.made._backward.holds = self._holds

    def _record(self):
        names = "method", "steps", "changes", "decided", "expected"
        record = {name: getattr(self, name) for name in names}
        record.update(extras=self._extras, cost=self._cost, compute=self._compute, hides=self._hides)
        if self.local is None:
            return {"auto": json.dumps(record)}
        return {"auto": json.dumps({**record, "local_steps": self.local.steps}), "outer": self.local.part()}

    def _note_step(self, begin, end):
        """Called after each step, with the times when the step began and ended."""
        self.steps += 1
        before, self._end = self._end, end
        if before is None or self._joins():
            return
        total, compute, spent = end - before, begin - before, 0.0
        if self.local is not None:  # each step gets its part of the latest exchange
            spent = self.local.spent
            total += (self.local.seconds or 0.0) / self.local.steps - spent
        if self.made is None:
            self._own, compute = end - begin - spent, compute - self.hook.waited
        elif self._holds:
            self._own = max(end - begin - self._choice.exchange[METHODS.index(self._timed_method())], 0.0)
        compute += self._own  # a step of the library's optimizer includes its exchange
        total, compute = self.meter.step(self._timed_method(), total, compute, self._holds)
        if self._skip:
            self._skip -= 1
            self._overlapped.append(total)
            return
        self._since += 1
        self._window.append((total, compute))
        if len(self._window) >= self._length:
            self._compare()

    def _timed_method(self):
        """Returns the method whose exchange the timed steps use. After a choice the warm-up is not timed."""
        return EIGHT if not self.decided and self._warmup_left() else self.method

    def _max_over_ranks(self, values):
        """Returns the maximum of each value over all ranks. Collective."""
        if self._plan is None:
            self._plan = Plan(self.comm, len(values), operation="allgather", wire="dense")
        mine, found = torch.tensor(values, **FLOATS), torch.empty(len(values) * self.comm.size, **FLOATS)
        interruptible(self.comm, lambda: self._plan.allgather(mine, found))
        return found.view(self.comm.size, -1).max(0).values.tolist()

    def _compare(self):
        medians = [statistics.median(one) for one in zip(*self._window)]
        began = self.meter.now()
        if self._obstacle is _NONE and scalers_of(self.lead):
            self._obstacle = _SCALER
        measured = statistics.median(self._overlapped or [0.0]), self._cost_of_comparing, self._cost
        values = *medians, *measured, _OBSTACLES.index(self._obstacle)
        total, compute, overlapped, cost, self._cost, number = self._max_over_ranks(values)
        self._obstacle = _OBSTACLES[int(number)]
        self._cost_of_comparing = self.meter.now() - began
        self._window = []
        if self._holds or self.local is not None and self._device.type == "cpu":
            self._compute = compute
        usual = max(5, min(_WINDOW, math.ceil(5 / total)))
        self._length = max(usual, min(math.ceil(cost / _CHECKS / total), 5 * _WINDOW))
        if not self.decided:
            self._decide(total, compute, overlapped)
            return
        if self._pending is not None:
            self._reconsider(total, *self._pending)
            return
        self.expected = self.expected or total
        deviates = abs(total / self.expected - 1) > _DEVIATION
        is_due = self._cost < _PROBES * self._since * total or self._is_link_faster(total, compute)
        times = max(self.changes - 1, self._vain.bit_length()) if deviates else self._looks
        windows = 2 ** min(times, 4)
        if (deviates or is_due) and self._since >= windows * self._length:
            self._measure()
            self._pending, self._length = (total, deviates), _MEASURED

    def _is_link_faster(self, total, compute):
        """True if the exchange after local steps takes less than a quarter of the measured time. A step of them is
        hardly shorter then."""
        if self.local is None:
            return False
        return (total - compute) * self.local.steps < self._choice.exchange[METHODS.index(LOCAL)] / 4

    def _measure(self):
        """Measures an exchange of each method. Collective."""
        began, reasons = self.meter.now(), []

        def exchange(_, method, count, seconds):
            try:
                seconds[0] = self.meter.exchange(METHODS[method], count)
            except BaseException as reason:  # noqa: BLE001
                reasons.append(reason)
            return Status.ERROR_TRANSPORT if reasons else Status.OK

        function, call = _native.library().onebit_method_measure, _native.MethodExchange(exchange)
        arguments = self.comm.handle, ctypes.byref(self._choice), call, None
        code = interruptible(self.comm, lambda: function(*arguments))
        if reasons:
            raise reasons[0]
        check(code)
        self._cost = self.meter.now() - began

    def _choose(self, held, overlapped):
        """Returns the best method, and sets the expected step time of each method.

        held: measured seconds of a step whose exchange began only when the gradients were computed
        overlapped: measured seconds of a step whose exchange began earlier
        """
        choice, now = self._choice, METHODS.index(self._timed_method())
        choice.methods = self._allowed()
        choice.local_steps = self.local.steps if self.local is not None else 0
        choice.compute = self._compute
        for number, one in enumerate(self.methods):
            # Measured steps took this many seconds more than the model says. On a faster link they take less, never
            # more, so a method that is slower than expected is noticed.
            seconds = choice.exchange[number]
            extra, of_exchange = self._extras.get(one, (0.0, seconds))
            choice.extra[number] = extra * min(1.0, seconds / of_exchange if of_exchange else 1.0)
        if self.local is None:
            says_more = not self.decided and not self._warmup_left()  # a warm-up's step says little about others
            self._expect(True, now, held if says_more else 0.0)
            if says_more:
                self._extras[self.method] = choice.extra[now], choice.exchange[now]
            self._note_hiding(now, choice.expected[now], held - overlapped)
        current = (now, overlapped) if self.decided else (0, 0.0)  # the method of the first steps has no advantage
        self._call_choose(self.comm, not self._hides, *current)
        if self.decided:
            self._extras[self.method] = choice.extra[now], choice.exchange[now]
        return METHODS[choice.method]

    def _note_hiding(self, now, blocking, hidden):
        """Compares the seconds that overlapping saves in a step with those that the model expects. Other programs vary
        both. Fewer bits than necessary cost no time, but too many bits do, so the most part has to be saved.

        blocking: the model's seconds of a step without overlapping
        """
        self._expect(False, 0, 0.0)
        expected = blocking - self._choice.expected[now]
        if expected > _VISIBLE * self._choice.expected[now]:
            self._hides = hidden > _HIDDEN * expected

    def _expect(self, blocking, current, step):
        """Sets the expected step times. Local, since all ranks have the same numbers: on a link with a long delay each
        agreement takes long."""
        with Communicator.self_() as alone:
            self._call_choose(alone, blocking, current, step)

    def _call_choose(self, comm, blocking, current, step):
        self._choice.blocking, self._choice.current, self._choice.step = blocking, current, step
        arguments = comm.handle, ctypes.byref(self._choice)
        check(interruptible(comm, lambda: _native.library().onebit_method_choose(*arguments)))

    def _decide(self, total, compute, overlapped):
        left = self._warmup_left()
        if left <= _MEASURED:
            self._choose(total, overlapped)
        elif not self._ends_warmup(total, compute, overlapped):
            return self._skip_next_steps(left - _MEASURED - 1)  # the last step has second moments
        self._print_choice()
        self.decided = True
        self._change(METHODS[self._choice.method])

    def _ends_warmup(self, total, compute, overlapped):
        """True if a step of the warm-up takes much longer than local steps, which take at least `compute`."""
        if total < _PATIENCE * compute or self._choose(total, overlapped) != LOCAL:
            return False
        return total > _PATIENCE * self._choice.expected[METHODS.index(LOCAL)]

    def _reconsider(self, held, total, deviates):
        before = self.expected
        try:
            best = self._choose(held, total)
        except Error as reason:
            if reason.status != Status.ERROR_ARGUMENT:
                raise
            # The link has changed, and no method sends at most bytes_a_day: the training continues with its present
            # method.
            warn(f"{reason.message}; the training continues with {self.method}")
            self._looks, self._since, self.expected, self._pending = self._looks + 1, 0, total, None
            return self._skip_next_steps(0)
        self._vain = 0 if self._is_change(best) else self._vain + deviates
        if self._is_change(best) or deviates and not self._vain & (self._vain - 1):  # the 1st, 2nd, 4th, 8th ...
            dropped = "; residuals are dropped" if self.method not in (DENSE, best) else ""
            taken, expected = _format_seconds(total), _format_seconds(before)
            why = f"a step takes {taken}, but {expected} was expected" if deviates else "measured again"
            self._print_choice(f"; {why}{dropped}")
        self._looks += 1
        self.changes += best != self.method
        if best != self.method:
            self._looks = 0
        self._change(best)

    def _is_change(self, method):
        return method != self.method or (
            self.local is not None and method == LOCAL and self.local.steps != self._choice.local_steps)

    def _change(self, method):
        changed = self._is_change(method)
        if changed:
            self._switch_method(method)
        self.expected = self._choice.expected[METHODS.index(method)]
        self._since, self._pending = 0, None
        self._skip_next_steps(_SETTLING if changed else 0)

    def _why_not_local(self, method):
        """Returns the reason why a training that waits for the link longer than it computes has no local steps; '' if
        it does not wait that long or may have them."""
        waits = self._choice.expected[METHODS.index(method)] > 2 * self._choice.compute
        return f"; no local steps: {self._obstacle}" if waits and self._obstacle else ""

    def _print_choice(self, words=""):
        method = METHODS[self._choice.method]
        text = self._choice.text.decode() + self._why_not_local(method)
        text += ": local_steps=True allows them" if text.endswith("at a higher loss") else ""
        self._print(text + words + (_DIFFER if method == LOCAL != self.method else ""))

    def _print_beginning(self):
        """Prints how the training begins. Called at the first step, since a state may be loaded before it."""
        self._has_begun, left = True, self._warmup_left()
        if self.local is not None:
            self._print(f"goes on with local steps ({self.local.steps}), as saved{_DIFFER}")
        elif self.decided:
            self._print(f"goes on with {self.method}, as saved")
        elif left:
            self._print(f"begins with {left} steps in 8 bits, one bit's warm-up, and then chooses")

    def _print(self, text):
        if not self.comm.rank:
            print(f"onebit: auto {text}", file=sys.stderr, flush=True)

    # --- State -----------------------------------------------------------------------------------

    def _agreed_record(self, states, seconds=0.0):
        """Returns auto's record in the saved states. If they have none, returns a record of the method that saved
        them. Also agrees on the seconds of the `FirstSum`. Collective."""
        record, names, saved = None, set(), {}
        for state in states:
            found = take(copied(state))
            names.update(name for one in of_parameters(state) for name in one)
            parts = records(found)
            saved.update(parts)
            record = record or next((one["auto"] for one in parts.values() if "auto" in one), None)
        if record is not None:
            record = json.loads(record)
        elif any(isinstance(name, str) and name.startswith("head_") for name in names):
            record = {"method": ONE, "decided": True}
        else:
            record = {"method": DENSE}
        made = max((float(of["step"]) for one in states for of in of_parameters(one) if "step" in of), default=0)
        own = f"method {record['method']}, {made:g} steps{'' if record.get('decided') else ', before a choice'}"
        found = [json.loads(one) for one in gather(self.comm, json.dumps([own, seconds]).encode())]
        every = {text for text, _ in found}
        if len(every) > 1:
            raise argument_error(f"the ranks' states differ: {'; '.join(sorted(every))}")
        # Connecting may make a short sum longer, so only a long one is not measured again.
        shortest = min(seconds for _, seconds in found)
        self.meter.of_small_sum = shortest if shortest >= _SLOW else 0.0
        if record["method"] not in self.methods:
            raise argument_error(f"the state has method {record['method']}, not one of {', '.join(self.methods)}")
        if record["method"] == LOCAL:
            self._saved = record["local_steps"], saved_parts(self.comm, saved)
            self._local_steps = True  # the training goes on as it was
        return record

    def _state_dict(self):
        if self.local is not None and not self.local.is_equal and not self._said:
            self._said = True
            warn("with local steps each rank has its own model. If one rank saves for all, "
                 "call consolidate_state_dict() on all ranks first; if each rank saves its "
                 "own, nothing is missing")
        return self._dense_state[0]() if self.made is None else self.made.state_dict()

    def _load_state_dict(self, state_dict):
        if self._closed:
            raise argument_error("the optimizer is closed: load a state before close()")
        dicts = state_dict if isinstance(state_dict, (list, tuple)) else [state_dict]
        record = self._agreed_record([states_of(one) for one in dicts])
        self._switch_method(record["method"], convert=False)
        load = self._dense_state[1] if self.made is None else self.made.load_state_dict
        load(_without_hook(dicts) if record.get("waits") else state_dict)
        if self.made is not None:
            self.lead.param_groups = self.made.param_groups
        self._begin(record)
        self._begin_training()

    def _consolidate(self, to=0):
        self.synchronize()
        consolidate = self._dense_state[2] if self.made is None else self.made.consolidate_state_dict
        consolidate(to)

    def _torch_state_dict(self):
        if self.made is not None:
            return self.made.torch_state_dict()
        self.synchronize()
        if self.local is None:
            self.average_own_moments()
            return self._own_state()
        with averaged_moments(self.lead, self.comm):
            return copy.deepcopy(self._own_state())

    # --- Reports ---------------------------------------------------------------------------------

    def describe(self):
        text = f"auto: {self.method}{self._why_not_local(self.method)}"
        more = self.made or self.local
        return text if more is None else f"{text}; {more.describe()}"

    def report(self):
        """Returns the `Report` of all methods together."""
        every = [self.hook.report(), *self._reports]
        every += [self.made.report()] if self.made is not None else []
        every += [self.local.report(self.hook.averaged)] if self.local is not None else []
        last = every[-1]
        sums = [sum(getattr(one, name) for one in every)
                for name in ("skipped", "overlapped", "bytes_sent", "dense_bytes", "checkpoint_bytes")]
        sums[1] = min(sums[1], self.steps - self._loaded_steps)  # the hook counts backward passes
        return Report(self.steps, *sums[:4], last.averaged, sums[4], self._loaded_steps)

    def close(self):
        """Closes on all ranks. The method stays the same, but after local steps the parameters are made equal."""
        if self.comm is None:
            return
        if self.local is not None:
            if sys.exc_info()[0] is None:
                self.local.synchronize(LAST)
                self._shares = shares_of(self.lead, self.comm)
            else:
                warn("closed during an exception that other ranks may not have: models were not made "
                     "equal after local steps, and differ between ranks")
            self._end_local(False, LOCAL)
        if self.made is not None:
            self.made.close()
        if self._plan is not None:
            self._plan.close()
        self.hook.close()
        self.comm.close()
        self.comm = None
