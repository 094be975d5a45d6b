"""Chooses the bits of gradients for a program's own optimizer, and whether each rank normalises its gradients before
the exchange."""

import torch

# The steps of these optimizers do not change if all gradients of an element are multiplied by a positive
# number.
_ADAPTIVE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)


def is_adaptive(optimizer):
    """True for Adam and similar optimizers, unless weight decay is added to the gradient."""
    coupled = not isinstance(optimizer, torch.optim.AdamW) and any(
        one.get("weight_decay", 0) and not one.get("decoupled_weight_decay")
        for one in optimizer.param_groups
    )
    return isinstance(optimizer, _ADAPTIVE) and not coupled


def choose(optimizer, bits, normalise):
    """Returns the bits, and whether to normalise. bits: None: 8, with which every optimizer trains as with dense
    sums. normalise: None: chosen by the bits and the kind of the optimizer"""
    bits = 8 if bits is None else bits
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"bits is {bits}, not 1, 2, 4 or 8")
    if normalise is None:
        normalise = bits < 4 and optimizer is not None and is_adaptive(optimizer)
    if normalise and optimizer is not None and not is_adaptive(optimizer):
        raise ValueError(f"normalise is for Adam and its like, not for {type(optimizer).__name__}")
    return bits, bool(normalise)


class Normaliser:
    """Divides a rank's gradients by the root of their own second moments, which take 4 bytes a parameter.
    The values of an element then have about one magnitude, so that few bits are enough. Adam divides by
    that magnitude anyway."""

    _BETA = 0.999

    def __init__(self):
        self._moments = {}  # by parameter's number: (mean of squares, number of steps)

    def state(self):
        return {number: (one.clone(), steps) for number, (one, steps) in self._moments.items()}

    def load(self, state):
        self._moments = {number: (one.clone(), steps) for number, (one, steps) in state.items()}

    def divide(self, numbers, gradients):
        """Divides gradients in place. Values that are not finite change no moment."""
        for number, gradient in zip(numbers, gradients):
            moment, steps = self._moments.get(number, (None, 0))
            if moment is None:
                moment = torch.zeros(gradient.shape, dtype=torch.float32, device=gradient.device)
            wide = gradient.float()
            if bool(wide.isfinite().all()):
                steps += 1
                moment.mul_(self._BETA).addcmul_(wide, wide, value=1 - self._BETA)
                self._moments[number] = moment, steps
            root = (moment / (1 - self._BETA ** max(steps, 1))).sqrt_()
            gradient.copy_(torch.where(root > 0, wide / root, wide))
